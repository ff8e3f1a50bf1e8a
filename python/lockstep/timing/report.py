"""The timed steps of all ranks: medians, percentiles, skew; as a table, as JSON, for TensorBoard."""

from __future__ import annotations

import statistics
from typing import Any

import torch.distributed as dist

from lockstep._codes import Code, tagged
from lockstep._ranks import joined, rank_and_world

#: In the order of a step; together they are the step.
PHASES = ("data", "forward", "backward", "communication", "optimizer", "other")

Steps = list[dict[str, float]]


def gathered(steps: Steps, group: dist.ProcessGroup | None) -> list[Steps]:
    """``steps`` of every rank, by rank. Collective where there is a process group."""
    if not joined():
        return [steps]
    result: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(result, steps, group=group)
    return result


def percentile(values: list[float], percent: float) -> float:
    """Linear interpolation between the two nearest of the sorted ``values``."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


class StepReport:
    """Steps of one rank or of all. Times are in seconds.

    Attributes:
        ranks: by rank, a list of steps, each a dict with an entry for each of ``PHASES``, "step", "host" and "behind".
    """

    def __init__(self, ranks: list[Steps]) -> None:
        count = min((len(steps) for steps in ranks), default=0)
        if count == 0:
            text = "no step has been timed: too few steps after the warm-up, or optimizer.step() was not called."
            raise ValueError(tagged(Code.NOTHING_TIMED, text))
        self.ranks = [steps[-count:] for steps in ranks]

    @property
    def num_steps(self) -> int:
        return len(self.ranks[0])

    def values(self, phase: str, rank: int | None = None) -> list[float]:
        """Of each step: this rank's, or the mean over ranks."""
        if rank is not None:
            return [step[phase] for step in self.ranks[rank]]
        return [statistics.fmean(same[phase] for same in together) for together in zip(*self.ranks, strict=True)]

    def skew(self) -> list[float]:
        """Of each step: what a rank spends on average because another one has more to do before the means are there.

        The rank with the least work of its own is the measure: work beyond its own, and waits beyond the shortest.
        """
        return [step["skew"] for step in self.split()]

    def split(self) -> Steps:
        """Each step's mean over ranks, split into the phases of the rank with the least work, and "skew".

        The rank that comes last waits for nobody: its exposed communication is communication, and what the others
        wait beyond that is skew. The parts add up to "step".
        """
        result = []
        for together in zip(*self.ranks, strict=True):
            fastest = min(together, key=_own_work)
            step = {phase: fastest[phase] for phase in PHASES}
            step["communication"] = min(one["communication"] for one in together)
            step["step"] = statistics.fmean(one["step"] for one in together)
            step["skew"] = step["step"] - sum(step[phase] for phase in PHASES)
            result.append(step)
        return result

    def slowest(self) -> tuple[int, str, float]:
        """The rank with the most work of its own; the phase in which it differs most; seconds more than the fastest."""
        work = [statistics.median(_own_work(step) for step in steps) for steps in self.ranks]
        slow, fast = work.index(max(work)), work.index(min(work))
        gaps = {
            phase: statistics.median(self.values(phase, slow)) - statistics.median(self.values(phase, fast))
            for phase in PHASES
            if phase != "communication"
        }
        phase = max(gaps, key=gaps.__getitem__)
        return slow, phase, gaps[phase]

    def as_dict(self) -> dict[str, Any]:
        """What ``print`` shows, in milliseconds, for JSON."""
        rows = {}
        for phase in (*PHASES, "step"):
            values = self.values(phase)
            rows[phase] = {
                "median_ms": 1e3 * statistics.median(values),
                "p90_ms": 1e3 * percentile(values, 90),
                "p99_ms": 1e3 * percentile(values, 99),
                "ranks_ms": [1e3 * statistics.median(self.values(phase, rank)) for rank in range(len(self.ranks))],
            }
        rank, phase, more = self.slowest()
        skew = {"median_ms": 1e3 * statistics.median(self.skew()), "p90_ms": 1e3 * percentile(self.skew(), 90)}
        slowest = {"rank": rank, "phase": phase, "more_ms": 1e3 * more}
        return {"steps": self.num_steps, "phases": rows, "skew": skew, "slowest": slowest}

    def print(self, console: Any = None) -> None:
        """A table, on rank 0 only. Needs rich."""
        if rank_and_world()[0] == 0:
            (console or _console()).print(self.table())

    def table(self) -> Any:
        """The table, for rich."""
        from rich import box
        from rich.table import Table

        found = self.as_dict()
        title = f"{found['steps']} steps on {len(self.ranks)} rank{'s' * (len(self.ranks) > 1)}, ms (mean over ranks)"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        shown = range(min(len(self.ranks), 8))
        for heading in ("phase", "median", "p90", "p99", "share", *(f"rank {rank}" for rank in shown)):
            table.add_column(heading, justify="left" if heading == "phase" else "right")
        whole = found["phases"]["step"]["median_ms"]
        for phase, row in found["phases"].items():
            cells = [f"{row[key]:.2f}" for key in ("median_ms", "p90_ms", "p99_ms")]
            ranks = [f"{row['ranks_ms'][rank]:.2f}" for rank in shown]
            share = f"{100 * row['median_ms'] / whole:.0f} %"
            table.add_row("exposed comm." if phase == "communication" else phase, *cells, share, *ranks)
        if len(self.ranks) > 1:
            skew, slowest = found["skew"], found["slowest"]
            share = f"{100 * skew['median_ms'] / whole:.0f} %"
            table.add_row("of it skew", f"{skew['median_ms']:.2f}", f"{skew['p90_ms']:.2f}", "", share)
            table.caption = f"most work: rank {slowest['rank']}, {slowest['more_ms']:.2f} ms more in {slowest['phase']}"
            table.caption_justify = "left"
        return table

    def write_tensorboard(self, writer: Any, step: int) -> None:
        """Medians in ms as "step_time/..." for ``writer``, a ``SummaryWriter`` (extra: tensorboard); on rank 0 only."""
        if rank_and_world()[0] != 0:
            return
        found = self.as_dict()
        for phase, row in found["phases"].items():
            writer.add_scalar(f"step_time/{phase}_ms", row["median_ms"], step)
        writer.add_scalar("step_time/skew_ms", found["skew"]["median_ms"], step)


def _own_work(step: dict[str, float]) -> float:
    """What a rank does by itself: all but the time until the means are there."""
    return step["step"] - step["communication"]


def _console() -> Any:
    from rich.console import Console

    return Console()
