"""Processes that run a recipe and report by words; whatever happens, one clear failure, and nobody is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.tools.align.recipe import RecipeError

#: In seconds: how long the other processes may take to say why they failed, too.
_GRACE = 3.0

Say = Callable[[str, Any], None]


class Failed(Exception):
    """A process failed, at ``when`` (seconds of the clock that all share; 0 where it could not say)."""

    def __init__(self, when: float, text: str) -> None:
        super().__init__(text)
        self.when, self.text = when, text


@dataclasses.dataclass
class Member:
    """One process. ``timeout``: seconds that it may take for a start, or between two words."""

    name: str
    process: Any
    pipe: Connection
    timeout: float
    failure: Failed | None = None

    def tell(self, order: Any) -> None:
        """Hand ``order`` to what the process reads from its own end of the pipe."""
        with contextlib.suppress(BrokenPipeError):  # its last word says why
            self.pipe.send_bytes(pickle.dumps(order))

    def word(self, all_members: list[Member]) -> tuple[str, Any]:
        """Its next word. Watches the others meanwhile: one that fails makes this one wait for ever.

        Raises:
            Failed: this process failed, or another one did.
            RecipeError: neither happened for ``timeout`` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while not self.pipe.poll(0.02):
            for member in all_members:
                if member.process.exitcode not in (None, 0):
                    while True:  # words that nobody will hear any more come before its last one
                        member.receive()
            if time.monotonic() > deadline:
                text = f"{self.name} gave no sign for {self.timeout:g} s: it hangs, or needs a larger --timeout."
                raise RecipeError(text)
        return self.receive()

    def receive(self) -> tuple[str, Any]:
        """The next word of this process.

        Raises:
            Failed: that word is of a failure, or there is none, because it died. The same one for ever after.
        """
        if self.failure is None:
            try:
                return self._read()
            except Failed as failure:
                self.failure = failure
        raise self.failure

    def _read(self) -> tuple[str, Any]:
        try:
            word, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join()
            code = self.process.exitcode
            reason = f"was killed by signal {-code}; out of memory?" if code < 0 else f"ended with exit status {code}."
            raise Failed(0.0, f"{self.name} {reason}") from None
        if word == "error":
            raise Failed(content[0], f"{self.name} failed: {content[1]}")
        return word, content


class Team:
    """The processes of one command."""

    def __init__(self, timeout: float) -> None:
        self.members: list[Member] = []
        self._timeout = timeout
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="lockstep_tools_")

    def store(self, name: str) -> str:
        """A path in which ranks of one group can meet."""
        return str(Path(self._folder.name) / name)

    def start(self, name: str, run: Callable[..., None], *arguments: Any) -> Member:
        """Start a process that calls ``run(pipe, say, *arguments)``; ``say(word, content)`` is heard here."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(run, theirs, arguments))
        process.start()
        theirs.close()
        self.members.append(Member(name, process, ours, self._timeout))
        return self.members[-1]

    def ask(self, members: list[Member], order: Any) -> list[Any]:
        """Give all of ``members`` the same order, and return what each answers."""
        for member in members:
            member.tell(order)
        return [member.word(self.members)[1] for member in members]

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if isinstance(error, Failed):
                raise RecipeError(first_of(error, self.members).text) from None
        finally:
            for member in self.members:
                member.process.kill()
                member.process.join()
            self._folder.cleanup()


def first_of(failure: Failed, members: list[Member]) -> Failed:
    """The failure that came first. The others follow from it: whoever waited for that rank lost its connection."""
    failures, deadline = [failure], time.monotonic() + _GRACE
    for member in members:
        try:
            while member.pipe.poll(max(0.0, deadline - time.monotonic())):
                if member.receive()[0] == "end":
                    break
        except Failed as other:
            failures.append(other)
    return min(failures, key=lambda one: one.when)


def check_devices(device: str, ranks: int) -> None:
    """Refuse what cannot start.

    Raises:
        RecipeError: there are fewer GPUs than ranks.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        found = torch.cuda.device_count()
        raise RecipeError(f"{ranks} ranks need as many GPUs, but there are {found}. Lower --nproc.")


def join_group(rank: int, world_size: int, store: str, device: str, timeout: float) -> None:
    """Become one rank of a group over NCCL or gloo."""
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def orders(pipe: Connection) -> Iterator[Any]:
    """In a process: what it is told, until nobody is there any more."""
    while True:
        try:
            yield pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return


def _serve(run: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]) -> None:
    def say(word: str, content: Any = None) -> None:
        pipe.send_bytes(pickle.dumps((word, content)))

    torch.set_num_threads(1)
    try:
        run(pipe, say, *arguments)
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
