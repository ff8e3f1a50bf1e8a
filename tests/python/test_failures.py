"""A backward that throws, and one that ends too early: what is said, and what is left behind."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from models import Branches, Reversed, tokens
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data


class Throwing(torch.autograd.Function):
    """The identity; its backward raises while ``armed`` holds something."""

    armed: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if Throwing.armed:
            raise ValueError("user code failed")
        return grad


class ThrowsInTheMiddle(nn.Module):
    """Backward reaches ``late`` first, then throws, and never reaches ``early``."""

    def __init__(self) -> None:
        super().__init__()
        self.early = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.late(Throwing.apply(self.early(x)))


def _throws(options: dict, on_ranks: list[int]) -> None:
    pair = Pair(
        ThrowsInTheMiddle, lambda module: lockstep.DistributedDataParallel(module, bucket_cap_mb=1e-6, **options)
    )
    for step in range(2):  # past the change of plan
        pair.backward(lambda step=step: rank_data(3, 4, step=step))
        pair.zero()

    if not options.get("gradient_as_bucket_view"):
        with pair.wrapped.no_sync():
            pair.wrapped(rank_data(3, 4)).sum().backward()
    before = [None if p.grad is None else p.grad.clone() for p in pair.wrapped.parameters()]
    if dist.get_rank() in on_ranks:
        Throwing.armed.append(True)
        with pytest.raises(ValueError, match="user code failed"):
            pair.wrapped(rank_data(3, 4)).sum().backward()
        Throwing.armed.clear()
        # What was not reduced is what it was.
        for p, old in zip(list(pair.wrapped.parameters())[:2], before[:2], strict=True):
            assert (p.grad is None and old is None) or torch.equal(p.grad, old)
    else:
        pair.wrapped(rank_data(3, 4)).sum().backward()
        early = [p.grad for p in pair.wrapped.module.early.parameters()]
        assert all(grad.isnan().all() for grad in early), "a mean without all ranks must not look like one"

    pair.zero()
    if len(on_ranks) < dist.get_world_size():
        with pytest.raises(RuntimeError, match=r"rank 1 swallowed an exception .* rank 0 had none.*\[LS-019\]"):
            pair.wrapped(rank_data(3, 4)).sum().backward()
        pair.zero()
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 4, step=step))
        pair.check()
        pair.zero()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "views", "find_unused", "static"],
)
def test_a_backward_that_throws_on_every_rank_leaves_the_engine_ready(ranks, options):
    ranks.run(_throws, options, [0, 1])


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["default", "views"])
def test_a_backward_that_throws_on_one_rank_gives_nan_to_the_others_and_is_told_to_all_of_them(ranks, options):
    ranks.run(_throws, options, [1])


class ThrowsAboveATable(nn.Module):
    """Backward never reaches the sparse table below the failure; ``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.early = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.late(Throwing.apply(self.early(self.table(tokens))))


def _one_throws(options: dict, hook: str | None) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        wrapped = lockstep.DistributedDataParallel(module, bucket_cap_mb=1e-6, find_unused_parameters=True, **options)
        if hook:
            wrapped.register_comm_hook(getattr(lockstep.hooks, hook)())
        return wrapped

    pair = Pair(ThrowsAboveATable, wrap)
    for step in range(3):  # past the change of plan, and past the step that tells that nobody uses the spare
        pair.backward(lambda step=step: tokens(step))
        pair.zero()

    if dist.get_rank() == 1:
        Throwing.armed.append(True)
        with pytest.raises(ValueError, match="user code failed"):
            pair.wrapped(tokens(3)).sum().backward()
        Throwing.armed.clear()
    else:
        pair.wrapped(tokens(3)).sum().backward()
        module = pair.wrapped.module
        assert module.table.weight.grad.to_dense().isnan().any() and module.early.weight.grad.isnan().all()
        assert not module.late.weight.grad.isnan().any() and module.spare.weight.grad is None
    pair.zero()
    with pytest.raises(RuntimeError, match=r"rank 1 swallowed an exception .* rank 0 had none.*\[LS-019\]"):
        pair.wrapped(tokens(3)).sum().backward()
    pair.zero()
    for step in range(3):
        pair.backward(lambda step=step: tokens(step))
        if not hook:  # int8 is only near the mean
            pair.check()
        pair.zero()


