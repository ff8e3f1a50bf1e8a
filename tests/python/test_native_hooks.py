"""The engine's hooks, against torch's and against plain numpy."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep import _C, hooks
from models import Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data

NATIVE = [hooks.AllReduce, hooks.FP16, hooks.BF16, hooks.Int8, hooks.PowerSGD, hooks.BatchedPowerSGD]


def test_the_package_and_the_engine_declare_the_same_hooks():
    engine = {name: {arg: default for arg, default, _ in params} for name, _, params in _C.comm_hooks()}
    package = {kind.name: {field.name: field.default for field in dataclasses.fields(kind)} for kind in NATIVE}
    assert package == engine


class Given(nn.Module):
    """Its gradients are what they are told to be."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * grad).sum() for weight, grad in zip(self.weights, grads, strict=True))


def grads_of(rank: int, step: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def reduced(model: nn.Module, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    model(grads).backward()
    return [p.grad.clone() for p in model.parameters()]


# ---- half precision ----


def _halves(name: str, native: hooks.NativeHook, wild: bool) -> None:
    shapes = [(33, 7), (5,), (2, 3, 4)]
    ours, theirs = lockstep.DistributedDataParallel(Given(*shapes)), TorchDDP(Given(*shapes))
    ours.register_comm_hook(native)
    theirs.register_comm_hook(None, getattr(default_hooks, name))
    for step in range(4):
        grads = grads_of(dist.get_rank(), step, shapes)
        if wild:  # too large for fp16, and too small for its normal numbers
            grads[0][0] *= 1e6
            grads[0][1] *= 1e-6
        for a, b in zip(reduced(ours, grads), reduced(theirs, grads), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [hooks.FP16, hooks.BF16])
def test_casts_are_bit_equal_to_torchs_hooks_in_torchs_order(two_or_three_ranks, kind):
    two_or_three_ranks.run(_halves, f"{kind.name}_compress_hook", kind(order="cast_first"), True)


@pytest.mark.parametrize("kind", [hooks.FP16, hooks.BF16])
def test_on_two_ranks_dividing_first_gives_the_same_bits(ranks, kind):
    ranks.run(_halves, f"{kind.name}_compress_hook", kind(), False)


# ---- PowerSGD ----

SHAPES = [(24, 16), (16,), (16, 24), (24, 16), (6, 5, 4), (3, 3)]


def _torch_state(native: hooks.PowerSGD) -> PowerSGDState:
    return PowerSGDState(
        None,
        matrix_approximation_rank=native.rank,
        start_powerSGD_iter=native.start_iteration,
        min_compression_rate=native.min_compression_rate,
        use_error_feedback=native.error_feedback,
        warm_start=native.warm_start,
        orthogonalization_epsilon=native.epsilon,
        random_seed=native.seed,
        batch_tensors_with_same_shape=native.batch_same_shape,
    )


def _like_torchs_power_sgd(native: hooks.PowerSGD, how: str) -> None:
    # In fp64, where rounding cannot be taken for anything else after 20 steps.
    dtype = torch.float64
    ours, theirs = (wrap(Given(*SHAPES, dtype=dtype)) for wrap in (lockstep.DistributedDataParallel, TorchDDP))
    state = _torch_state(native)
    theirs.register_comm_hook(state, powerSGD_hook)
    if how == "by_name":
        ours.set_comm_hook(native)
    else:
        ours.register_comm_hook(_torch_state(native), powerSGD_hook)
        assert "power_sgd" in ours.reducer.hook_signature()
    for step in range(20):
        grads = grads_of(dist.get_rank(), step, SHAPES, dtype)
        for a, b in zip(reduced(ours, grads), reduced(theirs, grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    stats = ours.comm_hook_stats()
    assert (stats["rate"], stats["numel_before"], stats["numel_after"]) == state.compression_stats()
    assert stats["steps"] == state.iter == 20
    _same_memory(ours, state)


def _same_memory(ours: Any, state: PowerSGDState) -> None:
    """Q and errors, by parameter. Torch's lie in one bucket: Q by shape, errors in the order of the bucket."""
    kept = ours.comm_hook_state_dict()
    names = [ours.reducer.param_names[i] for i in ours.reducer.bucket_params()[0]]
    assert len(ours.reducer.bucket_params()) == 1
    shapes = [tuple(p.shape) for p in ours.module.parameters()]
    matrix = {n: (s[0], math.prod(s[1:])) for n, s in zip(ours.reducer.param_names, shapes, strict=True)}
    if state.use_error_feedback:
        offset = 0
        for name in names:
            numel = math.prod(matrix[name])
            if f"error/{name}" in kept:
                theirs = state.error_dict[0][offset : offset + numel]
                torch.testing.assert_close(kept[f"error/{name}"], theirs, rtol=1e-9, atol=1e-9)
            offset += numel
    if state.warm_start:
        compressed = [n for n in names if f"factor/{n}" in kept]
        order = sorted(compressed, key=lambda n: [matrix[c] for c in compressed].index(matrix[n]))
        mine = torch.cat([state.q_memory_dict[0][:0], *(kept[f"factor/{n}"] for n in order)])
        torch.testing.assert_close(mine, state.q_memory_dict[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["by_name", "as_torchs"])
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1},
        {"rank": 2, "epsilon": 1e-8},
        {"rank": 4},
        {"rank": 32},
        {"rank": 2, "warm_start": False},
        {"rank": 1, "error_feedback": False, "seed": 5},
        {"rank": 2, "batch_same_shape": True},
        {"rank": 1, "min_compression_rate": 2.0},
        {"rank": 1, "min_compression_rate": 1000.0},  # compresses nothing
    ],
    ids=str,
)
def test_power_sgd_goes_step_by_step_with_torchs_hook(two_or_three_ranks, options, how):
    native = hooks.PowerSGD(**{"start_iteration": 2, "min_compression_rate": 0.5, **options})
    two_or_three_ranks.run(_like_torchs_power_sgd, native, how)


def _numpy_power_sgd(grads: list[np.ndarray], errors: list[np.ndarray], q: np.ndarray) -> tuple:
    """One step of the paper, with the matrices of all ranks: the mean, new errors, new Q."""
    matrices = [g + e for g, e in zip(grads, errors, strict=True)]
    p = sum(m @ np.linalg.qr(q)[0] for m in matrices)
    p = np.linalg.qr(p)[0]
    q = sum(m.T @ p for m in matrices) / len(matrices)
    mean = p @ q.T
    return mean, [m - mean for m in matrices], q


def _like_numpy(rank: int, batched: bool) -> None:
    shape = (20, 12)
    side = math.ceil(math.sqrt(math.prod(shape)))
    world = dist.get_world_size()
    model = lockstep.DistributedDataParallel(Given(shape, dtype=torch.float64))
    kind = hooks.BatchedPowerSGD if batched else hooks.PowerSGD
    model.set_comm_hook(kind(rank=rank, start_iteration=0, min_compression_rate=0.0, seed=3))
    torch_seed = np.random.RandomState(3).randint(1_000_000_000)
    generator = torch.Generator().manual_seed(torch_seed)
    rows, cols = (side, side) if batched else shape
    q = torch.randn(1, cols, rank, generator=generator, dtype=torch.float64)[0].numpy()
    errors = [np.zeros((rows, cols))] * world
    for step in range(20):
        given = [grads_of(r, step, [shape], torch.float64)[0].numpy() for r in range(world)]
        if batched:
            given = [np.pad(g.ravel(), (0, side**2 - g.size)).reshape(side, side) for g in given]
        mean, errors, q = _numpy_power_sgd(given, errors, q)
        grad = reduced(model, grads_of(dist.get_rank(), step, [shape], torch.float64))[0]
        np.testing.assert_allclose(grad.numpy().ravel(), mean.ravel()[: math.prod(shape)], rtol=1e-7, atol=1e-9)
    error = model.comm_hook_state_dict()["error/weights.0"].numpy()
    np.testing.assert_allclose(error, errors[dist.get_rank()].ravel()[: error.size], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("batched", [False, True], ids=["per_parameter", "batched"])
@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_power_sgd_is_what_the_paper_says(two_or_three_ranks, rank, batched):
    two_or_three_ranks.run(_like_numpy, rank, batched)


def _zero_gradients() -> None:
    model = lockstep.DistributedDataParallel(Given((8, 8)))
    model.set_comm_hook("power_sgd", rank=2, start_iteration=0, min_compression_rate=0.1)
    for step in range(4):
        grads = grads_of(dist.get_rank(), step, [(8, 8)])
        grad = reduced(model, [grads[0] * (step % 2)])[0]
        assert grad.isfinite().all()


def test_power_sgd_takes_gradients_that_vanish(ranks):
    ranks.run(_zero_gradients)


# ---- int8 ----


def _quantized(data: np.ndarray) -> np.ndarray:
    """The values that remain after rounding to 8 bits per block of 256, data of a whole number of blocks."""
    blocks = data.reshape(-1, 256)
    scales = (np.abs(blocks).max(1) / np.float32(127)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.where(scales[:, None] > 0, np.rint(blocks / scales[:, None]), 0).astype(np.float32)
    return (codes * scales[:, None]).reshape(data.shape)


def _int8_like_numpy(feedback: bool) -> None:
    shapes = [(40, 30), (7,)]
    world, rank = dist.get_world_size(), dist.get_rank()
    model = lockstep.DistributedDataParallel(Given(*shapes))
    model.set_comm_hook("int8", error_feedback=feedback)
    errors = [[np.zeros(math.prod(s), np.float32) for s in shapes] for _ in range(world)]
    for step in range(5):
        ours = reduced(model, grads_of(rank, step, shapes))
        for i, shape in enumerate(shapes):
            numel = math.prod(shape)
            pad = -numel % 256
            sent = []
            for r in range(world):
                exact = grads_of(r, step, shapes)[i].numpy().ravel() * np.float32(1 / world) + errors[r][i]
                sent.append(_quantized(np.pad(exact, (0, pad))))
                if feedback:
                    errors[r][i] = exact - sent[-1][:numel]
            total = np.sum(sent, axis=0, dtype=np.float32)
            mean = _quantized(total)
            np.testing.assert_allclose(ours[i].numpy().ravel(), mean[:numel], rtol=1e-5, atol=1e-6)
            if feedback:  # the rank that rounded the sum adds what it left out to its next gradient
                left_out = (total - mean)[:numel]
                kept = model.comm_hook_state_dict()[f"error/weights.{i}"]
                everywhere = kept.double().clone()
                dist.all_reduce(everywhere)
                expected = sum(errors[r][i] for r in range(world)) + left_out
                np.testing.assert_allclose(everywhere.numpy(), expected, rtol=1e-3, atol=1e-5)
                gathered = [torch.zeros_like(kept) for _ in range(world)]
                dist.all_gather(gathered, kept)
                errors_of = [g.numpy() for g in gathered]
                for r in range(world):
                    errors[r][i] = errors_of[r]


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "error_feedback"])
def test_int8_is_what_numpy_makes_of_it(two_or_three_ranks, feedback):
    two_or_three_ranks.run(_int8_like_numpy, feedback)


def _stochastic() -> None:
    shape = (16, 64)
    model = lockstep.DistributedDataParallel(Given(shape))
    model.set_comm_hook("int8", rounding="stochastic", seed=7)
    grads = grads_of(dist.get_rank(), 0, [shape])
    total = torch.zeros(shape)
    once = reduced(model, grads)[0]
    steps = 400
    for _ in range(steps):
        total += reduced(model, grads)[0]
    exact = mean_over_ranks(grads[0])
    step = exact.abs().max() / 127 * 2
    assert (once - exact).abs().max() <= 2 * step
    # Independent errors of at most two steps: their mean over 400 shrinks twentyfold; 5 standard deviations.
    assert (total / steps - exact).abs().max() < 5 * step / math.sqrt(steps)
    assert ((total / steps - exact).abs().mean() < (once - exact).abs().mean() / 5).item()


def test_stochastic_rounding_is_right_in_the_mean(ranks):
    ranks.run(_stochastic)


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


# ---- saved and loaded ----


def _train(model: Any, first: int, steps: int) -> list[torch.Tensor]:
    grads = []
    for step in range(first, first + steps):
        model.zero_grad()
        model(rank_data(3, 6, step=step)).square().sum().backward()
        grads += [p.grad.clone() for p in model.parameters()]
    return grads


def _resumed(native: hooks.NativeHook) -> None:
    def wrapped() -> Any:
        torch.manual_seed(1)
        model = lockstep.DistributedDataParallel(Reversed(), bucket_cap_mb=0.0003)
        model.set_comm_hook(native)
        return model

    went_on = wrapped()
    _train(went_on, 0, 5)
    file = io.BytesIO()
    torch.save(went_on.comm_hook_state_dict(), file)
    file.seek(0)
    resumed = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_comm_hook_state_dict(torch.load(file))
    for a, b in zip(_train(went_on, 5, 4), _train(resumed, 5, 4), strict=True):
        assert torch.equal(a, b)  # also where a sum depends on its place in the bucket


@pytest.mark.parametrize(
    "native",
    [
        hooks.PowerSGD(rank=2, start_iteration=2, min_compression_rate=0.3),
        hooks.PowerSGD(rank=1, start_iteration=0, min_compression_rate=0.3, warm_start=False),
        hooks.Int8(error_feedback=True),
        hooks.Int8(rounding="stochastic", error_feedback=True),
    ],
    ids=["power_sgd", "cold_power_sgd", "int8", "stochastic_int8"],
)
def test_a_resumed_run_goes_on_bit_for_bit(two_or_three_ranks, native):
    two_or_three_ranks.run(_resumed, native)


def _misfitting() -> None:
    native = hooks.PowerSGD(rank=1, start_iteration=0, min_compression_rate=0.1)

    model = lockstep.DistributedDataParallel(Given((6, 6), (8, 6)))
    model.set_comm_hook(native)
    reduced(model, grads_of(dist.get_rank(), 0, [(6, 6), (8, 6)]))
    saved = model.comm_hook_state_dict()

    other = lockstep.DistributedDataParallel(Given((6, 6), (6, 9), (4, 4)))
    other.set_comm_hook(native)
    with pytest.warns(UserWarning, match=r"another size.*'weights\.1' \(48 elements, now 54\)"):
        other.load_comm_hook_state_dict(saved)
    assert torch.equal(other.comm_hook_state_dict()["error/weights.0"], saved["error/weights.0"])
    assert "error/weights.1" not in other.comm_hook_state_dict()

    alien = lockstep.DistributedDataParallel(nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match="keeps nothing between steps"):
        alien.load_comm_hook_state_dict(saved)
    alien.set_comm_hook(native)
    before = alien.comm_hook_state_dict()
    with pytest.raises(RuntimeError, match=r"another model.*weights\.0"):
        alien.load_comm_hook_state_dict(saved)
    assert alien.comm_hook_state_dict().keys() == before.keys()

    # One state for all ranks: the errors are those of rank 0 only.
    everybodys = [saved]
    dist.broadcast_object_list(everybodys)
    same = lockstep.DistributedDataParallel(Given((6, 6), (8, 6)))
    same.set_comm_hook(native)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        same.load_comm_hook_state_dict(everybodys[0])
    told = [str(r.message) for r in records if "saved by rank 0" in str(r.message)]
    assert len(told) == (dist.get_rank() != 0)
    assert ("error/weights.0" in same.comm_hook_state_dict()) == (dist.get_rank() == 0)
    assert_bit_equal_on_all_ranks(reduced(same, grads_of(dist.get_rank(), 1, [(6, 6), (8, 6)])), "gradient")


def test_a_state_that_does_not_fit_is_named_and_what_fits_is_kept(ranks):
    ranks.run(_misfitting)


# ---- torch's hooks ----


def _stand_in(hook_name: str, native: bool | None) -> str:
    hook = {"power": powerSGD_hook, "batched": batched_powerSGD_hook}.get(hook_name) or getattr(
        default_hooks, hook_name
    )
    state = PowerSGDState(None, 1, 2, 0.1) if hook_name in ("power", "batched") else None
    model = lockstep.DistributedDataParallel(Reversed())
    model.register_comm_hook(state, hook, native=native)
    _train(model, 0, 2 if hook_name == "batched" and native is False else 5)  # torch's asserts at the third
    return model.reducer.hook_signature()


@pytest.mark.parametrize(
    ("hook", "signature"),
    [
        ("allreduce_hook", "allreduce(division='after_packing')"),
        ("fp16_compress_hook", "fp16(order='cast_first')"),
        ("bf16_compress_hook", "bf16(order='cast_first')"),
        ("power", "power_sgd(batch_same_shape=false"),
        ("batched", "batched_power_sgd(batch_same_shape=false"),
    ],
)
def test_torchs_hooks_select_the_engines_unless_told_not_to(ranks, hook, signature):
    assert all(text.startswith(signature) for text in ranks.run(_stand_in, hook, None))
    assert all("(" not in text for text in ranks.run(_stand_in, hook, False))


def _another_group() -> str:
    group = dist.new_group([0, 1])
    model = lockstep.DistributedDataParallel(Reversed())
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    _train(model, 0, 2)
    return model.reducer.hook_signature()


def test_a_hook_of_torch_for_another_group_stays_as_it_is(ranks):
    assert ranks.run(_another_group) == ["fp16_compress_hook"] * 2


def _linked_state() -> None:
    native = hooks.PowerSGD(rank=2, start_iteration=2, min_compression_rate=0.5)
    state, reference = _torch_state(native), _torch_state(native)
    ours, theirs = lockstep.DistributedDataParallel(Given(*SHAPES)), TorchDDP(Given(*SHAPES))
    ours.register_comm_hook(state, powerSGD_hook)
    theirs.register_comm_hook(reference, powerSGD_hook)
    assert isinstance(state, PowerSGDState)
    for step in range(6):
        grads = grads_of(dist.get_rank(), step, SHAPES)
        reduced(ours, grads)
        reduced(theirs, grads)
        assert state.iter == reference.iter == step + 1
        assert state.compression_stats() == reference.compression_stats()
    assert state.matrix_approximation_rank == 2
    assert state.error_dict.keys() == state.q_memory_dict.keys() == {0}
    assert np.array_equal(state.rng.get_state()[1], reference.rng.get_state()[1])
    with pytest.raises(AttributeError, match="taken over by the engine"):
        state.matrix_approximation_rank = 4
    other = lockstep.DistributedDataParallel(Given(*SHAPES))
    with pytest.raises(RuntimeError, match="in use by another model"):
        other.register_comm_hook(state, powerSGD_hook)

    resumed = lockstep.DistributedDataParallel(Given(*SHAPES))
    copied = pickle.loads(pickle.dumps(state))
    assert copied.iter == 6 and copied.compression_stats() == state.compression_stats()
    resumed.register_comm_hook(copied, powerSGD_hook)
    grads = grads_of(dist.get_rank(), 7, SHAPES)
    for a, b in zip(reduced(ours, grads), reduced(resumed, grads), strict=True):
        assert torch.equal(a, b)

    ours.set_comm_hook("bf16")
    assert state.iter == 7  # what was last true
    reduced(ours, grads)
    assert state.iter == 7


def test_a_state_of_torch_answers_from_the_engine(ranks):
    ranks.run(_linked_state)
