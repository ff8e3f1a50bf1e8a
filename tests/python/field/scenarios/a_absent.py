"""Parameters, backwards and ranks that stay away."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist
from torch import nn

from field.kit import (
    LATE,
    assert_told_once,
    coded,
    in_turns,
    pair_of,
    recorded,
    refused,
    standard_error,
)
from field.registry import Engine, case
from models import Branches, Reversed
from oracle import mean_over_ranks, rank_data


class Skipping(nn.Module):
    """Six layers, some of them skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def forward(self, arguments: tuple[torch.Tensor, frozenset[int]]) -> torch.Tensor:
        x, skipped = arguments
        for i, layer in enumerate(self.layers):
            x = x if i in skipped else torch.tanh(layer(x))
        return x


@case(14, "layers known to be skipped", variants={"right_hint": {}, "wrong_hint": {"wrong": True}})
def usage_hint(engine: Engine, wrong: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/90171

    Symptom: find_unused_parameters is slow in every step, though the skipped layers are known.
    Right: a hint for the next forward is accepted; a wrong one gives right gradients and is named.
    """
    engine.require("expect_unused")
    pair = pair_of(engine, Skipping, find_unused_parameters=True)
    choose = random.Random(3)
    with recorded() as records:
        for step in range(4):
            skipped = frozenset(choose.sample(range(6), 2))
            hinted = skipped | {min(set(range(6)) - skipped)} if wrong else skipped
            pair.wrapped.expect_unused([f"layers.{i}.{name}" for i in hinted for name in ("weight", "bias")])
            pair.backward(lambda step=step, skipped=skipped: (rank_data(3, 4, step=step), skipped))
            pair.check()
            pair.update()
            pair.zero()
            if wrong:
                first = f"layers.{min(hinted - skipped)}.weight"
                assert any(first in text for text in coded(records)), f"{first} is not named: {coded(records)}"
    assert wrong or not coded(records)


@case(15, "noise about find_unused_parameters", variants={"some_unused": {}, "never_unused": {"steps": 110}})
def needless_search(engine: Engine, steps: int = 5) -> None:
    """https://github.com/clin1223/VLDet/issues/9 https://github.com/ZhangGongjie/Meta-DETR/issues/60
    https://github.com/pytorch/pytorch/pull/52385

    Symptom: every rank prints the same warning, also when parameters are unused in a later step.
    Right: at most one, on rank 0, through `warnings`, after many clean steps; none if any was unused.
    """
    model = engine.wrap(Branches(), find_unused_parameters=True)
    with standard_error() as stream, recorded() as records:
        for step in range(steps):
            used = "a" if steps == 5 and step else "ab"
            model((rank_data(3, 4, step=step), used)).sum().backward()
            model.zero_grad()
            if step == 4:
                early = len(records)
    assert "unused" not in stream.text, f"printed: {stream.text[:200]}"
    assert not early, f"warned too early: {records[0].message}"
    assert len(records) <= (dist.get_rank() == 0), [str(record.message) for record in records]
    if records:
        assert_told_once(coded(records), "find_unused_parameters")


@case(
    16,
    "an empty batch, or a backward skipped on one rank",
    variants={
        "zero_loss": {"how": "zero_loss"},
        "empty_input": {"how": "empty_input"},
        "skip": {"how": "skip", "own_processes": True},
        "skip_and_stop": {"how": "stop", "own_processes": True},
    },
)
def empty_batch(engine: Engine, how: str) -> None:
    """https://github.com/NVIDIA-NeMo/Automodel/pull/2468 https://github.com/pytorch/pytorch/pull/32612
    https://discuss.pytorch.org/t/training-hangs-on-loss-backward-with-ddp-nnodes-2-nproc-per-node-3/220127

    Symptom: a data-dependent `continue` on one rank: others wait, or steps of different data are averaged.
    Right: zero loss and empty input contribute zeros; a real skip raises soon and says which rank is behind.
    """
    pair = pair_of(engine, Reversed, **engine.where_offered(stall_threshold=2.0))
    mine = dist.get_rank() == 1

    def step(i: int) -> None:
        odd = mine and i == 3
        x = rank_data(0 if odd and how == "empty_input" else 3, 6, step=i)
        for model in (pair.wrapped, pair.plain):
            out = model(x)
            if odd and how in ("skip", "stop"):
                continue
            zero = 0 * sum(p.sum() for p in model.parameters())
            (zero if odd and how == "zero_loss" else out.square().sum()).backward()

    if how in ("zero_loss", "empty_input"):
        for i in range(6):
            step(i)
            pair.check()
            pair.update()
            pair.zero()
        return
    for i in range(3):
        step(i)
        pair.zero()
    if how == "skip":  # rank 1 is one backward behind from here on, and meets rank 0 with data of another step
        with refused(engine, "rank"):
            step(3)
            step(4)
    elif mine:
        step(3)
    else:
        with refused(engine, "rank 1", within=LATE):
            step(3)


class RankZeroOnly(nn.Module):
    """A submodule that one rank runs, and a collective of the user's in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.pos = nn.Linear(4, 4, bias=False)
        self.sums: list[float] = []

    def forward(self, x: torch.Tensor, asked: bool = True) -> torch.Tensor:
        if dist.get_rank() == 0:
            x = self.pos(x)
        if asked:
            sum_of_ranks = torch.tensor([dist.get_rank() + 1.0])
            dist.all_reduce(sum_of_ranks)
            self.sums.append(sum_of_ranks.item())
        return self.body(x)


@case(
    17,
    "collectives of the user's on the same group",
    variants={"submodule": {"own_processes": True}, "other_order": {"own_processes": True, "crossed": True}},
)
def other_collectives(engine: Engine, crossed: bool = False) -> None:
    """https://github.com/pytorch/pytorch/pull/72843

    Symptom: a submodule that only some ranks run; collectives pair up with the engine's and give garbage.
    Right: the user's sums and our means are right, or every rank raises.
    """
    (_crossed_order if crossed else _submodule_on_one_rank)(engine)


def _submodule_on_one_rank(engine: Engine) -> None:
    pair = pair_of(engine, RankZeroOnly, static_graph=True)
    raised = False
    for step in range(4):
        x = rank_data(3, 4, step=step)
        pair.plain(x, asked=False).square().sum().backward()
        try:
            pair.wrapped(x).square().sum().backward()
        except RuntimeError:
            raised = True
            break
        # Nobody compares with a collective before both ranks are known to be here.
        assert pair.wrapped.module.sums[-1] == 3.0, pair.wrapped.module.sums
        pair.check()
        pair.update()
        pair.zero()
    assert in_turns(lambda: raised) in ([True, True], [False, False]), "raised on one rank only"


def _crossed_order(engine: Engine) -> None:
    model = engine.wrap(nn.Linear(4, 4, bias=False))
    for _ in range(3):  # until the plan is final and only buckets are sent
        model(rank_data(3, 4)).sum().backward()
        model.zero_grad()
    plain = rank_data(3, 4, step=1).sum(0).expand(4, 4)
    expected = mean_over_ranks(plain)
    mine = torch.full((4, 4), 100.0 + dist.get_rank())
    try:
        if dist.get_rank() == 0:
            work = dist.all_reduce(mine, async_op=True)
            model(rank_data(3, 4, step=1)).sum().backward()
        else:
            model(rank_data(3, 4, step=1)).sum().backward()
            work = dist.all_reduce(mine, async_op=True)
        work.wait()
    except RuntimeError:
        return
    assert torch.equal(mine, torch.full((4, 4), 201.0)), f"the user's sum is {mine[0, 0].item()} instead of 201"
    torch.testing.assert_close(model.module.weight.grad, expected)
