"""The engine's comm hooks in every mode: composed, replaced, agreed on, refused."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from hook_kit import Given, grads_of, reduced
from lockstep import _C, hooks
from models import Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data

NATIVE = [hooks.AllReduce, hooks.FP16, hooks.BF16, hooks.Int8, hooks.PowerSGD, hooks.BatchedPowerSGD]


def test_the_package_and_the_engine_declare_the_same_hooks():
    engine = {name: {arg: default for arg, default, _ in params} for name, _, params in _C.comm_hooks()}
    package = {kind.name: {field.name: field.default for field in dataclasses.fields(kind)} for kind in NATIVE}
    assert package == engine


# ---- every hook in every mode ----


def _whole(kind: type[hooks.NativeHook]) -> hooks.NativeHook:
    """As little loss as the hook can do with."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**({"rank": 32, "start_iteration": 0, "min_compression_rate": 0.0} if "rank" in names else {}))


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "lazy": {"lazy_bucket_allocation": True},
    "find_unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "small_buckets": {"bucket_cap_mb": 0.0003},
    "skip_unused": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}


class Branches(nn.Module):
    """A sparse table, a complex layer, two dtypes, and a branch that only some steps take."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8, sparse=True)
        self.complex = nn.Linear(8, 8, dtype=torch.cfloat)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.often = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, inputs: tuple[torch.Tensor, bool]) -> torch.Tensor:
        tokens, branch = inputs
        x = self.table(tokens)
        x = self.complex(x.to(torch.cfloat)).real
        x = self.often(self.wide(x.double()).float())
        x = x + self.conv(x.view(-1, 1, 8, 1).expand(-1, 1, 8, 8)).mean()
        return self.sometimes(x) if branch else x


def _compare(pair: Pair, factor: float = 1.0) -> None:
    assert_bit_equal_on_all_ranks([p.grad for p in pair.wrapped.parameters()], "gradient")
    for ours, (name, theirs) in zip(pair.wrapped.parameters(), pair.plain.named_parameters(), strict=True):
        expected = mean_over_ranks(torch.zeros_like(theirs) if theirs.grad is None else theirs.grad)
        if ours.grad is None:
            assert not expected.any(), name
            continue
        dense = ours.grad.to_dense() if ours.grad.is_sparse else ours.grad
        assert dense.dtype == theirs.dtype
        bound = 0.03 * factor * expected.abs().max().item() + 1e-6
        assert (dense - expected).abs().max().item() <= bound, name


def _mode(kind: type[hooks.NativeHook], mode: str) -> None:
    warnings.simplefilter("ignore")
    pair = Pair(Branches, lambda module: lockstep.DistributedDataParallel(module, **MODES[mode]))
    pair.wrapped.set_comm_hook(_whole(kind))
    varies = mode in ("find_unused", "skip_unused")

    def inputs(step: int) -> tuple[torch.Tensor, bool]:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        branch = (step + dist.get_rank()) % 3 != 0 if varies else True
        return torch.randint(0, 10, (6,), generator=generator), branch

    for step in range(7):
        if step % 3 == 2:
            with pair.wrapped.no_sync():
                pair.backward(lambda step=step: inputs(step + 100))
        pair.backward(lambda step=step: inputs(step))
        _compare(pair)
        pair.zero(set_to_none=step % 2 == 0 or varies)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_every_hook_reduces_every_kind_of_parameter_in_every_mode(ranks, kind, mode):
    ranks.run(_mode, kind, mode)


def _joined(kind: type[hooks.NativeHook]) -> None:
    torch.manual_seed(1)
    model = lockstep.DistributedDataParallel(Reversed(), bucket_cap_mb=0.0003)
    model.set_comm_hook(_whole(kind))
    with model.join():
        for step in range(5 - 2 * dist.get_rank()):
            model.zero_grad()
            model(rank_data(3, 6, step=step)).square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.05 * p.grad)
    assert_bit_equal_on_all_ranks(model.parameters(), "parameter")
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_every_hook_goes_on_when_ranks_run_out_of_data(ranks, kind):
    ranks.run(_joined, kind)


def _subgroup(kind: type[hooks.NativeHook]) -> None:
    group = dist.new_group([0, 2])
    if dist.get_rank() != 1:
        shape = (9, 8)
        model = lockstep.DistributedDataParallel(Given(shape), process_group=group)
        model.register_comm_hook(_whole(kind))
        grad = reduced(model, grads_of(dist.get_rank(), 0, [shape]))[0]
        expected = sum(grads_of(rank, 0, [shape])[0] for rank in (0, 2)) / 2
        assert (grad - expected).abs().max() <= 0.03 * expected.abs().max()
    dist.barrier()
    if dist.get_rank() != 1:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_every_hook_reduces_within_a_subset_of_the_ranks(pool_of, kind):
    pool_of(3).run(_subgroup, kind)


# ---- replacing, agreeing, refusing ----


def _replaced() -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module, gradient_as_bucket_view=True))
    for step, kind in enumerate([*NATIVE, hooks.AllReduce]):
        pair.wrapped.set_comm_hook(_whole(kind))
        with pair.wrapped.no_sync():
            pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.wrapped.set_comm_hook("fp16")  # in the middle of accumulation: nothing is lost
        pair.wrapped.set_comm_hook(_whole(kind))
        pair.backward(lambda step=step: rank_data(3, 6, step=step + 50))
        _compare(pair)
        pair.zero()


def test_a_hook_can_be_replaced_between_steps(two_or_three_ranks):
    two_or_three_ranks.run(_replaced)


def _in_the_middle() -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module, bucket_cap_mb=0.0003))
    texts = []

    def in_backward(grad: torch.Tensor) -> None:
        actions = [
            lambda: pair.wrapped.set_comm_hook("fp16"),
            pair.wrapped.comm_hook_state_dict,
            lambda: pair.wrapped.load_comm_hook_state_dict({}),
        ]
        for action in actions:
            with pytest.raises(RuntimeError, match="LS-003") as error:
                action()
            texts.append(str(error.value))

    handle = pair.wrapped.module.layers[0].weight.register_hook(in_backward)
    pair.backward(lambda: rank_data(3, 6))
    assert len(texts) == 3
    pair.check()  # not rounded to fp16
    handle.remove()
    pair.zero()
    pair.backward(lambda: rank_data(3, 6, step=1))
    pair.check()


def test_a_hook_is_not_replaced_within_a_step_and_the_step_is_right(ranks):
    ranks.run(_in_the_middle)


def _differing(by_rank: list[hooks.NativeHook]) -> str:
    model = lockstep.DistributedDataParallel(Reversed())
    model.set_comm_hook(by_rank[dist.get_rank()])
    with pytest.raises(RuntimeError) as error:
        model(rank_data(3, 6)).sum().backward()
    return str(error.value)


@pytest.mark.parametrize(
    "by_rank",
    [
        [hooks.FP16(), hooks.BF16()],
        [hooks.PowerSGD(rank=1), hooks.PowerSGD(rank=2)],
        [hooks.Int8(), hooks.AllReduce()],
    ],
    ids=["hooks", "arguments", "layouts"],
)
def test_ranks_with_different_hooks_or_arguments_all_say_so(broken_ranks, by_rank):
    for text in broken_ranks.run(_differing, by_rank):
        assert "different comm hooks" in text and "same arguments" in text


def _refused() -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module))
    model = pair.wrapped
    with pytest.raises(RuntimeError, match=r"no comm hook called 'fp_16'\. Known hooks: allreduce, fp16"):
        model.set_comm_hook("fp_16")
    with pytest.raises(RuntimeError, match=r"no argument 'matrix_rank'.*rank: int = 1"):
        model.set_comm_hook("power_sgd", matrix_rank=1)
    with pytest.raises(RuntimeError, match=r"rank=0, but rank must be from 1 to 32"):
        model.set_comm_hook(hooks.PowerSGD(rank=0))
    with pytest.raises(RuntimeError, match=r"start_iteration must be from 0"):
        model.set_comm_hook("power_sgd", start_iteration=-1)
    with pytest.raises(TypeError, match=r"rank is None"):
        model.set_comm_hook("power_sgd", rank=None)
    with pytest.raises(RuntimeError, match=r"one of 'divide_first', 'cast_first'"):
        model.set_comm_hook("fp16", order="cast")
    assert model.reducer.hook_signature().startswith("allreduce(")
    model.register_comm_hook(hooks.AllReduce())
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(hooks.FP16())
    pair.backward(lambda: rank_data(3, 6))
    pair.check()


def test_wrong_names_and_arguments_are_refused_with_the_right_ones(ranks):
    ranks.run(_refused)
