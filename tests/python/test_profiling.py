"""What a profile of a step shows: the events of torch's engine, once each, so that tools that count them are right."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from models import Branches
from oracle import rank_data

PROFILERS = {
    "torch": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True),
    "autograd": lambda: torch.autograd.profiler.profile(record_shapes=True),
}

#: Torch's engine waits for the future of a bucket, which gloo completes just before it closes the event.
LAST_EVENT = "torch's engine may end a profile before the event of its last bucket is closed"


def _events(profile) -> list:
    return profile.events() if isinstance(profile, torch.profiler.profile) else profile.function_events


def _reductions(profile) -> list[list[int]]:
    """The shape of each all-reduce of a group, sorted: gloo's threads begin them in any order. All are asynchronous."""
    found = [event for event in _events(profile) if event.name == "gloo:all_reduce"]
    assert all(event.is_async for event in found)
    return sorted(event.input_shapes[0] for event in found)


def _count(profile, name: str) -> int:
    return sum(name in event.name for event in _events(profile))


def _six_steps(cls: type, profiler: str) -> tuple[list, bool]:
    model = cls(nn.Linear(10, 10, bias=False))
    with PROFILERS[profiler]() as profile:
        for step in range(6):
            model(rank_data(3, 10, step=step)).sum().backward()
    return _reductions(profile), _count(profile, "gloo:broadcast") >= 1  # the second plan comes from rank 0


@pytest.mark.parametrize("profiler", PROFILERS)
def test_there_is_one_all_reduce_for_each_step_of_one_bucket(ranks, profiler):
    expected = ([[100]] * 6, True)
    assert ranks.run(_six_steps, lockstep.DistributedDataParallel, profiler) == [expected] * 2
    for shapes, broadcasts in ranks.run(_six_steps, TorchDDP, profiler):
        assert broadcasts and shapes == expected[0][: len(shapes)] and len(shapes) >= 5, LAST_EVENT


def _later_step(cls: type, profiler: str) -> tuple[list, int]:
    """The thread-local state of the profiler must reach a step whose reducer is older than the profile."""
    model = cls(Branches(), find_unused_parameters=True)
    for step in range(3):
        model((rank_data(3, 4, step=step), "a")).sum().backward()
    with PROFILERS[profiler]() as profile:
        model((rank_data(3, 4, step=3), "a")).sum().backward()
    return _reductions(profile), _count(profile, "search_unused_parameters")


@pytest.mark.parametrize("profiler", PROFILERS)
def test_with_unused_parameters_it_shows_the_exchange_and_the_name_of_torchs_search(ranks, profiler):
    (shapes, searches), *_ = ranks.run(_later_step, lockstep.DistributedDataParallel, profiler)
    (of_torch, searches_of_torch), *_ = ranks.run(_later_step, TorchDDP, profiler)
    assert searches == searches_of_torch == 1
    assert len(shapes) == 2 and shapes[0] == [6]  # one number a parameter; the other is that of the gradients
    assert len(of_torch) <= 2 and [6] in of_torch, LAST_EVENT


def _hidden() -> list[str]:
    """Everything in the trace that looks like a collective or a wait for one, by a name that any backend uses."""
    model = lockstep.DistributedDataParallel(nn.Linear(10, 10, bias=False))
    model(rank_data(3, 10)).sum().backward()
    with PROFILERS["torch"]() as profile:
        model(rank_data(3, 10)).sum().backward()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        names = [event.get("name", "") for event in json.loads(Path(file.name).read_text())["traceEvents"]]
    of_collectives = ("c10d::allreduce", "gloo:all_reduce", "record_param_comms", "wait")
    return sorted(name for name in names if name.startswith(of_collectives))


def test_agreement_of_the_ranks_leaves_no_trace_in_a_profile(ranks):
    for names in ranks.run(_hidden):
        assert names == ["c10d::allreduce_", "gloo:all_reduce"], names
