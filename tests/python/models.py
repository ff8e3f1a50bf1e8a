"""Small models, one for each thing that can be peculiar about parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from oracle import rank_data


class Reversed(nn.Module):
    """Uses its layers in the reverse order of registration, so that the second plan differs from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class MixedDtypes(nn.Module):
    """fp32, fp64, bf16 and fp16 layers in turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16] * 2
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype)) / 4
        return x.float()


class ChannelsLast(nn.Module):
    """Weights whose memory order is not row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        self.net.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.to(memory_format=torch.channels_last))


class ComplexAndReal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Linear(4, 4, dtype=torch.cfloat)
        self.real = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.real(self.complex(torch.complex(x, x.flip(0))).abs())


class EmptyParameters(nn.Module):
    """A layer without outputs, an unused parameter without elements, and an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Linear(4, 0)
        self.unused = nn.Parameter(torch.empty(0))
        self.something = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.nothing(x), self.something(x)], dim=1)


class Shared(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class RootParameter(nn.Module):
    """A scalar of its own beside a layer, and a transposed (dense, not row-major) weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.weight = nn.Parameter(torch.randn(5, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (x @ self.weight)


class SparseEmbedding(nn.Module):
    """A sparse embedding in front of a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)
        self.layer = nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(tokens))


class Branches(nn.Module):
    """Layers that are used only when asked for: forward takes the input and the names of the branches to run."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, arguments: tuple[torch.Tensor, str]) -> torch.Tensor:
        x, branches = arguments
        x = self.trunk(x)
        for name in branches:
            x = getattr(self, name)(x)
        return x


def tokens(step: int) -> torch.Tensor:
    return (rank_data(8, step=step).abs() * 100).long() % 10


#: Model and input of one step, by a name for test ids.
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "reversed": (Reversed, lambda step: rank_data(3, 6, step=step)),
    "mixed_dtypes": (MixedDtypes, lambda step: rank_data(3, 4, step=step)),
    "channels_last": (ChannelsLast, lambda step: rank_data(2, 3, 7, 7, step=step)),
    "complex": (ComplexAndReal, lambda step: rank_data(3, 4, step=step)),
    "empty": (EmptyParameters, lambda step: rank_data(3, 4, step=step)),
    "shared": (Shared, lambda step: rank_data(3, 6, step=step)),
    "root": (RootParameter, lambda step: rank_data(3, 6, step=step)),
    "sparse": (SparseEmbedding, tokens),
}
