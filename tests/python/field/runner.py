"""Runs a case on every rank: in a pool that lives on, or in processes of its own under a watchdog."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

import own_processes
from field.registry import Case, Engine, NotOffered, Variant, all_variants


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
    begin = time.monotonic()
    answers = own_processes.run(
        run_on_this_rank,
        engine.name,
        case.number,
        variant.name,
        ranks=variant.ranks,
        limit=case.limit,
        lost=variant.lost,
    )
    kind, text = _judge(answers, variant, case.limit)
    return Outcome(kind, text, time.monotonic() - begin)


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
