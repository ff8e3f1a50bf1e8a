"""Activation checkpointing: where the end of an inner backward is not the end of the pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from oracle import Pair, rank_data


class Blocks(nn.Module):
    """Three blocks, the first two checkpointed. With ``hidden`` the result is returned in a class nobody looks into."""

    def __init__(self, reentrant: bool, hidden: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.reentrant = reentrant
        self.hidden = hidden

    def forward(self, x: torch.Tensor) -> object:
        for block in self.blocks[:2]:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        x = self.blocks[2](x)
        return Hidden(x) if self.hidden else x


class Hidden:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _once(reentrant: bool, hidden: bool, options: dict) -> None:
    pair = Pair(
        lambda: Blocks(reentrant, hidden),
        lambda module: lockstep.DistributedDataParallel(module, bucket_cap_mb=1e-6, **options),
    )
    pair.train(
        4,
        lambda step: rank_data(3, 6, step=step).requires_grad_(),
        loss=lambda out: (out.value if hidden else out).square().sum(),
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "views", "find_unused", "static"],
)
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_checkpointed_blocks_give_the_mean(ranks, reentrant, options):
    ranks.run(_once, reentrant, False, options)


@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_outputs_that_cannot_be_found_do_not_close_the_pass_with_an_inner_backward(ranks, reentrant):
    ranks.run(_once, reentrant, True, {})


def _whole_model(options: dict) -> None:
    """The wrapped model itself is checkpointed: its forward runs again inside backward."""
    pair = Pair(
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)),
        lambda module: lockstep.DistributedDataParallel(module, **options),
    )
    for step in range(3):
        x = rank_data(3, 6, step=step).requires_grad_()
        checkpoint(pair.wrapped, x, use_reentrant=True).square().sum().backward()
        pair.plain(x).square().sum().backward()
        pair.check()
        pair.update()
        pair.zero()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["default", "find_unused"])
def test_the_wrapped_model_may_be_checkpointed_as_a_whole(ranks, options):
    ranks.run(_whole_model, options)


def _shared_layer_twice() -> str:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True)

    model = lockstep.DistributedDataParallel(Twice())
    with pytest.raises(RuntimeError) as error:
        model(rank_data(3, 6).requires_grad_()).sum().backward()
    return str(error.value)


def test_a_layer_checkpointed_twice_with_reentrant_checkpoints_is_refused_with_the_way_out(broken_ranks):
    for text in broken_ranks.run(_shared_layer_twice):
        assert "Expected to mark a variable ready only once" in text
        assert "'layer." in text and "use_reentrant=False" in text and "static_graph=True" in text


class SharedWeight(nn.Module):
    """Two checkpointed layers with one weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return checkpoint(self.second, x, use_reentrant=self.reentrant)


def _shared(reentrant: bool, options: dict) -> None:
    pair = Pair(lambda: SharedWeight(reentrant), lambda module: lockstep.DistributedDataParallel(module, **options))
    pair.train(4, lambda step: rank_data(3, 6, step=step).requires_grad_())


@pytest.mark.parametrize(
    ("reentrant", "options"),
    [
        (False, {}),
        (False, {"static_graph": True}),
        (True, {"static_graph": True}),
        (False, {"find_unused_parameters": True}),
    ],
    ids=["nonreentrant", "nonreentrant_static", "reentrant_static", "nonreentrant_find_unused"],
)
def test_checkpointed_layers_may_share_a_weight(ranks, reentrant, options):
    ranks.run(_shared, reentrant, options)
