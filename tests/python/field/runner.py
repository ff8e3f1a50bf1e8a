"""Runs a case on every rank: in a pool that lives on, or in processes of its own under a watchdog."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from field.registry import Case, Engine, NotOffered, Variant, all_variants
from ranks import join_group

#: In seconds: what the ranks that still run get after one has failed.
GRACE = 3.0


@dataclass(frozen=True)
class Outcome:
    """``right``, ``wrong``, ``raises``, ``hang``, ``crash`` or ``not offered``, and in which words."""

    kind: str
    text: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}" if self.text else self.kind


def run_on_this_rank(engine: str, number: int, variant: str) -> None:
    """What a rank does for one variant of a case."""
    case = next(case for case, _ in all_variants() if case.number == number)
    torch.manual_seed(0)
    case.run(Engine(engine), **case.variants[variant].arguments)


def run_in_own_processes(engine: Engine, case: Case, variant: Variant) -> Outcome:
    """Run one variant in fresh processes and kill whatever is left of them."""
    context = _context()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lockstep_field_") as folder:
        pipes, processes = [], []
        for rank in range(variant.ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, variant.ranks, os.path.join(folder, "store"), theirs)
            process = context.Process(
                target=_serve_once, args=(*arguments, engine.name, case.number, variant.name), daemon=False
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            answers = _collect(pipes, variant, begin + case.limit)
        finally:
            for process in processes:
                process.kill()
                process.join()
    kind, text = _judge(answers, variant, case.limit)
    return Outcome(kind, text, time.monotonic() - begin)


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


def _collect(pipes: list[Connection], variant: Variant, deadline: float) -> dict[int, Any]:
    """What each rank answered: None, or an exception. A rank that died has EOFError; one that hangs has no entry."""
    answers: dict[int, Any] = {}
    needed = set(range(len(pipes))) - set(variant.lost)
    while not needed <= answers.keys() and time.monotonic() < deadline:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        for pipe in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            rank = waiting[pipe]
            try:
                answers[rank] = pipe.recv()
            except (EOFError, ConnectionError):
                answers[rank] = EOFError()
            if answers[rank] is not None and rank in needed:
                deadline = min(deadline, time.monotonic() + GRACE)
    return answers


def _judge(answers: dict[int, Any], variant: Variant, limit: float) -> tuple[str, str]:
    needed = [rank for rank in range(variant.ranks) if rank not in variant.lost]
    errors = [(rank, answers[rank]) for rank in needed if isinstance(answers.get(rank), BaseException)]
    for kind, of_kind in [
        ("not offered", NotOffered),
        ("wrong", AssertionError),
        ("raises", Exception),
    ]:
        for rank, error in errors:
            if isinstance(error, of_kind) and not isinstance(error, EOFError):
                name = "" if kind != "raises" else f"{type(error).__name__}: "
                return kind, name + "\n".join([str(error), *getattr(error, "__notes__", [])]) + f" (rank {rank})"
    if errors:
        return "crash", f"rank {errors[0][0]} died"
    silent = [rank for rank in needed if rank not in answers]
    return ("hang", f"rank {silent[0]} gave no answer in {limit:.0f} s") if silent else ("right", "")


def _serve_once(rank: int, size: int, store: str, pipe: Connection, engine: str, number: int, variant: str) -> None:
    join_group(rank, size, store)
    answer: BaseException | None = None
    try:
        run_on_this_rank(engine, number, variant)
    except BaseException as error:
        error.add_note(traceback.format_exc())
        answer = error
    try:
        pipe.send(answer)
    except Exception:  # it cannot be pickled
        pipe.send(AssertionError(f"{type(answer).__name__}: {answer}"))
    pipe.poll(None)  # until killed: leaving would disturb the ranks that are not done
