"""Accumulation: what no_sync covers, and what is left when it covers the wrong half."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from field.kit import assert_told_once, coded, pair_of, recorded, refused, register
from field.registry import Engine, case
from models import Branches, Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data


@case(23, "no_sync around backward only")
def no_sync_after_forward(engine: Engine) -> None:
    """https://github.com/huggingface/accelerate/pull/1726 https://github.com/pytorch/PiPPy/issues/1133
    https://github.com/speechbrain/speechbrain/issues/1802 https://github.com/facebookresearch/ClassyVision/pull/706

    Symptom: it has no effect, training is slow, and nobody is told.
    Right: forward decides, so the backward still synchronises; said once.
    """
    pair = pair_of(engine, Reversed)
    with recorded() as records:
        for step in range(3):
            x = rank_data(3, 6, step=step)
            pair.plain(x).square().sum().backward()
            out = pair.wrapped(x)
            with pair.wrapped.no_sync():
                out.square().sum().backward()
            pair.check()
            pair.update()
            pair.zero()
    assert_told_once([text for text in coded(records) if "no_sync" in text], "no_sync")


@case(
    24,
    "forward under no_sync, backward outside",
    variants={
        "flag": {"how": "flag"},
        "context": {"how": "context"},
        "one_rank": {"how": "one", "own_processes": True},
    },
)
def forward_under_no_sync(engine: Engine, how: str) -> None:
    """https://github.com/karpathy/build-nanogpt/pull/30 https://github.com/pytorch/PiPPy/issues/1133

    Symptom: the flag is set between forward and backward, so nothing is ever reduced.
    Right: said once; when only one rank does it, every rank raises instead of averaging other steps.
    """
    model = engine.wrap(nn.Linear(4, 4))
    if how == "one":
        with refused(engine, "rank", "forward"):
            with model.no_sync() if dist.get_rank() == 1 else contextlib.nullcontext():
                model(rank_data(3, 4)).sum().backward()
            model(rank_data(3, 4, step=1)).sum().backward()
        return
    with recorded() as records:
        for step in range(8):
            if how == "flag":
                out = model(rank_data(3, 4, step=step))
                model.require_backward_grad_sync = step % 4 == 3
            else:
                with model.no_sync():
                    out = model(rank_data(3, 4, step=step))
            out.sum().backward()
    assert_told_once([text for text in coded(records) if "sync" in text], "forward", "backward")


@case(25, "the first micro-batch is synchronised, the last is not", variants={"asked": {}, "every": {"every": True}})
def wrong_half_synchronised(engine: Engine, every: bool = False) -> None:
    """https://github.com/modelscope/FunASR/pull/3472

    Symptom: ranks step with what is left on each of them, and diverge quietly.
    Right: a check that can be asked for names what differs and where, on every rank.
    """
    options = engine.require("assert_in_sync", check_sync_every=1) if every else {}
    engine.require("assert_in_sync")
    model = engine.wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.assert_in_sync()

    def step() -> None:
        model(rank_data(3, 4)).square().sum().backward()
        with model.no_sync():
            model(rank_data(3, 4, step=1)).square().sum().backward()
        optimizer.step()

    step()
    with refused(engine, "0.weight", "rank 1"):
        if every:
            step()
            step()
        else:
            model.assert_in_sync()
    dist.barrier()


@case(
    26,
    "static_graph under no_sync",
    variants={
        "one_rank": {"ranks": 1},
        "window_of_three": {},
        "window_changes": {"windows": (3, 3, 2, 4)},
        "two_backwards": {"backwards": 2},
    },
)
def static_accumulation(engine: Engine, windows: tuple[int, ...] = (3, 3, 3, 3), backwards: int = 1) -> None:
    """https://github.com/pytorch/pytorch/pull/187732 https://github.com/pytorch/pytorch/issues/143580
    https://github.com/huggingface/accelerate/issues/3679 https://github.com/Noble-Lab/casanovo/issues/512

    Symptom: the first backward inside no_sync dies of an internal assert; later ones are not reduced.
    Right: right and in sync in every step.
    """
    pair = pair_of(engine, Reversed, static_graph=True)
    for window, micro_batches in enumerate(windows):
        for i in range(micro_batches):
            last = i == micro_batches - 1
            x = rank_data(3, 6, step=10 * window + i)
            with contextlib.nullcontext() if last else pair.wrapped.no_sync():
                for model in (pair.wrapped, pair.plain):
                    out = model(x)
                    for left in reversed(range(1 if last else backwards)):
                        out.square().sum().backward(retain_graph=left > 0)
        pair.check()
        pair.update()
        pair.zero()


@case(27, "used only while not synchronised", variants={"default": {}, "views": {"views": True}})
def used_under_no_sync_only(engine: Engine, views: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/69031 https://github.com/pytorch/pytorch/pull/124193
    https://github.com/mosaicml/composer/issues/9

    Symptom: with find_unused_parameters, such gradients are never reduced.
    Right: the mean over ranks of everything accumulated; the record starts afresh with each window.
    """
    pair = pair_of(engine, Branches, find_unused_parameters=True, gradient_as_bucket_view=views)
    for window in range(3):
        with pair.wrapped.no_sync():
            pair.backward(lambda window=window: (rank_data(3, 4, step=window), "a"))
        pair.backward(lambda window=window: (rank_data(3, 4, step=window + 50), "b"))
        pair.check()
        assert pair.wrapped.module.a.weight.grad is not None
        pair.update()
        pair.zero()
    pair.backward(lambda: (rank_data(3, 4, step=99), "b"))
    assert pair.wrapped.module.a.weight.grad is None, "the record of the last window was not forgotten"


@case(
    29,
    "synchronising what was accumulated without another forward",
    variants={"default": {}, "views": {"options": {"gradient_as_bucket_view": True}}, "hook": {"hook": True}},
)
def synchronise_by_hand(engine: Engine, options: dict[str, Any] | None = None, hook: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/53443

    Symptom: the data ended inside an accumulation window, and nothing can reduce what is pending.
    Right: an explicit call that honours the comm hook and bucket views.
    """
    engine.require("sync_gradients")
    pair = pair_of(engine, Reversed, **(options or {}))
    calls: list[int] = []
    if hook:

        def counting(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            calls.append(bucket.index())
            return allreduce_hook(None, bucket)

        register(pair.wrapped, counting)
    for window in range(2):
        for i in range(3):
            with pair.wrapped.no_sync():
                pair.backward(lambda step=10 * window + i: rank_data(3, 6, step=step))
        calls.clear()
        pair.wrapped.sync_gradients()
        assert not hook or calls
        pair.check()
        pair.update()
        pair.zero()
    pair.backward(lambda: rank_data(3, 6, step=99))
    pair.check()
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")
