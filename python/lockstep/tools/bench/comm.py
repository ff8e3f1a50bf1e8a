"""How long an all-reduce takes, from small to large, over the process group and over the engine's own connections."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.timing.bandwidth import bus_bandwidth
from lockstep.tools.bench.statistics import Estimate, estimate
from lockstep.tools.members import Say, Team, check_devices, join_group, orders

#: Blocks of all-reduces for each size and contender, in turns; one block is about this long.
_BLOCKS = 7
_BLOCK_SECONDS = 0.05
_MOST_IN_A_BLOCK = 200


@dataclasses.dataclass(frozen=True)
class Job:
    """Sizes in bytes, from ``smallest`` in steps of ``factor`` to ``largest``."""

    world_size: int
    smallest: int = 1 << 10
    largest: int = 1 << 30
    factor: int = 4
    device: str = "cpu"
    timeout: float = 300.0

    def sizes(self) -> list[int]:
        """All of them, with ``largest`` as the last."""
        sizes = []
        size = self.smallest
        while size < self.largest:
            sizes.append(size)
            size *= self.factor
        return [*sizes, self.largest]


@dataclasses.dataclass(frozen=True)
class Size:
    """One all-reduce, by contender: seconds from one to the next, issued back to back. ``size``: bytes on a rank."""

    size: int
    seconds: dict[str, Estimate]

    def bus_bandwidth(self, name: str, ranks: int) -> float:
        """GB/s by the convention of nccl-tests: 2 (n - 1) / n times size over time."""
        return bus_bandwidth("all_reduce", self.size, self.seconds[name].median, ranks)

    def as_dict(self, ranks: int) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "algbw_gb_s": {name: self.size / one.median / 1e9 for name, one in self.seconds.items()},
            "busbw_gb_s": {name: self.bus_bandwidth(name, ranks) for name in self.seconds},
        }


def measure(job: Job, progress: Callable[[str], None] = lambda text: None) -> list[Size]:
    """Every size. No process is left behind.

    Raises:
        RecipeError: a process failed, died or hung, or there are too few GPUs.
    """
    check_devices(job.device, job.world_size)
    rows = []
    with Team(job.timeout) as team:
        for rank in range(job.world_size):
            team.start(f"rank {rank}", _be_a_rank, job, rank, team.store("group"))
        for size in job.sizes():
            progress(f"{size:,} bytes")
            answers = team.ask(team.members, size)
            # The slowest rank of each block counts: only then has everybody the sum.
            seconds = {}
            for name in answers[0]:
                blocks = zip(*(answer[name] for answer in answers), strict=True)
                seconds[name] = estimate([max(block) for block in blocks])
            rows.append(Size(size, seconds))
    return rows


def _be_a_rank(pipe: Connection, say: Say, job: Job, rank: int, store: str) -> None:
    device = torch.device("cpu")
    if job.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    join_group(rank, job.world_size, store, job.device, job.timeout)
    kinds = ("auto", "nccl") if job.device == "cuda" else ("auto",)
    engines = {kind: lockstep.DistributedDataParallel(nn.Linear(1, 1).to(device), communicator=kind) for kind in kinds}
    contenders: dict[str, Callable[[torch.Tensor], Any]] = {"group": dist.all_reduce}
    for kind, engine in engines.items():
        contenders[f"lockstep {kind}"] = engine.reducer.sum
    for size in orders(pipe):
        data = torch.zeros(max(1, size // 4), device=device)
        once = max(_seconds(reduce, data, 1) for reduce in contenders.values() for _ in range(2))
        count = torch.tensor([min(_MOST_IN_A_BLOCK, max(1, int(_BLOCK_SECONDS / once)))], device=device)
        dist.broadcast(count, 0)  # ranks must agree on how often
        found: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(_BLOCKS):
            for name, reduce in contenders.items():
                found[name].append(_seconds(reduce, data, int(count)))
        say("size", found)


def _seconds(reduce: Callable[[torch.Tensor], Any], data: torch.Tensor, count: int) -> float:
    """Of one, when so many follow each other."""
    dist.barrier()
    if data.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count
