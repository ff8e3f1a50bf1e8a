"""The models of step_tax.py and hook_tax.py, with synthetic batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

VOCABULARY = 50304  # GPT-2's 50,257, padded to a multiple of 128 as training scripts do
Batch = tuple[torch.Tensor, torch.Tensor]


class _Block(nn.Module):
    """Pre-norm transformer block: causal attention, then an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """A plain GPT-2: learned positions, the output layer tied to the token embedding, no dropout."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (batch, tokens, vocabulary) for integers of shape (batch, tokens)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x), self.token.weight)


@dataclass(frozen=True)
class Model:
    """How to build a model and a batch on torch's default device."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    cost: float = 1.0  # of a step, relative: its share of a budget of time
    package: str | None = None  # that `build` imports

    def is_here(self) -> bool:
        return self.package is None or importlib.util.find_spec(self.package) is not None


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy over the last dimension of ``outputs``."""
    return nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def _gpt(
    name: str, *, layers: int, width: int, heads: int, batch: int, tokens: int, vocabulary: int, cost: float = 1.0
) -> Model:
    def draw() -> Batch:
        drawn = torch.randint(vocabulary, (batch, tokens + 1))
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    title = f"{name.replace('gpt', 'GPT')}, {batch} x {tokens}"
    return Model(name, title, lambda: GPT(layers, width, heads, tokens, vocabulary), draw, cost)


def _resnet(blocks: tuple[int, ...], base_width: int, batch: int, side: int, classes: int) -> Model:
    def build() -> nn.Module:
        resnet = importlib.import_module("torchvision.models.resnet")
        return resnet.ResNet(resnet.Bottleneck, list(blocks), num_classes=classes, width_per_group=base_width)

    return Model(
        "resnet50",
        f"ResNet-50, {batch}",
        build,
        lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))),
        package="torchvision",
    )


def models(scale: str) -> dict[str, Model]:
    """All models by name. ``scale``: "full", or "tiny" for a machine without a GPU (the same code, next to no work)."""
    if scale == "tiny":
        tiny = {"layers": 2, "width": 64, "heads": 2, "batch": 2, "tokens": 32, "vocabulary": 256}
        found = [_resnet((1, 1, 1, 1), 8, 4, 32, 10)]
        found += [_gpt(name, **tiny) for name in ("gpt-small", "gpt-medium", "gpt-xl")]
    else:
        text = {"tokens": 1024, "vocabulary": VOCABULARY}
        found = [
            _resnet((3, 4, 6, 3), 64, 64, 224, 1000),
            _gpt("gpt-small", layers=12, width=768, heads=12, batch=8, **text),
            _gpt("gpt-medium", layers=24, width=1024, heads=16, batch=4, cost=1.3, **text),
            _gpt("gpt-xl", layers=36, width=1600, heads=25, batch=2, cost=2.0, **text),
        ]
    return {model.name: model for model in found}
