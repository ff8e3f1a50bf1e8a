"""Weighted gradients: sum(w g) / sum(w) over ranks and micro-batches, with every hook and in every mode."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
import recipes
from hook_kit import SHAPES, Given, grads_of
from models import Branches
from oracle import assert_bit_equal_on_all_ranks
from test_align import aligned

#: weight(rank, micro-batch, step): unequal everywhere, with a sum of its own on each rank.
WEIGHTS = [[3.0, 1.0], [5.0, 0.5], [2.0, 2.0]]


def _weighted(rows: list[tuple[float, list[torch.Tensor]]]) -> list[torch.Tensor]:
    """The oracle, in double precision: this rank's (weight, gradients), with those of all others."""
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    every = [row for rank in gathered for row in rank]
    total = sum(weight for weight, _ in every)
    return [
        sum(weight * grads[i].double() for weight, grads in every if weight > 0) / total
        for i in range(len(every[0][1]))
    ]


def _backward(model: nn.Module, weight: float, grads: list[torch.Tensor], reduces: bool) -> None:
    model.set_step_weight(weight)
    with contextlib.nullcontext() if reduces else model.no_sync():
        model(grads).backward()


def _check(model: nn.Module, expected: list[torch.Tensor], **tolerance: float) -> None:
    got = [parameter.grad for parameter in model.parameters()]
    assert_bit_equal_on_all_ranks(got, "gradient")
    for grad, right in zip(got, expected, strict=True):
        torch.testing.assert_close(grad.double(), right, **({"rtol": 1e-5, "atol": 1e-6} | tolerance))


def _steps(options: dict, hook: tuple[str, dict], micro: int, tolerance: dict, steps: int = 3) -> None:
    model = lockstep.DistributedDataParallel(Given(*SHAPES), bucket_cap_mb=0.001, **options)
    model.set_comm_hook(hook[0], **hook[1])
    rank = dist.get_rank()
    for step in range(steps):
        model.zero_grad(set_to_none=step % 2 == 0)
        rows = []
        for number in range(micro):
            grads = grads_of(rank + 10 * number, step, SHAPES)
            weight = WEIGHTS[rank][(number + step) % 2]
            rows.append((weight, grads))
            _backward(model, weight, grads, reduces=number + 1 == micro)
        _check(model, _weighted(rows), **tolerance)


