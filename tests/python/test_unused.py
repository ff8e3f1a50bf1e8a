"""find_unused_parameters without a search of the graph: prediction, late gradients, untouched ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from models import Branches
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data

#: For each step, the branches that rank 0 and rank 1 run.
PATTERNS = {
    "always_all": ["ab|ab"] * 4,
    "same_unused": ["a|a"] * 4,
    "by_rank": ["a|b"] * 4,
    "alternating": ["a|a", "b|b"] * 4,
    "swapping": ["a|b", "b|a"] * 4,
    "late_on_one_rank": ["a|a", "a|a", "a|ab", "a|ab", "ab|a", "ab|ab"],
    "none_then_all": ["|", "|", "ab|", "|ab", "ab|ab"],
}


def _steps(pattern: list[str], options: dict, set_to_none: bool) -> None:
    # One bucket per parameter: a bucket of unused ones leaves long before a late gradient arrives.
    pair = Pair(
        Branches,
        lambda module: lockstep.DistributedDataParallel(
            module, find_unused_parameters=True, bucket_cap_mb=1e-6, **options
        ),
    )
    for step, branches in enumerate(pattern):
        mine = branches.split("|")[dist.get_rank()]
        pair.backward(lambda step=step, mine=mine: (rank_data(3, 4, step=step), mine))
        pair.check()
        pair.update()
        pair.zero(set_to_none)
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_kept"])
@pytest.mark.parametrize("views", [False, True], ids=["default", "views"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_subset_may_be_used_in_any_step(ranks, pattern, views, set_to_none):
    ranks.run(_steps, PATTERNS[pattern], {"gradient_as_bucket_view": views}, set_to_none)


def _untouched(views: bool, set_to_none: bool) -> None:
    model = lockstep.DistributedDataParallel(Branches(), find_unused_parameters=True, gradient_as_bucket_view=views)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    model((rank_data(3, 4), "ab")).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    before = model.module.b.weight.detach().clone()
    kept = None if set_to_none else model.module.b.weight.grad.clone()
    model((rank_data(3, 4, step=1), "a")).sum().backward()
    grad = model.module.b.weight.grad
    assert (grad is None) if set_to_none else torch.equal(grad, kept)
    if set_to_none:
        optimizer.step()
        assert torch.equal(model.module.b.weight, before), "momentum or weight decay moved an unused parameter"


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_kept"])
@pytest.mark.parametrize("views", [False, True], ids=["default", "views"])
def test_a_parameter_used_nowhere_keeps_its_gradient_as_it_was(ranks, views, set_to_none):
    ranks.run(_untouched, views, set_to_none)


def _kept_gradient_of_an_unused_parameter_is_not_averaged() -> None:
    model = lockstep.DistributedDataParallel(
        Branches(), find_unused_parameters=True, gradient_as_bucket_view=True, bucket_cap_mb=25
    )
    model((rank_data(3, 4), "ab")).sum().backward()
    mine = float(dist.get_rank() + 1)
    model.module.b.weight.grad.fill_(mine)  # differs by rank, so that averaging would show
    model((rank_data(3, 4, step=1), "a")).sum().backward()
    assert torch.equal(model.module.b.weight.grad, torch.full((4, 4), mine))


def test_a_kept_gradient_in_a_bucket_is_not_averaged_when_its_parameter_is_used_nowhere(ranks):
    ranks.run(_kept_gradient_of_an_unused_parameter_is_not_averaged)


def _buckets_leave_early(branches: str) -> list[int]:
    """Buckets handed to a hook before the gradient of the trunk, the last one to arrive, was there."""
    model = lockstep.DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-6)
    sent, early = [], []

    def hook(state, bucket):
        sent.append(bucket.index())
        return _done(bucket.buffer())

    model.register_comm_hook(None, hook)
    model.module.trunk.weight.register_hook(lambda grad: early.append(len(sent)))
    for step in range(3):
        sent.clear()
        model((rank_data(3, 4, step=step), branches)).sum().backward()
        model.zero_grad()
    return early


def _done(value: torch.Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def test_buckets_of_unused_parameters_need_not_wait_for_the_end_of_backward(ranks):
    for early in ranks.run(_buckets_leave_early, "a"):
        # Six buckets, sent in the order b, a, trunk. In the first step nothing is known and b holds all back.
        assert early[0] == 0 and min(early[1:]) >= 4


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x)}


def _output_left_out(options: dict) -> None:
    pair = Pair(Outputs, lambda module: lockstep.DistributedDataParallel(module, **options))
    for step in range(6):
        pair.backward(lambda step=step: rank_data(3, 4, step=step), loss=lambda out: out["left"].sum())
        pair.check()
        assert pair.wrapped.module.right.weight.grad is None
        pair.update()
        pair.zero()


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}], ids=["find", "static"])
def test_an_output_may_be_left_out_of_the_loss(ranks, options):
    ranks.run(_output_left_out, options)


def _sparse_unused() -> None:
    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Embedding(10, 4, sparse=True)
            self.spare = nn.Embedding(10, 4, sparse=True)

        def forward(self, arguments):
            tokens, with_spare = arguments
            return self.used(tokens) + (self.spare(tokens) if with_spare else 0)

    pair = Pair(Tables, lambda module: lockstep.DistributedDataParallel(module, find_unused_parameters=True))
    for spare_on in ["", "", "1", "0", "01"]:
        mine = str(dist.get_rank()) in spare_on
        pair.backward(lambda mine=mine: (torch.tensor([1, 2, 2, 7]), mine))
        pair.check()
        assert spare_on or pair.wrapped.module.spare.weight.grad is None
        pair.zero()


def test_a_sparse_parameter_may_be_unused_on_some_ranks_or_on_all(ranks):
    ranks.run(_sparse_unused)
