"""Ranks with different numbers of batches, under ``join``."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from models import Branches, Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data


def _train(
    cls: type, batches: list[int], options: dict, join: dict, accumulate: bool, hook: bool
) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = cls(Reversed(), bucket_cap_mb=0.0003, **options)
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(**join):
        for step in range(batches[dist.get_rank()]):
            reduced = not accumulate or step % 2 == 1
            with contextlib.nullcontext() if reduced else model.no_sync():
                model(rank_data(3, 6, step=step)).square().sum().backward()
            if reduced:
                optimizer.step()
                optimizer.zero_grad()
    assert_bit_equal_on_all_ranks(model.parameters(), "parameter")
    return [p.detach().clone() for p in model.parameters()]


def _like_torch(*arguments) -> None:
    trained = [_train(cls, *arguments) for cls in (lockstep.DistributedDataParallel, TorchDDP)]
    for ours, theirs in zip(*trained, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("hook", [False, True], ids=["no_hook", "hook"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["every_step", "accumulated"])
@pytest.mark.parametrize("initial", [True, False], ids=["divide_by_all", "divide_by_live"])
@pytest.mark.parametrize("batches", [[5, 3], [2, 6], [0, 3]], ids=str)
def test_uneven_inputs_train_as_with_torch(ranks, batches, initial, accumulate, hook):
    if accumulate:
        batches = [2 * n for n in batches]
    ranks.run(_like_torch, batches, {}, {"divide_by_initial_world_size": initial}, accumulate, hook)


@pytest.mark.parametrize("options", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_uneven_inputs_train_in_other_modes(ranks, options):
    ranks.run(_like_torch, [5, 3], options, {}, False, False)


def _unused(batches: list[int], options: dict, hook: str | None) -> None:
    model = lockstep.DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-6, **options)
    if hook:
        model.register_comm_hook(getattr(lockstep.hooks, hook)())
    with model.join():
        for step in range(batches[dist.get_rank()]):
            # The branch changes, so that gradients come late while the other rank has run out of data.
            model((rank_data(3, 4, step=step), "a" if step < 4 else "ab")).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
            model.zero_grad()
    assert_bit_equal_on_all_ranks(model.parameters(), "parameter")


@pytest.mark.parametrize("hook", [None, "Int8"])
@pytest.mark.parametrize("options", [{}, {"skip_all_reduce_unused_params": True}], ids=["all_buckets", "used_buckets"])
@pytest.mark.parametrize("batches", [[6, 2], [2, 6]], ids=str)
def test_uneven_inputs_with_unused_parameters_and_late_gradients_keep_ranks_equal(ranks, batches, options, hook):
    ranks.run(_unused, batches, options, hook)


class WithSpare(nn.Module):
    """``spare`` is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _static_with_spare() -> None:
    model = lockstep.DistributedDataParallel(WithSpare(), static_graph=True)
    for batches in ([0, 3], [3, 3]):
        with model.join():
            for step in range(batches[dist.get_rank()]):
                model(rank_data(3, 4, step=step)).sum().backward()
                model.zero_grad()


def test_a_rank_without_a_batch_in_the_first_epoch_learns_the_static_graph_of_the_others(ranks):
    ranks.run(_static_with_spare)


def _early_stop() -> int:
    model = lockstep.DistributedDataParallel(Reversed())
    done = 0
    with pytest.raises(RuntimeError, match="exhausted"), model.join(throw_on_early_termination=True):
        for step in range(3 if dist.get_rank() else 6):
            model(rank_data(3, 6, step=step)).sum().backward()
            done += 1
    return done


def test_early_termination_stops_all_ranks_together(ranks):
    assert ranks.run(_early_stop) == [3, 3]
