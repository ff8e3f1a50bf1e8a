"""What became of each bucket: when it was ready, sent and there, and what the end of backward waited for."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from lockstep._codes import Code, tagged
from lockstep._ranks import rank_and_world
from lockstep.timing.bandwidth import bus_bandwidth


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a bucket. Times are in seconds on the clock of rank 0's host.

    ``begun``: when it was issued, or when the one before it ended, whichever came later. ``exact``: the backend said
    when it ended; else ``ended`` is when this rank had waited for it.
    """

    kind: str
    size: int
    issued: float
    begun: float
    ended: float
    exact: bool


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket of one pass on one rank. Times as in ``Collective``, ``size`` in bytes of gradients.

    Attributes:
        names: its parameters; empty if the plan has changed since.
        ready: its last gradient was there.
        started: it was its turn, and packing began.
        sent: it was packed and handed to its hook.
        wait_start, wait_end: when the end of backward waited for it.
    """

    number: int
    names: list[str]
    size: int
    ready: float
    started: float
    sent: float
    wait_start: float
    wait_end: float
    collectives: list[Collective]

    @property
    def ended(self) -> float:
        """Its last collective had ended; without one that we saw (a hook in Python), it had been waited for."""
        return max((one.ended for one in self.collectives), default=self.wait_end)

    def bandwidth(self, ranks: int) -> float:
        """Bus bandwidth in GB/s over its collectives, by the convention of nccl-tests."""
        seconds = sum(one.ended - one.begun for one in self.collectives)
        moved = sum(bus_bandwidth(one.kind, one.size, 1.0, ranks) for one in self.collectives)
        return moved / seconds if seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True)
class Pass:
    """One reduced backward of one rank. Times as in ``Collective``."""

    number: int
    forward_start: float
    backward_start: float
    backward_end: float
    end: float
    buckets: list[Bucket]

    @property
    def exposed(self) -> float:
        """Seconds from this rank's last gradient to the last mean."""
        return self.end - self.backward_end


