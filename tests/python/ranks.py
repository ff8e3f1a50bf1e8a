"""Real processes that act as ranks: started once, given one function after the other."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

#: In seconds. No collective of a test may wait longer than this for a rank that does not come.
GROUP_TIMEOUT = 10


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


def join_group(rank: int, world_size: int, store: str, timeout: float = GROUP_TIMEOUT) -> None:
    """Become one rank of a gloo group that meets in the file ``store``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


class RankPool:
    """``world_size`` processes in one group, which ``join(rank, world_size, store)`` makes."""

    def __init__(self, world_size: int, join: Callable[[int, int, str], None] = join_group) -> None:
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep_ranks_")
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            store = os.path.join(self._folder.name, "store")
            process = context.Process(target=_serve, args=(join, rank, world_size, store, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def outcomes(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Run ``function(*args)`` on every rank. One entry a rank: its result, or the exception it raised.

        Raises:
            RankError: a rank died or gave no answer within ``timeout`` seconds. The pool is closed then.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise RankError(f"rank {rank} gave no answer within {timeout} s: it hangs, or waits for another")
                answers.append(pipe.recv())
            except (RankError, EOFError, ConnectionError) as error:
                self.close()
                raise error if isinstance(error, RankError) else RankError(f"rank {rank} died") from error
        return answers

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
        """Like ``outcomes``, but any exception on any rank fails the test."""
        results = self.outcomes(function, *args, timeout=timeout)
        failed = [f"rank {rank}: {_full_text(error)}" for rank, error in enumerate(results) if _is_error(error)]
        if failed:
            self.close()  # the ranks may no longer be at the same collective
            raise RankError("\n".join(failed))
        return results

    @property
    def usable(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        self._folder.cleanup()


def _is_error(value: Any) -> bool:
    return isinstance(value, BaseException)


def _full_text(error: BaseException) -> str:
    return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])


def _serve(
    join: Callable[[int, int, str], None], rank: int, world_size: int, store: str, pipe: Connection
) -> None:
    join(rank, world_size, store)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            result = function(*args)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = error
        try:
            pipe.send(result)
        except Exception as error:  # what the test returned or raised cannot be pickled
            pipe.send(RankError(f"{type(result).__name__}: {result} ({error})"))
