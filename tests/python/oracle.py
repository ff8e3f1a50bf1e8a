"""The plain truth to compare with: an unwrapped copy whose gradients are averaged one at a time."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

Loss = Callable[[Any], torch.Tensor]


def mean_over_ranks(grad: torch.Tensor) -> torch.Tensor:
    """The mean of one gradient, by one plain all-reduce in double precision."""
    dense = grad.to_dense() if grad.is_sparse else grad
    wide = dense.detach().to(torch.complex128 if dense.is_complex() else torch.float64).contiguous()
    flat = torch.view_as_real(wide).clone() if wide.is_complex() else wide.clone()
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    return (torch.view_as_complex(flat) if wide.is_complex() else flat).to(dense.dtype)


def assert_bit_equal_on_all_ranks(tensors: Iterable[torch.Tensor | None], what: str) -> None:
    for i, tensor in enumerate(tensors):
        shown = torch.zeros(0) if tensor is None else tensor.detach()
        shown = shown.to_dense() if shown.is_sparse else shown
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (tensor is None, shown.contiguous()))
        for rank, (absent, theirs) in enumerate(gathered):
            same = absent == (tensor is None) and torch.equal(theirs, shown)
            assert same, f"{what} {i} of rank {dist.get_rank()} differs from that of rank {rank}"


def assert_mean_grads(wrapped: torch.nn.Module, plain: torch.nn.Module) -> None:
    """Every gradient of ``wrapped`` is the mean over ranks of those of ``plain``, and bit-equal on all ranks.

    A parameter without a gradient on this rank counts as zeros, and on every rank as no gradient at all.
    """
    grads = [p.grad for p in wrapped.parameters()]
    assert_bit_equal_on_all_ranks(grads, "gradient")
    for (name, copy_of), grad in zip(plain.named_parameters(), grads, strict=True):
        absent = torch.tensor(float(copy_of.grad is None))
        dist.all_reduce(absent)
        expected = mean_over_ranks(torch.zeros_like(copy_of) if copy_of.grad is None else copy_of.grad)
        if absent == dist.get_world_size():
            assert grad is None or not grad.any(), f"{name} is used nowhere, but has a gradient"
            continue
        assert grad is not None, f"{name} has no gradient"
        grad = grad.to_dense() if grad.is_sparse else grad
        assert grad.dtype == copy_of.dtype and grad.shape == copy_of.shape, name
        torch.testing.assert_close(grad, expected, msg=lambda text, name=name: f"{name}: {text}")


class Pair:
    """A wrapped model and an unwrapped copy that sees the same data on this rank and the same updates."""

    def __init__(self, make: Callable[[], torch.nn.Module], wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
        torch.manual_seed(1)
        self.plain = make()
        self.wrapped = wrap(copy.deepcopy(self.plain))

    def backward(self, make_input: Callable[[], Any], loss: Loss = lambda out: out.square().sum()) -> None:
        inputs = make_input()
        loss(self.wrapped(inputs)).backward()
        loss(self.plain(inputs)).backward()

    def check(self) -> None:
        assert_mean_grads(self.wrapped, self.plain)

    def update(self, rate: float = 0.01) -> None:
        """One step of SGD with the mean gradients, on both models alike."""
        with torch.no_grad():
            for ours, theirs in zip(self.wrapped.parameters(), self.plain.parameters(), strict=True):
                if ours.grad is not None:
                    ours.sub_(rate * (ours.grad.to_dense() if ours.grad.is_sparse else ours.grad))
                    theirs.copy_(ours)

    def zero(self, set_to_none: bool = True) -> None:
        self.wrapped.zero_grad(set_to_none=set_to_none)
        self.plain.zero_grad(set_to_none=set_to_none)

    def train(self, steps: int, make_input: Callable[[int], Any], loss: Loss = lambda out: out.square().sum()) -> None:
        """``steps`` whole steps on the data that ``make_input(step)`` gives, each checked."""
        for step in range(steps):
            self.backward(functools.partial(make_input, step), loss)
            self.check()
            self.update()
            self.zero()


def rank_data(*shape: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that differ by rank and step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(*shape, generator=generator, dtype=dtype)
