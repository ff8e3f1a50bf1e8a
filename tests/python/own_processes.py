"""Ranks in processes of their own, for groups that are of no use afterwards: killed by a watchdog, whatever they do."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

from ranks import join_group

#: In seconds: what the ranks that still run get after one has failed.
GRACE = 3.0


def run(
    function: Callable[..., Any],
    *arguments: Any,
    ranks: int,
    limit: float,
    lost: tuple[int, ...] = (),
    is_final: Callable[[Any], bool] = lambda answer: isinstance(answer, BaseException),
    join: Callable[[int, int, str], None] = join_group,
) -> dict[int, Any]:
    """Run ``function(*arguments)`` on every rank, in fresh processes, and kill whatever is left of them.

    Args:
        ranks: how many processes, in one gloo group.
        limit: seconds until the watchdog ends it.
        lost: ranks that die or hang on purpose; nobody waits for their answers.
        is_final: after such an answer of one rank, the others get ``GRACE`` seconds.
        join: ``join(rank, ranks, path of the store)`` makes a process a rank.

    Returns:
        By rank: what the function returned or raised. A rank that died has EOFError, one that hangs has no entry.
    """
    context = _context()
    _wait_for_server(context)
    deadline = time.monotonic() + limit
    with tempfile.TemporaryDirectory(prefix="lockstep_own_") as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            where = (rank, ranks, os.path.join(folder, "store"), theirs, join)
            process = context.Process(target=_serve_once, args=(*where, function, arguments), daemon=False)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, set(range(ranks)) - set(lost), deadline, is_final)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _context() -> multiprocessing.context.BaseContext:
    """Processes forked from a server that has imported everything: a start costs no second."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["field.runner", "field.scenarios", "torch._dynamo"])
    kept = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the server does not get sys.path
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if kept is None else os.environ.update(PYTHONPATH=kept)
    return context


@functools.cache
def _wait_for_server(context: multiprocessing.context.BaseContext) -> None:
    """Its imports may take longer than a case may: they are not part of one."""
    process = context.Process(target=int)
    process.start()
    process.join()


def _collect(
    pipes: list[Connection], needed: set[int], deadline: float, is_final: Callable[[Any], bool]
) -> dict[int, Any]:
    answers: dict[int, Any] = {}
    while not needed <= answers.keys() and time.monotonic() < deadline:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            rank = waiting[pipe]
            try:
                answers[rank] = pipe.recv()
            except (EOFError, ConnectionError):
                answers[rank] = EOFError()
            if rank in needed and is_final(answers[rank]):
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _serve_once(
    rank: int,
    ranks: int,
    store: str,
    pipe: Connection,
    join: Callable[[int, int, str], None],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    join(rank, ranks, store)
    try:
        answer = function(*arguments)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        answer = error
    try:
        pipe.send(answer)
    except Exception:  # it cannot be pickled
        pipe.send(AssertionError(f"{type(answer).__name__}: {answer}"))
    pipe.poll(None)  # until killed: leaving would disturb the ranks that are not done