@pytest.mark.parametrize("hook", [None, "Int8"])
@pytest.mark.parametrize("options", [{}, {"skip_all_reduce_unused_params": True}], ids=["find_unused", "skip"])
def test_one_that_throws_stays_in_step_where_reductions_take_several_rounds(ranks, options, hook):
    """With a sparse table, a hook of two collectives, buckets that are left out, and late gradients afterwards."""
    ranks.run(_one_throws, options, hook)


def _unfinished() -> list[str]:
    model = lockstep.DistributedDataParallel(Branches())
    model((rank_data(3, 4), "a")).sum().backward()
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            model((rank_data(3, 4), "a"))
        texts.append(str(error.value))
    with torch.no_grad():
        model((rank_data(3, 4), "a"))  # evaluation goes on
    return texts


def test_a_backward_without_some_parameters_is_an_error_at_every_next_forward_and_names_them(broken_ranks):
    for rank, texts in enumerate(broken_ranks.run(_unfinished)):
        for text in texts:
            assert text.startswith(f"[rank {rank}] Expected to have finished reduction in the prior iteration")
            assert f"Parameters which did not receive grad for rank {rank}: b.weight, b.bias\n" in text
            assert f"Parameter indices which did not receive grad for rank {rank}: 4 5\n" in text
            assert "`find_unused_parameters=True`" in text and "2 of 6 parameters are missing" in text


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def _disjoint_losses(options: dict) -> None:
    pair = Pair(Heads, lambda module: lockstep.DistributedDataParallel(module, **options))
    for step in range(4):
        x = rank_data(3, 4, step=step)
        for model in (pair.wrapped, pair.plain):
            left, right = model(x)
            left.square().sum().backward()
            right.square().sum().backward()
        pair.check()
        pair.update()
        pair.zero()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["default", "views"])
def test_two_backwards_that_cover_the_parameters_together_are_one_step(ranks, options):
    ranks.run(_disjoint_losses, options)


def _input_gradient_first() -> None:
    """The gradient of an input (adversarial training) passes an output without reaching a parameter."""
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module))
    for step in range(3):
        x = rank_data(3, 6, step=step).requires_grad_()
        for model in (pair.wrapped, pair.plain):
            out = model(x)
            (direction,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
            (out.square().sum() + model(x + 0.1 * direction.sign()).sum()).backward()
        pair.check()
        pair.zero()


def test_asking_for_an_inputs_gradient_does_not_disturb_the_step(ranks):
    ranks.run(_input_gradient_first)


def _gradient_penalty() -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module))
    for step in range(3):
        x = rank_data(3, 6, step=step).requires_grad_()
        for model in (pair.wrapped, pair.plain):
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            (out.sum() + slope.square().sum()).backward()
        pair.check()
        pair.zero()


def test_a_gradient_penalty_is_reduced(ranks):
    ranks.run(_gradient_penalty)


def _create_graph(options: dict) -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module, **options))
    for step in range(3):
        x = rank_data(3, 6, step=step)
        for model in (pair.wrapped, pair.plain):
            model(x).square().sum().backward(create_graph=True)
        pair.check()
        pair.zero()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["default", "views"])
def test_create_graph_gives_right_gradients(ranks, options):
    ranks.run(_create_graph, options)


def _ignored_outputs() -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module))
    for step in range(4):
        pair.wrapped(rank_data(3, 6))  # nobody uses it
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()


def test_outputs_of_a_forward_may_be_ignored(ranks):
    ranks.run(_ignored_outputs)


def _destroyed_between_forward_and_backward() -> None:
    model = lockstep.DistributedDataParallel(nn.Linear(4, 4))
    module = model.module
    out = model(rank_data(3, 4))
    del model
    out.sum().backward()
    assert module.weight.grad is not None
    again = lockstep.DistributedDataParallel(module)
    again.zero_grad()
    again(rank_data(3, 4)).sum().backward()
    assert_bit_equal_on_all_ranks([p.grad for p in module.parameters()], "gradient")


def test_a_model_may_be_unwrapped_at_any_time_and_wrapped_again(ranks):
    ranks.run(_destroyed_between_forward_and_backward)
