"""A timeline in the JSON format that Perfetto and chrome://tracing read: one process a rank.

Source of the format: "Trace Event Format" (Google, 2016); times are in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lockstep.timing.comm_report import Bucket, CommReport, Pass

_STEP, _SENDING, _WAITING, _WIRE = 1, 2, 3, 10  # tracks; collectives that overlap get further ones behind _WIRE


def write(report: CommReport, path: Path) -> None:
    """All ranks in one file, on the clock of rank 0, from the first recorded moment on."""
    start = min(passes[0].forward_start for passes in report.ranks)
    events: list[dict[str, Any]] = []
    for rank, passes in enumerate(report.ranks):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        tracks = {_STEP: "step", _SENDING: "pack and send", _WAITING: "end of backward waits"}
        lanes: list[float] = []
        for one in passes:
            events += _slices(one, rank, start, len(report.ranks), lanes)
        tracks |= {_WIRE + lane: f"collectives {lane + 1}" for lane in range(len(lanes))}
        events += [_named("thread_name", rank, track, name) for track, name in tracks.items()]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _slices(one: Pass, rank: int, start: float, ranks: int, lanes: list[float]) -> Iterator[dict[str, Any]]:
    def piece(name: str, track: int, begin: float, end: float, **facts: Any) -> dict[str, Any]:
        times = {"ts": 1e6 * (begin - start), "dur": 1e6 * (end - begin)}
        return {"name": name, "ph": "X", "pid": rank, "tid": track, **times, "args": {"pass": one.number, **facts}}

    yield piece("forward", _STEP, one.forward_start, one.backward_start)
    yield piece("backward", _STEP, one.backward_start, one.backward_end)
    yield piece("exposed communication", _STEP, one.backward_end, one.end)
    for bucket in one.buckets:
        name, facts = f"bucket {bucket.number}", _facts(bucket, ranks)
        ready = {"name": f"{name} ready", "ph": "i", "s": "t", "pid": rank, "tid": _SENDING}
        yield ready | {"ts": 1e6 * (bucket.ready - start), "args": facts}
        yield piece(name, _SENDING, bucket.started, bucket.sent, **facts)
        yield piece(name, _WAITING, bucket.wait_start, bucket.wait_end, **facts)
        for collective in bucket.collectives:
            lane = next((i for i, end in enumerate(lanes) if end <= collective.begun), len(lanes))
            lanes[lane : lane + 1] = [collective.ended]
            title = f"{name}: {collective.kind}"
            yield piece(title, _WIRE + lane, collective.begun, collective.ended, **facts, exact=collective.exact)


def _facts(bucket: Bucket, ranks: int) -> dict[str, Any]:
    return {"bytes": bucket.size, "bus GB/s": round(bucket.bandwidth(ranks), 3), "parameters": bucket.names}


def _named(kind: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": rank, "tid": track, "args": {"name": name}}
