"""Starts one process for the run in one process and one for each rank, and brings their records together."""

from __future__ import annotations

import dataclasses
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.tools.align.compare import Comparison, compare
from lockstep.tools.align.recipe import RecipeError, find
from lockstep.tools.align.trace import StepRecord, trace


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
    if job.device == "cuda" and torch.cuda.device_count() < job.world_size:
        found = torch.cuda.device_count()
        raise RecipeError(f"{job.world_size} ranks need as many GPUs, but there are {found}. Lower --nproc.")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="lockstep_align_") as folder:
        members = []
        try:
            for rank in (None, *range(job.world_size)):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (job, rank, str(Path(folder) / "store"), theirs)
                process = context.Process(target=_be_a_process, args=arguments)
                process.start()
                theirs.close()
                members.append(_Member(rank, process, ours, job.timeout))
            return compare(members[0].records(members), [member.records(members) for member in members[1:]])
        finally:
            for member in members:
                member.process.kill()
                member.process.join()


@dataclasses.dataclass
class _Member:
    rank: int | None  # None: the run in one process
    process: Any
    pipe: Connection
    timeout: float

    @property
    def name(self) -> str:
        return "the run in one process" if self.rank is None else f"rank {self.rank}"

    def records(self, all_members: list[_Member]) -> Iterator[StepRecord]:
        """This process's records. Watches the others meanwhile: one that fails makes this one wait for ever."""
        while True:
            deadline = time.monotonic() + self.timeout
            while not self.pipe.poll(0.1):
                for member in all_members:
                    member.complain_if_it_failed()
                if time.monotonic() > deadline:
                    text = f"{self.name} gave no sign for {self.timeout:g} s: it hangs, or needs a larger --timeout."
                    raise RecipeError(text)
            word, content = self._receive()
            if word == "end":
                return
            yield content

    def _receive(self) -> tuple[str, Any]:
        try:
            word, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            reason = f"was killed by signal {-code}; out of memory?" if code < 0 else f"ended with exit status {code}."
            raise RecipeError(f"{self.name} {reason}") from None
        if word == "error":
            raise RecipeError(f"{self.name} failed: {content}")
        return word, content

    def complain_if_it_failed(self) -> None:
        """Read on if the process has ended, because its last word may be what went wrong."""
        if self.process.exitcode not in (None, 0):
            while True:  # records that nobody will compare any more come first
                self._receive()


def _be_a_process(job: Job, rank: int | None, store: str, pipe: Connection) -> None:
    def say(word: str, content: Any = None) -> None:
        pipe.send_bytes(pickle.dumps((word, content)))

    torch.set_num_threads(1)
    try:
        device = job.device
        if device == "cuda":
            torch.cuda.set_device(rank or 0)
        make = find(job.recipe)
        if rank is not None:
            dist.init_process_group(
                "nccl" if device == "cuda" else "gloo",
                store=dist.FileStore(store, job.world_size),
                rank=rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=job.timeout),
            )
        world_size = 1 if rank is None else job.world_size
        for record in trace(make, rank or 0, world_size, job.steps, job.seed, device):
            say("step", record)
        say("end")
    except RecipeError as error:
        say("error", str(error))
        sys.exit(1)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        say("error", f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})")
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
