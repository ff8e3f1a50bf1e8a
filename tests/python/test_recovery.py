"""A rank fails in the middle of a step: the others neither hang nor take its mean for one, and all go on together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from models import tokens
from oracle import Pair, rank_data

#: What all ranks are told in the step after the one in which rank 1 failed.
TOLD = r"rank 1 swallowed an exception .* rank 0 had none.*\[LS-019\]"


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


class TwoTables(nn.Module):
    """Two sparse gradients, of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(50, 8, sparse=True)
        self.narrow = nn.Embedding(50, 4, sparse=True)
        self.head = nn.Linear(12, 3)

    def forward(self, step: int) -> torch.Tensor:
        ids = (torch.arange(3) + step) * (dist.get_rank() + 1) % 50
        return self.head(torch.cat([self.wide(ids), self.narrow(ids[:1]).expand(3, -1)], dim=1)).sum()


class Growing(nn.Module):
    """Uses its branches from step 3 on: their gradients come after their buckets, or their buckets were left out."""

    WIDTHS = (6, 9, 2)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, width) for width in self.WIDTHS)

    def forward(self, step: int) -> torch.Tensor:
        features = self.stem(rank_data(3, 4, step=step))
        return features.sum() + sum(branch(features).sum() for branch in self.branches if step >= 3)


