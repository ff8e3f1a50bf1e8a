"""Starts one process for the run in one process and one for each rank, and brings their records together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from lockstep.tools.align.compare import Comparison, compare
from lockstep.tools.align.recipe import RecipeError, find
from lockstep.tools.align.trace import StepRecord, trace
from lockstep.tools.members import Member, Say, Team, check_devices, join_group

__all__ = ["Job", "RecipeError", "align"]


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run. ``timeout``: in seconds, how long a process may take for its start, or for a step."""

    recipe: str
    world_size: int
    steps: int
    seed: int = 0
    device: str = "cpu"
    timeout: float = 300.0


def align(job: Job) -> Comparison:
    """Run both and compare. Whatever happens, no process is left behind.

    Raises:
        RecipeError: the recipe failed on some rank, a process died or hung, or there are too few GPUs.
    """
    check_devices(job.device, job.world_size)
    with Team(job.timeout) as team:
        for rank in (None, *range(job.world_size)):
            name = "the run in one process" if rank is None else f"rank {rank}"
            team.start(name, _be_a_process, job, rank, team.store("group"))
        one, *many = (_records(member, team.members) for member in team.members)
        return compare(one, many)


def _records(member: Member, all_members: list[Member]) -> Iterator[StepRecord]:
    while True:
        word, content = member.word(all_members)
        if word == "end":
            return
        yield content


def _be_a_process(pipe: Connection, say: Say, job: Job, rank: int | None, store: str) -> None:
    if job.device == "cuda":
        torch.cuda.set_device(rank or 0)
        # On by default for convolutions: its rounding, 1e-3, would hide whether the runs are equal.
        torch.backends.cudnn.allow_tf32 = False
    make = find(job.recipe)
    if rank is not None:
        join_group(rank, job.world_size, store, job.device, job.timeout)
    world_size = 1 if rank is None else job.world_size
    for record in trace(make, rank or 0, world_size, job.steps, job.seed, job.device):
        say("step", record)
    say("end", None)
