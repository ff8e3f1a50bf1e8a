"""Every mode of the engine gives the mean over ranks, for every kind of parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from models import KINDS, Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, assert_mean_grads, rank_data

MODES = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "small_buckets_views": {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    "bucket_list": {"bucket_cap_mb_list": [0.0001, 0.0002]},
    "find_unused": {"find_unused_parameters": True},
    "find_unused_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
}


def _train(kind: str, options: dict, set_to_none: bool) -> None:
    make, data = KINDS[kind]
    pair = Pair(make, lambda module: lockstep.DistributedDataParallel(module, **options))
    for step in range(4):
        pair.backward(lambda step=step: data(step))
        pair.check()
        pair.update()
        pair.zero(set_to_none)
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_kept"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_mean_over_ranks(two_or_three_ranks, kind, mode, set_to_none):
    if kind == "sparse":
        set_to_none = True  # zeroing a sparse gradient in place keeps its entries: nothing to compare with
    two_or_three_ranks.run(_train, kind, MODES[mode], set_to_none)


def _like_torch(kind: str, options: dict) -> None:
    make, data = KINDS[kind]
    torch.manual_seed(1)
    ours = lockstep.DistributedDataParallel(make(), **options)
    torch.manual_seed(1)
    theirs = TorchDDP(make(), **options)
    for step in range(4):
        for model in (ours, theirs):
            model.zero_grad()
            model(data(step)).square().sum().backward()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            if b.grad is not None:
                left, right = (p.grad.to_dense() if p.grad.is_sparse else p.grad for p in (a, b))
                assert torch.equal(left, right) and left.stride() == right.stride()


@pytest.mark.parametrize("mode", ["default", "views", "small_buckets", "find_unused", "static"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "empty"])  # torch's engine refuses to go on there
def test_gradients_equal_those_of_torch_bit_for_bit_on_two_ranks(ranks, kind, mode):
    ranks.run(_like_torch, kind, MODES[mode])


def _views_survive(how: str) -> None:
    model = lockstep.DistributedDataParallel(Reversed(), gradient_as_bucket_view=True, bucket_cap_mb=0.0003)
    plain = Pair(Reversed, lambda module: module)
    plain.plain.load_state_dict(model.module.state_dict())
    for step in range(5):
        inputs = rank_data(3, 6, step=step)
        model(inputs).sum().backward()
        grads = [p.grad for p in model.parameters()]
        for i, p in enumerate(model.parameters()):
            if how == "detach":
                p.grad.detach_()
                p.grad.zero_()
            elif how == "replace":
                p.grad = torch.zeros_like(p)
            elif how == "some_none":
                p.grad = None if i % 2 else p.grad.zero_()
            else:
                p.grad = None
        model(inputs).sum().backward()
        for p, before in zip(model.parameters(), grads, strict=True):
            assert how != "detach" or step == 0 or p.grad.data_ptr() == before.data_ptr()  # step 0: new plan
        plain.plain.zero_grad()
        plain.plain(inputs).sum().backward()
        assert_mean_grads(model, plain.plain)
        model.zero_grad()


@pytest.mark.parametrize("how", ["detach", "replace", "some_none", "all_none"])
def test_gradients_that_are_views_may_be_detached_replaced_and_dropped(ranks, how):
    ranks.run(_views_survive, how)


def _share_memory() -> list[int]:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = lockstep.DistributedDataParallel(net, gradient_as_bucket_view=True)
    seen = []
    for step in range(3):
        model.zero_grad(set_to_none=True)
        model(rank_data(2, 4, step=step)).sum().backward()
        seen.append(len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}))
    return seen


def test_views_of_one_bucket_share_its_memory(ranks):
    assert ranks.run(_share_memory) == [[1, 1, 1], [1, 1, 1]]
