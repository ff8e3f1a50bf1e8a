"""How far the clocks of the ranks' hosts are apart."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch.distributed as dist

_ROUNDS = 11


def offsets(group: dist.ProcessGroup | None = None) -> list[float]:
    """By rank, in seconds: what has to be added to its monotonic clock to get rank 0's. Collective.

    Processes of one boot of one host share that clock: exactly 0. Others meet in a barrier several times and compare
    what they read behind it; the median is off by about as much as ranks leave a barrier at different times.
    """
    boots: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(boots, _boot(), group=group)
    if len(set(boots)) == 1:
        return [0.0] * len(boots)
    readings = []
    for _ in range(_ROUNDS):
        dist.barrier(group=group)
        mine, all_of_them = time.monotonic(), [0.0] * len(boots)
        dist.all_gather_object(all_of_them, mine, group=group)
        readings.append([all_of_them[0] - one for one in all_of_them])
    measured = [statistics.median(column) for column in zip(*readings, strict=True)]
    return [0.0 if boot == boots[0] else offset for boot, offset in zip(boots, measured, strict=True)]


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
