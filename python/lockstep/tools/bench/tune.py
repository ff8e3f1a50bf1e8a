"""Finds, on the user's own step, the bucket size, placement, communicator and hook that are fastest: a tournament."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.timing.report import StepReport
from lockstep.tools.align.recipe import find
from lockstep.tools.bench.statistics import Estimate, estimate
from lockstep.tools.bench.trainer import Trainer
from lockstep.tools.members import Say, Team, check_devices, join_group, orders

#: Steps after each wrapping before any counts: the buckets are laid out anew after the first.
_WARMUP = 3
#: Differences below this are not worth a line of code, however sure they are.
_WORTH = 0.01
_FEWEST_ROUNDS = 3
_ENOUGH_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run. ``rounds``: at most, of each contender against the best so far. ``lossy``: also hooks that round."""

    recipe: str
    world_size: int
    rounds: int = 8
    steps: int = 10
    lossy: bool = False
    device: str = "cpu"
    timeout: float = 300.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """Arguments of the wrapper, and a comm hook with its arguments."""

    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    hook: str | None = None
    hook_arguments: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **changes: Any) -> Setting:
        """The same with further arguments of the wrapper."""
        return dataclasses.replace(self, arguments=self.arguments | changes)

    def wrap(self, module: nn.Module) -> nn.Module:
        model = lockstep.DistributedDataParallel(module, **self.arguments)
        if self.hook:
            model.set_comm_hook(self.hook, **self.hook_arguments)
        return model

    @property
    def name(self) -> str:
        parts = [f"{name}={value!r}" for name, value in self.arguments.items()]
        if self.hook:
            parts.append("hook " + self.hook)
        return ", ".join(parts) or "defaults"

    @property
    def code(self) -> str:
        """The line that does the same."""
        arguments = "".join(f", {name}={value!r}" for name, value in self.arguments.items())
        line = f"model = lockstep.DistributedDataParallel(model{arguments})"
        if self.hook:
            options = "".join(f", {name}={value!r}" for name, value in self.hook_arguments.items())
            line += f'; model.set_comm_hook("{self.hook}"{options})'
        return line


@dataclasses.dataclass(frozen=True)
class Trial:
    """A contender's step in seconds, and its ratio to the best before it in the same rounds. None: the first."""

    name: str
    code: str
    step: Estimate
    ratio: Estimate | None
    rounds: int
    verdict: str


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The tournament and its winner."""

    winner: str
    code: str
    trials: list[Trial]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def challengers(best: Setting, stage: int, device: str, lossy: bool) -> list[Setting] | None:
    """What is tried against ``best`` in this stage; None: there are no further stages."""
    if stage == 0:
        return [best.but(bucket_cap_mb=size) for size in (5, 25, 100, 400)]
    if stage == 1:
        return [best.but(gradient_as_bucket_view=True)]
    if stage == 2:
        return [best.but(communicator="nccl")] if device == "cuda" else [best.but(communicator="group")]
    if stage == 3:
        rounding = [dataclasses.replace(best, hook=hook) for hook in ("bf16", "fp16", "int8")]
        power = dataclasses.replace(best, hook="power_sgd", hook_arguments={"rank": 4, "start_iteration": 0})
        return [*rounding, power] if lossy else []
    return None


def tune(job: Job, progress: Callable[[str], None] = lambda text: None) -> Tuning:
    """Each contender against the best before it, in turns. No process is left behind.

    Raises:
        RecipeError: the recipe failed on some rank, a process died or hung, or there are too few GPUs.
    """
    check_devices(job.device, job.world_size)
    with Team(job.timeout) as team:
        for rank in range(job.world_size):
            team.start(f"rank {rank}", _be_a_rank, job, rank, team.store("group"))
        needed = team.ask(team.members, "needed")[0]
        return _tournament(job, lambda setting: _step(team, setting, job.steps), progress, Setting(needed))


def _tournament(
    job: Job, step: Callable[[Setting], float], progress: Callable[[str], None], best: Setting
) -> Tuning:
    progress(best.name)
    step(best)  # the first of all warms up more than buckets
    own = [step(best) for _ in range(_FEWEST_ROUNDS)]
    trials = [Trial(best.name, best.code, estimate(own), None, len(own), "")]
    for stage in range(100):
        field = challengers(best, stage, job.device, job.lossy)
        if field is None:
            break
        for one in field:
            progress(one.name)
            trial = _duel(best, one, job.rounds, step)
            trials.append(trial)
            if trial.verdict == "faster":
                best = one
    return Tuning(best.name, best.code, trials)


def _duel(best: Setting, one: Setting, rounds: int, step: Callable[[Setting], float]) -> Trial:
    """Stops as soon as the interval of the ratio has decided, or when the difference is not worth looking for."""
    ratios, times = [], []
    for number in range(1, rounds + 1):
        first, second = (best, one) if number % 2 else (one, best)
        measured = {first.code: step(first)}
        measured[second.code] = step(second)
        times.append(measured[one.code])
        ratios.append(measured[one.code] / measured[best.code])
        ratio = estimate(ratios)
        if number >= _FEWEST_ROUNDS and _verdict(ratio) != "open":
            break
        if number >= _ENOUGH_ROUNDS and abs(ratio.median - 1) < (ratio.high - ratio.low) / 4:
            break  # more rounds would hardly find a difference that is this small beside the noise
    ratio = estimate(ratios)
    verdict = _verdict(ratio).replace("open", "within noise")
    return Trial(one.name, one.code, estimate(times), ratio, len(ratios), verdict)


def _verdict(ratio: Estimate) -> str:
    if ratio.high < 1 - _WORTH:
        return "faster"
    if ratio.low > 1:
        return "slower"
    if ratio.low > 1 - _WORTH:
        return "no gain"
    return "open"


def needed(model: nn.Module) -> dict[str, Any]:
    """What the recipe's own wrapper was told about the model, and others must be told, too."""
    if not isinstance(model, nn.parallel.DistributedDataParallel):
        return {}
    found = {name: True for name in ("find_unused_parameters", "static_graph") if getattr(model, name)}
    return found if model.broadcast_buffers else found | {"broadcast_buffers": False}


def _step(team: Team, setting: Setting, steps: int) -> float:
    """The median step in seconds, mean over ranks, freshly wrapped."""
    answers = team.ask(team.members, (setting, steps))
    return statistics.median(StepReport(answers).values("step"))


def _be_a_rank(pipe: Connection, say: Say, job: Job, rank: int, store: str) -> None:
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    make = find(job.recipe)
    join_group(rank, job.world_size, store, job.device, job.timeout)
    trainer = Trainer(make, rank, job.world_size, job.device)
    for order in orders(pipe):
        if order == "needed":
            trainer.wrap()
            say("needed", needed(trainer.model))
            continue
        setting, steps = order
        trainer.wrap(setting.wrap)
        trainer.steps(_WARMUP)
        say("steps", trainer.steps(steps)[0])
