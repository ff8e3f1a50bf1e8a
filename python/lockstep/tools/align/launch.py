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
        except _Failed as failure:
            raise RecipeError(_first_of(failure, members).text) from None
        finally:
            for member in members:
                member.process.kill()
                member.process.join()


class _Failed(Exception):
    """A process failed, at ``when`` (seconds of the clock that all share; 0 where it could not say)."""

    def __init__(self, when: float, text: str) -> None:
        super().__init__(text)
        self.when, self.text = when, text


def _first_of(failure: _Failed, members: list[_Member]) -> _Failed:
    """The failure that came first. The others follow from it: whoever waited for that rank lost its connection."""
    failures, deadline = [failure], time.monotonic() + _GRACE
    for member in members:
        try:
            while member.pipe.poll(max(0.0, deadline - time.monotonic())):
                if member.receive()[0] == "end":
                    break
        except _Failed as other:
            failures.append(other)
    return min(failures, key=lambda one: one.when)


#: In seconds: how long the other processes may take to say why they failed, too.
_GRACE = 3.0


@dataclasses.dataclass
class _Member:
    rank: int | None  # None: the run in one process
    process: Any
    pipe: Connection
    timeout: float
    failure: _Failed | None = None

    @property
    def name(self) -> str:
        return "the run in one process" if self.rank is None else f"rank {self.rank}"

    def records(self, all_members: list[_Member]) -> Iterator[StepRecord]:
        """This process's records. Watches the others meanwhile: one that fails makes this one wait for ever."""
        while True:
            deadline = time.monotonic() + self.timeout
            while not self.pipe.poll(0.1):
                for member in all_members:
                    if member.process.exitcode not in (None, 0):
                        while True:  # records that nobody will compare any more come before its last word
                            member.receive()
                if time.monotonic() > deadline:
                    text = f"{self.name} gave no sign for {self.timeout:g} s: it hangs, or needs a larger --timeout."
                    raise RecipeError(text)
            word, content = self.receive()
            if word == "end":
                return
            yield content

    def receive(self) -> tuple[str, Any]:
        """The next word of this process.

        Raises:
            _Failed: that word is of a failure, or there is none, because it died. The same one for ever after.
        """
        if self.failure is None:
            try:
                return self._read()
            except _Failed as failure:
                self.failure = failure
        raise self.failure

    def _read(self) -> tuple[str, Any]:
        try:
            word, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            reason = f"was killed by signal {-code}; out of memory?" if code < 0 else f"ended with exit status {code}."
            raise _Failed(0.0, f"{self.name} {reason}") from None
        if word == "error":
            raise _Failed(content[0], f"{self.name} failed: {content[1]}")
        return word, content


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
        say("error", (time.time(), str(error)))
        sys.exit(1)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(place.filename).name}, line {place.lineno})"
        say("error", (time.time(), text))
        sys.exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