class CommReport:
    """The recorded passes of all ranks.

    Attributes:
        ranks: by rank, the passes that all ranks recorded, oldest first.
    """

    def __init__(self, ranks: list[list[Pass]]) -> None:
        common = set.intersection(*({one.number for one in passes} for passes in ranks)) if ranks else set()
        self.ranks = [[one for one in passes if one.number in common] for passes in ranks]
        if not common:
            text = "no reduced pass was recorded on all ranks: call model.record_comm() before the steps to look at."
            raise RuntimeError(tagged(Code.NOTHING_TIMED, text))

    def rows(self, rank: int = 0) -> list[dict[str, Any]]:
        """One row a bucket: medians over this rank's passes with the newest plan; milliseconds since backward began."""
        last = self.ranks[rank][-1]
        shape = [(bucket.number, bucket.size) for bucket in last.buckets]
        passes = [one for one in self.ranks[rank] if [(b.number, b.size) for b in one.buckets] == shape]
        rows = []
        for place, bucket in enumerate(last.buckets):
            seen = [(one, one.buckets[place]) for one in passes]

            def since(moment: str, seen: list[tuple[Pass, Bucket]] = seen) -> float:
                return statistics.median(1e3 * (getattr(b, moment) - one.backward_start) for one, b in seen)

            rows.append(
                {
                    "bucket": bucket.number,
                    "parameters": bucket.names,
                    "bytes": bucket.size,
                    "wire_bytes": sum(one.size for one in bucket.collectives),
                    "ready_ms": since("ready"),
                    "started_ms": since("started"),
                    "sent_ms": since("sent"),
                    "ended_ms": since("ended"),
                    "waited_ms": statistics.median(1e3 * (b.wait_end - b.wait_start) for _, b in seen),
                    "bus_gb_s": statistics.median(b.bandwidth(len(self.ranks)) for _, b in seen),
                    "exact": all(one.exact for one in bucket.collectives) and bool(bucket.collectives),
                }
            )
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Everything that ``print`` shows, for JSON."""
        ranks = []
        for rank, passes in enumerate(self.ranks):
            backward = statistics.median(1e3 * (one.backward_end - one.backward_start) for one in passes)
            exposed = statistics.median(1e3 * one.exposed for one in passes)
            ranks.append({"backward_ms": backward, "exposed_ms": exposed, "buckets": self.rows(rank)})
        return {"passes": len(self.ranks[0]), "ranks": ranks}

    def print(self, console: Any = None) -> None:
        """Rank 0's buckets, and every rank's backward and exposed communication; on rank 0 only. Needs rich."""
        if rank_and_world()[0] != 0:
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table

        found = self.as_dict()
        title = f"median of {found['passes']} passes on rank 0, ms since backward began"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for heading in ("bucket", "KiB", "ready", "started", "sent", "ended", "waited", "GB/s (bus)", "parameters"):
            is_name = heading == "parameters"
            table.add_column(heading, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
        for row in found["ranks"][0]["buckets"]:
            times = [f"{row[key]:.2f}" for key in ("ready_ms", "started_ms", "sent_ms", "ended_ms", "waited_ms")]
            names = row["parameters"]
            shown = "" if not names else names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            # A bound, where nobody said when it ended.
            ended = times[3] if row["exact"] else f"<{times[3]}"
            size = f"{row['bytes'] / 1024:.1f}"
            cells = (str(row["bucket"]), size, *times[:3], ended, times[4], f"{row['bus_gb_s']:.3f}", shown)
            table.add_row(*cells)
        console = console or Console()
        console.print(table)
        for rank, one in enumerate(found["ranks"]):
            text = f"rank {rank}: backward {one['backward_ms']:.2f} ms, exposed communication"
            console.print(f"{text} {one['exposed_ms']:.2f} ms", highlight=False)

    def write_trace(self, path: str | Path) -> None:
        """A timeline of all ranks for Perfetto (ui.perfetto.dev) or chrome://tracing; on rank 0 only."""
        if rank_and_world()[0] == 0:
            from lockstep.timing.perfetto import write

            write(self, Path(path))

    def draw(self, path: str | Path, rank: int = 0) -> None:
        """A picture of the newest pass of ``rank``: PNG, SVG or PDF. On rank 0 only. Needs matplotlib."""
        if rank_and_world()[0] == 0:
            from lockstep.timing.picture import draw

            draw(self.ranks[rank][-1], Path(path), rank, len(self.ranks))


def pass_of(times: Any, plan: list[tuple[list[str], int]]) -> Pass:
    """From what the engine recorded. ``plan``: names and bytes of each bucket as they are now."""
    sizes = {bucket.bucket: bucket.bytes for bucket in times.buckets}
    known = all(number < len(plan) and plan[number][1] == size for number, size in sizes.items())
    buckets, last_end = [], 0
    for bucket in times.buckets:
        collectives = []
        for one in bucket.collectives:
            ended = one.ended or bucket.wait_end
            begun = max(one.issued, last_end) if last_end < ended else one.issued
            last_end = max(last_end, ended)
            moments = (one.issued / 1e9, begun / 1e9, ended / 1e9)
            collectives.append(Collective(one.kind, one.bytes, *moments, one.exact))
        moments = (bucket.ready, bucket.started, bucket.sent, bucket.wait_start, bucket.wait_end)
        names = plan[bucket.bucket][0] if known else []
        seconds = (moment / 1e9 for moment in moments)
        buckets.append(Bucket(bucket.bucket, names, bucket.bytes, *seconds, collectives))
    moments = (times.forward_start, times.backward_start, times.backward_end, times.end)
    return Pass(times.number, *(moment / 1e9 for moment in moments), buckets)


def shifted(one: Pass, seconds: float) -> Pass:
    """The same pass on a clock that is ``seconds`` ahead."""

    def moved(value: Any, moments: tuple[str, ...], **others: Any) -> Any:
        return dataclasses.replace(value, **{name: getattr(value, name) + seconds for name in moments}, **others)

    buckets = []
    for bucket in one.buckets:
        collectives = [moved(collective, ("issued", "begun", "ended")) for collective in bucket.collectives]
        times = ("ready", "started", "sent", "wait_start", "wait_end")
        buckets.append(moved(bucket, times, collectives=collectives))
    return moved(one, ("forward_start", "backward_start", "backward_end", "end"), buckets=buckets)
