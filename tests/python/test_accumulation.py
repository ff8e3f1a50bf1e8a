"""no_sync, accumulation over several backwards, and a new bucket plan in between."""

from __future__ import annotations

import contextlib

import pytest
import torch

import lockstep
from models import Branches, Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data

OPTIONS = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "find_unused": {"find_unused_parameters": True},
    "find_unused_views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static_views": {"static_graph": True, "gradient_as_bucket_view": True},
}


def _wrap(options: dict):
    # Small buckets, so that the plan adopted after the first reduced backward differs from the first one.
    return lambda module: lockstep.DistributedDataParallel(module, bucket_cap_mb=0.0003, **options)


def _accumulate(options: dict, windows: list[list[bool]], set_to_none: bool) -> None:
    """One window is a list of micro-batches; True means that it is reduced."""
    pair = Pair(Reversed, _wrap(options))
    step = 0
    for window in windows:
        for reduced in window:
            with contextlib.nullcontext() if reduced else pair.wrapped.no_sync():
                pair.backward(lambda step=step: rank_data(3, 6, step=step))
            step += 1
        pair.check()
        pair.update()
        pair.zero(set_to_none)
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")


@pytest.mark.parametrize("set_to_none", [True, False], ids=["grads_none", "grads_kept"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_reduced_backward_reduces_all_that_was_accumulated(ranks, options, set_to_none):
    # The very first backward is not reduced; windows change their length.
    windows = [[False, False, True], [True], [False, True], [False, False, False, True], [True]]
    ranks.run(_accumulate, OPTIONS[options], windows, set_to_none)


@pytest.mark.parametrize("options", OPTIONS)
def test_several_reduced_backwards_without_zeroing_add_up(ranks, options):
    # After the first one the plan changes while gradients live in the old buckets.
    ranks.run(_accumulate, OPTIONS[options], [[True, True, True, True], [False, False, False, True], [True]], False)


def _local_only(options: dict) -> None:
    pair = Pair(Reversed, _wrap(options))
    with pair.wrapped.no_sync(), pair.wrapped.no_sync():  # the inner one must not end the outer one
        pair.backward(lambda: rank_data(3, 6))
    assert pair.wrapped.require_backward_grad_sync
    with pair.wrapped.no_sync():
        with pair.wrapped.no_sync():
            pass
        pair.backward(lambda: rank_data(3, 6, step=1))
    for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("options", OPTIONS)
def test_no_sync_keeps_gradients_local_also_when_nested(ranks, options):
    ranks.run(_local_only, OPTIONS[options])


def _replaced_before_new_plan() -> None:
    pair = Pair(Reversed, _wrap({"gradient_as_bucket_view": True}))
    pair.backward(lambda: rank_data(3, 6))
    for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
        ours.grad = torch.ones_like(ours)
        theirs.grad = torch.ones_like(theirs)
    pair.backward(lambda: rank_data(3, 6, step=1))  # adopts the new plan
    pair.check()


def test_a_gradient_set_by_hand_before_a_new_plan_is_kept(ranks):
    ranks.run(_replaced_before_new_plan)


def _used_in_local_micro_batches_only(options: dict) -> None:
    pair = Pair(Branches, _wrap(options))
    for window in range(3):
        with pair.wrapped.no_sync():
            pair.backward(lambda window=window: (rank_data(3, 4, step=2 * window), "a"))
        pair.backward(lambda window=window: (rank_data(3, 4, step=2 * window + 1), "b"))
        pair.check()
        pair.update()
        pair.zero()


@pytest.mark.parametrize("options", ["find_unused", "find_unused_views"])
def test_parameters_used_only_in_micro_batches_that_were_not_reduced_are_reduced_with_the_others(ranks, options):
    ranks.run(_used_in_local_micro_batches_only, OPTIONS[options])


def _two_forwards(options: dict, one_backward: bool) -> None:
    pair = Pair(Reversed, _wrap(options))
    for step in range(3):
        batches = [rank_data(3, 6, step=2 * step + i) for i in range(2)]
        for model in (pair.wrapped, pair.plain):
            outputs = [model(batch).square().sum() for batch in batches]
            if one_backward:
                sum(outputs).backward()
            else:
                for output in outputs:
                    output.backward()
        pair.check()
        pair.update()
        pair.zero()


@pytest.mark.parametrize("one_backward", [True, False], ids=["one_backward", "a_backward_each"])
@pytest.mark.parametrize("options", OPTIONS)
def test_two_forwards_before_backward_are_both_reduced(ranks, options, one_backward):
    ranks.run(_two_forwards, OPTIONS[options], one_backward)
