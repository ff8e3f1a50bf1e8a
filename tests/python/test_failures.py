"""Backwards that end too early, or are followed by something unusual: what is said, and what is left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lockstep
from models import Branches, Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data


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
