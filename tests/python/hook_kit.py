"""What tests of the engine's comm hooks share: a model with given gradients, and torch's state for a hook of ours."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lockstep import hooks

SHAPES = [(24, 16), (16,), (16, 24), (24, 16), (6, 5, 4), (3, 3)]


def torch_state(native: hooks.PowerSGD) -> PowerSGDState:
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