class TableBesideLayers(nn.Module):
    """Several buckets in the first step; backward reaches the table, then throws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table = nn.Embedding(10, 6, sparse=True)

    def forward(self, step: int) -> torch.Tensor:
        return Throwing.apply(self.layer(rank_data(3, 4, step=step))).sum() + self.table(torch.tensor([1, 2])).sum()


FAILURE = "user code failed"
failing: list[bool] = []


def _fail() -> None:
    if failing:
        failing.clear()
        raise ValueError(FAILURE)


def _fails_at_first_mean(model: lockstep.DistributedDataParallel) -> None:
    model.register_reduced_hook(lambda _: _fail())


def _mean_in_python(communicates_later: bool, fails_for_branches: bool) -> Callable[[object, dist.GradBucket], Any]:
    def also_reduces_nothing(first: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1), async_op=True).wait()
        return first.value()[0]

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if fails_for_branches and all(len(param) in Growing.WIDTHS for param in bucket.parameters()):
            _fail()
        sent = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return sent.then(also_reduces_nothing if communicates_later else lambda first: first.value()[0])

    return hook


def _fails_at_first_mean_of_a_later_hook(model: lockstep.DistributedDataParallel) -> None:
    model.register_comm_hook(None, _mean_in_python(communicates_later=True, fails_for_branches=False))
    _fails_at_first_mean(model)


def _fails_in_hook(model: lockstep.DistributedDataParallel) -> None:
    model.register_comm_hook(None, _mean_in_python(communicates_later=False, fails_for_branches=True))


def _throws_in_backward(model: lockstep.DistributedDataParallel) -> None:
    pass  # by the model


#: Model, options, where rank 1 fails, and in which step.
FAILURES: dict[str, tuple[type[nn.Module], dict[str, Any], Callable[[Any], None], int]] = {
    "sparse_means": (TwoTables, {}, _fails_at_first_mean, 3),
    "late_gradients": (Growing, {"find_unused_parameters": True}, _fails_at_first_mean, 3),
    "late_gradients_after_hook": (
        Growing,
        {"find_unused_parameters": True},
        _fails_at_first_mean_of_a_later_hook,
        3,
    ),
    "used_after_all": (
        Growing,
        {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
        _fails_in_hook,
        3,
    ),
    "first_backward": (TableBesideLayers, {}, _throws_in_backward, 0),
    "first_mean": (TableBesideLayers, {}, _fails_at_first_mean, 0),
    "first_mean_static": (TableBesideLayers, {"static_graph": True}, _fails_at_first_mean, 0),
}


def _steps(pair: Pair, steps: range) -> None:
    for step in steps:
        pair.backward(lambda step=step: step, loss=lambda out: out)
        pair.check()
        pair.zero()


def _fails_once(name: str) -> None:
    make, options, arm, when = FAILURES[name]

    def wrap(module: nn.Module) -> nn.Module:
        model = lockstep.DistributedDataParallel(module, bucket_cap_mb=1e-6, **options)
        arm(model)
        return model

    pair = Pair(make, wrap)
    _steps(pair, range(when))
    if dist.get_rank() == 1:
        armed = Throwing.armed if arm is _throws_in_backward else failing
        armed.append(True)
        with pytest.raises(ValueError, match=FAILURE):
            pair.wrapped(when).backward()
        Throwing.armed.clear()
    else:
        pair.wrapped(when).backward()
    pair.zero()
    with pytest.raises(RuntimeError, match=TOLD):
        pair.wrapped(when + 1).backward()
    pair.zero()
    _steps(pair, range(when + 2, when + 5))


@pytest.mark.parametrize("name", FAILURES)
def test_ranks_are_in_step_again_after_one_has_failed(ranks, name):
    ranks.run(_fails_once, name)


def _told_once() -> list[str]:
    """Rank 1 throws before its first bucket has left; every rank goes on after every error."""
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), ThrowsAtTheEnd()), bucket_cap_mb=1e-6)
    errors = []
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            Throwing.armed.append(True)
        try:
            model(rank_data(3, 4, step=step)).sum().backward()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
        Throwing.armed.clear()
        if step == 4 and dist.get_rank() == 0:
            break  # rank 1 was told in a forward, and has used one batch more
    return errors


class ThrowsAtTheEnd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Throwing.apply(x)


def test_each_rank_is_told_once_of_a_backward_that_never_began_and_by_the_right_name(broken_ranks):
    of_rank_0, of_rank_1 = broken_ranks.run(_told_once)
    assert len(of_rank_0) == 1 and len(of_rank_1) == 2, (of_rank_0, of_rank_1)
    assert of_rank_1[0] == FAILURE
    for text in (of_rank_0[0], of_rank_1[1]):
        assert "rank 1 swallowed an exception" in text and "LS-019" in text


def _last_batch() -> None:
    model = lockstep.DistributedDataParallel(ThrowsInTheMiddle(), bucket_cap_mb=1e-6)
    batches = 3 + 2 * (dist.get_rank() == 0)
    with pytest.raises(RuntimeError, match=TOLD), model.join():
        for step in range(batches):
            if step == 2 and dist.get_rank() == 1:
                Throwing.armed.append(True)
                with pytest.raises(ValueError, match=FAILURE):
                    model(rank_data(3, 4, step=step)).sum().backward()
                Throwing.armed.clear()
            else:
                model(rank_data(3, 4, step=step)).sum().backward()
            model.zero_grad()


def test_a_failure_of_the_last_batch_before_a_rank_joins_is_told_to_all(broken_ranks):
    broken_ranks.run(_last_batch)


def _strict() -> None:
    model = lockstep.DistributedDataParallel(nn.Linear(4, 4), strict=True)
    model(rank_data(3, 4)).sum().backward()
    loss = model(rank_data(3, 4)).sum()
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match=r"no_sync\(\) was entered after forward"), model.no_sync():
            loss.backward()
        with pytest.raises(RuntimeError, match=TOLD):
            model(rank_data(3, 4))
    else:
        with pytest.raises(RuntimeError, match=TOLD):
            loss.backward()
    model.zero_grad()
    model(rank_data(3, 4)).sum().backward()


def test_a_warning_that_strict_makes_an_error_leaves_ranks_in_step(ranks):
    ranks.run(_strict)


def _explicit() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    pair = Pair(make, lambda module: lockstep.DistributedDataParallel(module, bucket_cap_mb=1e-6))
    pair.train(2, lambda step: rank_data(3, 4, step=step))
    model = pair.wrapped
    with model.no_sync():
        model(rank_data(3, 4)).sum().backward()
    if dist.get_rank() == 1:
        weight = model.module[1].weight
        weight.grad = weight.grad.to_sparse()
        with pytest.raises(RuntimeError, match=r"'1.weight' \(#2\) is sparse.*LS-016"):
            model.sync_gradients()
    else:
        model.sync_gradients()
        assert model.module[1].weight.grad.isnan().all()
    pair.zero()
    with pytest.raises(RuntimeError, match=TOLD):
        model(rank_data(3, 4)).sum().backward()
    pair.zero()
    pair.train(2, lambda step: rank_data(3, 4, step=step))


def test_sync_gradients_that_fails_on_one_rank_leaves_ranks_in_step(ranks):
    ranks.run(_explicit)
