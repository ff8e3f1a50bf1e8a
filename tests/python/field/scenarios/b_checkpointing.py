"""Activation checkpointing, once and twice, reentrant or not."""

from __future__ import annotations

import functools
import itertools
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from field.kit import assert_contains, pair_of, refused
from field.registry import Engine, case
from oracle import assert_bit_equal_on_all_ranks, rank_data


class Checkpointed(nn.Module):
    """A layer that is checkpointed once or twice, and a plain one."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.head = nn.Linear(6, 6)
        self.reentrant, self.times = reentrant, times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def _input(needs_grad: bool, step: int) -> torch.Tensor:
    return rank_data(3, 6, step=step).requires_grad_(needs_grad)


MODES = [{}, {"find_unused_parameters": True}, {"static_graph": True}]


@case(
    18,
    "the matrix of activation checkpointing",
    variants={
        "nonreentrant_once": {"reentrant": False, "times": 1},
        "nonreentrant_twice": {"reentrant": False, "times": 2},
        "reentrant_once": {"reentrant": True, "times": 1},
        "reentrant_twice": {"reentrant": True, "times": 2},
    },
)
def checkpoint_matrix(engine: Engine, reentrant: bool, times: int) -> None:
    """https://github.com/huggingface/accelerate/issues/389 https://github.com/microsoft/FocalNet/issues/4
    https://github.com/aqlaboratory/openfold/issues/40 https://github.com/lucidrains/DALLE2-pytorch/issues/225

    Symptom: "ready twice" hits almost everyone who turns on gradient checkpointing.
    Right: all cells but reentrant-twice are right; that one is right too, or raises with the parameter and a way out.
    """
    warnings.simplefilter("ignore")
    for mode, views, input_grad in itertools.product(MODES, [False, True], [False, True]):
        cell = f"{mode}, views={views}, input_grad={input_grad}"
        pair = pair_of(engine, lambda: Checkpointed(reentrant, times), gradient_as_bucket_view=views, **mode)
        # A reentrant checkpoint of an input without gradient gives its layer none: that parameter is unused.
        unused = reentrant and not input_grad
        if unused and not mode:
            with refused(engine, "find_unused_parameters=True"):
                for step in range(2):
                    pair.wrapped(_input(input_grad, step)).sum().backward()
            continue
        try:
            pair.train(4, functools.partial(_input, input_grad))
        except RuntimeError as error:
            assert reentrant and times == 2 and "static_graph" not in mode, f"{cell}: {error}"
            assert_contains(str(error), "layer.", "use_reentrant=False")
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}") from error


class LowRank(nn.Module):
    """A frozen base and two small matrices that train."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.down = nn.Linear(6, 2, bias=False)
        self.up = nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class CheckpointedBlock(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=True)


@case(
    20,
    "checkpointing and several forwards in one step",
    variants={
        f"{what}{suffix}": {"lora": what == "lora", "one_bucket_each": bool(suffix)}
        for what in ("plain", "lora")
        for suffix in ("", "_small_buckets")
    },
)
def checkpointed_forwards(engine: Engine, lora: bool, one_bucket_each: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/121594

    Symptom: losses of several checkpointed forwards are summed; ranks drift apart without an error.
    Right: in sync and equal to the reference, or an error that names the parameter.
    """
    options = {"bucket_cap_mb": 1e-6} if one_bucket_each else {}
    pair = pair_of(engine, lambda: CheckpointedBlock(LowRank() if lora else nn.Linear(6, 6)), **options)
    for step in range(3):
        for model in (pair.plain, pair.wrapped):
            first = model(rank_data(3, 6, step=step).requires_grad_())
            second = model(rank_data(3, 6, step=step + 50).requires_grad_())
            try:
                (first.square().sum() + second.square().sum()).backward()
            except RuntimeError as error:
                assert_contains(str(error), "block.")
                return
        pair.check()
        pair.update()
        pair.zero()
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")
