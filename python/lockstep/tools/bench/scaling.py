"""Training in one process and on N ranks in turns: the efficiency, and what a step of each consists of."""

from __future__ import annotations

import dataclasses
import os
import statistics
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from lockstep.timing.report import PHASES, StepReport
from lockstep.tools.align.recipe import find
from lockstep.tools.bench.attribution import Cause, Facts, as_rows, attribute, note
from lockstep.tools.bench.statistics import Estimate, estimate, trimmed_mean
from lockstep.tools.bench.trainer import Buckets, Trainer
from lockstep.tools.doctor.pair import transport
from lockstep.tools.members import Say, Team, check_devices, join_group, orders

#: Steps of each run before any counts: buckets are laid out anew after the first, and libraries warm up.
WARMUP = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run. ``steps``: of each run in a round. ``weak``: the global batch grows with the ranks."""

    recipe: str
    world_size: int
    rounds: int = 10
    steps: int = 10
    weak: bool = False
    device: str = "cpu"
    timeout: float = 300.0


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The answer. Times in seconds; ``one`` and ``many`` are steps of one process and of the ranks together.

    ``lost`` is what a step of the ranks takes beyond its share: T_n - T_1 / n, or T_n - T_1 for weak scaling.
    """

    world_size: int
    weak: bool
    one: Estimate
    many: Estimate
    efficiency: Estimate
    lost: float
    causes: list[Cause]
    notes: list[Cause]
    transport: str
    rounds: list[tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: each cause with its share of ``lost``."""
        return dataclasses.asdict(self) | {"causes": as_rows(self.causes, self.lost)}


Answer = tuple[list[dict[str, float]], Buckets | None]


class Rounds:
    """What both runs have answered so far."""

    def __init__(self, world_size: int, weak: bool = False) -> None:
        self._world_size, self._weak = world_size, weak
        self._ones: list[dict[str, float]] = []
        self._ranks: list[list[dict[str, float]]] = [[] for _ in range(world_size)]
        self._buckets: list[Buckets] = []
        self._rounds: list[tuple[float, float]] = []

    def add(self, one: Answer, many: list[Answer]) -> None:
        """One round: what a ``Trainer`` in one process answered, and what those of the ranks did."""
        report = StepReport([steps for steps, _ in many])
        self._ones += one[0]
        for own, steps in zip(self._ranks, report.ranks, strict=True):
            own += steps
        self._buckets += [found for _, found in many if found is not None]
        alone = statistics.median(step["step"] for step in one[0])
        self._rounds.append((alone, statistics.median(report.values("step"))))

    def result(self, facts: Facts) -> Scaling:
        """The efficiency by the medians of the rounds, and the causes by trimmed means over all steps."""
        share = 1 if self._weak else self._world_size
        report = StepReport(self._ranks)
        one, many = trimmed_mean(self._ones, "step"), trimmed_mean(report.split(), "step")
        ideal = {phase: one[phase] / share for phase in (*PHASES, "step")}
        return Scaling(
            world_size=self._world_size,
            weak=self._weak,
            one=estimate([one for one, _ in self._rounds]),
            many=estimate([many for _, many in self._rounds]),
            efficiency=estimate([one / (share * many) for one, many in self._rounds]),
            lost=many["step"] - ideal["step"],
            causes=attribute(ideal, many, report, self._buckets, facts),
            notes=note(facts),
            transport=facts.transport,
            rounds=self._rounds,
        )


def measure(job: Job) -> Scaling:
    """Run both in turns. Whatever happens, no process is left behind.

    Raises:
        RecipeError: the recipe failed on some rank, a process died or hung, or there are too few GPUs.
    """
    check_devices(job.device, job.world_size)
    rounds = Rounds(job.world_size, job.weak)
    with Team(job.timeout) as team:
        log = team.store("nccl")
        single = [team.start("the run in one process", _be_a_process, job, None, "", log)]
        ranks = [
            team.start(f"rank {rank}", _be_a_process, job, rank, team.store("group"), log)
            for rank in range(job.world_size)
        ]
        for members in (single, ranks):
            team.ask(members, WARMUP)
        for number in range(job.rounds):
            if number % 2 == 0:
                (one,), many = team.ask(single, job.steps), team.ask(ranks, job.steps)
            else:
                many, (one,) = team.ask(ranks, job.steps), team.ask(single, job.steps)
            rounds.add(one, many)
        facts: Facts = team.ask(ranks, "facts")[0]
        if job.device == "cuda":
            texts = "".join(path.read_text(errors="replace") for path in Path(log).parent.glob("nccl.*"))
            facts = dataclasses.replace(facts, transport=transport(texts))
    return rounds.result(facts)


def _be_a_process(pipe: Connection, say: Say, job: Job, rank: int | None, store: str, log: str) -> None:
    if job.device == "cuda":
        torch.cuda.set_device(rank or 0)
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{log}.%p"}  # names the transport
    world_size = 1 if rank is None else job.world_size
    factor = job.world_size if job.weak and rank is not None else 1
    make = find(job.recipe)
    if rank is not None:
        join_group(rank, world_size, store, job.device, job.timeout)
    trainer = Trainer(make, rank or 0, world_size, job.device, factor)
    trainer.wrap(record=True)
    for order in orders(pipe):
        say("answer", Facts.of(trainer, job.device) if order == "facts" else trainer.steps(order))