HALF = {"rtol": 0.02, "atol": 0.02}
PLAIN = ("allreduce", {})


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("views", [False, True])
def test_unequal_weights_equal_one_process_that_has_seen_everything(two_or_three_ranks, views, micro):
    two_or_three_ranks.run(_steps, {"gradient_as_bucket_view": views}, PLAIN, micro, {})


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (("allreduce", {"division": "after_packing"}), {}),
        (("fp16", {}), HALF),
        (("bf16", {}), {"rtol": 0.05, "atol": 0.05}),
        (("int8", {}), {"rtol": 0.1, "atol": 0.1}),
        (("power_sgd", {"rank": 24, "start_iteration": 0, "min_compression_rate": 0.1}), {"rtol": 1e-3, "atol": 1e-4}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_weights_hold_with_every_hook(ranks, hook, tolerance):
    ranks.run(_steps, {}, hook, 2, tolerance)


def _torch_hook() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    model.register_comm_hook(None, allreduce_hook, native=False)
    rows = [(WEIGHTS[dist.get_rank()][0], grads_of(dist.get_rank(), 0, SHAPES))]
    _backward(model, *rows[0], reduces=True)
    _check(model, _weighted(rows))


def test_weights_hold_with_hooks_written_in_python(ranks):
    ranks.run(_torch_hook)


def _nothing_on_rank_1(place: int) -> None:
    """Three micro-batches; on rank 1 the one at ``place`` counts for nothing, and its gradients are NaN."""
    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    for step in range(2):
        model.zero_grad()
        rows = []
        for number in range(3):
            grads = grads_of(dist.get_rank() + 10 * number, step, SHAPES)
            weight = WEIGHTS[dist.get_rank()][number % 2]
            if dist.get_rank() == 1 and number == place:
                weight, grads = 0.0, [torch.full_like(grad, math.nan) for grad in grads]
            rows.append((weight, grads))
            _backward(model, weight, grads, reduces=number == 2)
        _check(model, _weighted(rows))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_micro_batch_of_weight_0_does_not_count_even_where_it_is_nan(ranks, place):
    ranks.run(_nothing_on_rank_1, place)


def _rank_without_samples(views: bool) -> None:
    model = lockstep.DistributedDataParallel(Given(*SHAPES), gradient_as_bucket_view=views)
    for step in range(3):
        model.zero_grad()
        grads = grads_of(dist.get_rank(), step, SHAPES)
        weight = 0.0 if dist.get_rank() == 1 else 7.0
        if weight == 0:
            grads = [torch.full_like(grad, math.nan) for grad in grads]
        _backward(model, weight, grads, reduces=True)
        _check(model, _weighted([(weight, grads)]))


@pytest.mark.parametrize("views", [False, True])
def test_a_rank_without_samples_does_not_count(ranks, views):
    ranks.run(_rank_without_samples, views)


def _nobody_has_samples() -> None:
    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    _backward(model, 0.0, grads_of(dist.get_rank(), 0, SHAPES), reduces=True)
    assert all(not parameter.grad.any() for parameter in model.parameters())
    rows = [(2.0, grads_of(dist.get_rank(), 1, SHAPES))]
    model.zero_grad()
    _backward(model, *rows[0], reduces=True)
    _check(model, _weighted(rows))  # the step after it is as usual


def test_without_any_sample_the_gradient_is_zero(ranks):
    ranks.run(_nobody_has_samples)


def _unused_parameters() -> None:
    model = lockstep.DistributedDataParallel(Branches(), find_unused_parameters=True)
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = (torch.randn(3, 4), "a")
    for _ in range(3):
        model.zero_grad()
        model.set_step_weight(3.0 - 2 * rank)
        model(inputs).sum().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        assert_bit_equal_on_all_ranks(grads, "gradient")
        # Equal inputs: the weighted mean of equal gradients is what one rank computes.
        plain = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
        named = dict(zip((name for name, _ in model.module.named_parameters()), plain, strict=True))
        torch.func.functional_call(model.module, named, (inputs,)).sum().backward()
        for grad, right in zip(grads, plain, strict=True):
            if right.grad is not None:
                torch.testing.assert_close(grad, right.grad)


def test_weights_hold_with_unused_parameters(ranks):
    ranks.run(_unused_parameters)


def _back_to_plain_means() -> None:
    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    _backward(model, 5.0 + dist.get_rank(), grads_of(dist.get_rank(), 0, SHAPES), reduces=True)
    model.set_step_weight(None)
    model.zero_grad()
    grads = grads_of(dist.get_rank(), 1, SHAPES)
    model(grads).backward()
    _check(model, _weighted([(1.0, grads)]))


def test_none_means_plain_means_again(ranks):
    ranks.run(_back_to_plain_means)


def _only_rank_0() -> str:
    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    if dist.get_rank() == 0:
        model.set_step_weight(2.0)
    try:
        model(grads_of(dist.get_rank(), 0, SHAPES)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_weight_on_one_rank_only_is_an_error_on_all(broken_ranks):
    for text in broken_ranks.run(_only_rank_0):
        assert "reduce in different modes" in text and "set_step_weight" in text


def _dropped_micro_batch() -> None:
    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    _backward(model, 9.0, grads_of(dist.get_rank(), 5, SHAPES), reduces=False)
    model.zero_grad()  # the user throws it away
    rows = [(WEIGHTS[dist.get_rank()][0], grads_of(dist.get_rank(), 6, SHAPES))]
    _backward(model, *rows[0], reduces=True)
    _check(model, _weighted(rows))


def test_gradients_that_were_thrown_away_do_not_count(ranks):
    ranks.run(_dropped_micro_batch)


def _refused() -> None:
    model = lockstep.DistributedDataParallel(Given(*SHAPES))
    for weight in (-1, math.nan, math.inf, "3", torch.ones(2)):
        with pytest.raises(ValueError, match="LS-149"):
            model.set_step_weight(weight)
    unguarded = lockstep.DistributedDataParallel(Given(*SHAPES), guards=False)
    with pytest.raises(RuntimeError, match=r"needs the guards.*LS-149"):
        unguarded.set_step_weight(1.0)


def test_a_weight_that_cannot_be_is_refused(ranks):
    ranks.run(_refused)


def test_unequal_tokens_with_their_number_as_weight_reach_level_2(two_or_three_ranks):
    comparison = aligned(two_or_three_ranks, recipes.right_unequal_tokens)
    assert (comparison.level >= 2, comparison.causes) == (True, [])
