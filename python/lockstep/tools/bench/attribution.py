"""Where the time went that a step of N ranks takes beyond its share, and what can be done about it."""

from __future__ import annotations

import dataclasses
import os
import statistics
from typing import Any

import torch
from torch import nn

from lockstep.timing.report import StepReport
from lockstep.tools.bench.trainer import Buckets, Trainer

#: Buckets that are smaller on average, and more than a few, do not reach the bandwidth of any link.
SMALL_BUCKET = 4 << 20
_FEW_BUCKETS = 4


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a rank's run without measuring. None: it is not wrapped, or the wrapper does not say.

    To be taken while GPUs are warm: an idle one lowers the generation of its PCIe link.
    """

    device: str
    num_workers: int
    threads: int
    cores: int
    ranks: int
    find_unused: bool | None
    buffers_sent: int | None  # bytes broadcast before each forward
    transport: str
    links: list[str]  # of PCIe, in words, those that are narrower or slower than they could be

    @classmethod
    def of(cls, trainer: Trainer, device: str) -> Facts:
        model = trainer.model
        is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
        sent = sum(buffer.nbytes for buffer in model.buffers()) if is_ddp and model.broadcast_buffers else 0
        return cls(
            device=device,
            num_workers=trainer.recipe.num_workers,
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)),
            ranks=trainer.world_size,
            find_unused=model.find_unused_parameters if is_ddp else None,
            buffers_sent=sent if is_ddp else None,
            transport="unknown" if device == "cuda" else "TCP sockets (gloo)",
            links=weak_links() if device == "cuda" else [],
        )


@dataclasses.dataclass(frozen=True)
class Cause:
    """One line of the table. ``seconds``: its part of the time lost in a step; None: part of another one's."""

    name: str
    measured: str
    healthy: str
    remedy: str
    seconds: float | None


def attribute(
    ideal: dict[str, float],
    many: dict[str, float],
    report: StepReport,
    buckets: list[Buckets],
    facts: Facts,
) -> list[Cause]:
    """All causes, the one that cost most first. Their seconds add up to ``many["step"] - ideal["step"]``.

    Args:
        ideal: seconds of each phase that would be right: those of one process, divided by the ranks.
        many: a step of the ranks, split into the phases of the rank with the least work, and "skew".
        report: the steps of all ranks.
        buckets: what the engine of each rank did, if it is one of ours.
    """
    step = many["step"]
    sending = min(statistics.median(one.sending for one in buckets), many["backward"]) if buckets else 0.0
    compute = many["forward"] + many["backward"] - sending - ideal["forward"] - ideal["backward"]
    communication = many["communication"] - ideal["communication"]
    causes = [
        _data(many, ideal, step, facts),
        _compute(many, sending, ideal, compute, facts, report),
        _skew(many, step, report),
        Cause(
            "optimizer",
            f"{_ms(many['optimizer'])}; its share of one process would be {_ms(ideal['optimizer'])}",
            "the same on every rank: it does not get shorter",
            "fused=True or foreach=True; a larger batch for each step of it",
            many["optimizer"] - ideal["optimizer"],
        ),
        Cause(
            "other",
            f"{_ms(many['other'])} between the parts of a step",
            "< 2 % of a step",
            "look for logging, .item() and copies in the loop",
            many["other"] - ideal["other"],
        ),
        *_communication(many, step, sending, communication, buckets, facts),
    ]
    return sorted(causes, key=lambda cause: -cause.seconds)


def note(facts: Facts) -> list[Cause]:
    """Settings that cost, whose time is part of other causes'."""
    notes = []
    if facts.find_unused:
        remedy = "leave it out unless some parameters get no gradient; static_graph=True if always the same ones"
        notes.append(Cause("find_unused_parameters", "True", "False", remedy, None))
    if facts.buffers_sent:
        remedy = "broadcast_buffers=False if ranks may keep their own (BatchNorm statistics, say)"
        measured = f"{_bytes(facts.buffers_sent)} before each forward"
        notes.append(Cause("broadcast buffers", measured, "none, or small", remedy, None))
    if facts.device == "cpu" and facts.ranks * facts.threads > facts.cores:
        measured = f"{facts.ranks} ranks of {facts.threads} thread(s) on {facts.cores} core(s)"
        notes.append(Cause("cores", measured, "a core for each thread", "fewer ranks, or a larger machine", None))
    for link in facts.links:
        healthy, remedy = "as wide and fast as card and slot can", "reseat it; see lockstep doctor"
        notes.append(Cause("PCIe link", link, healthy, remedy, None))
    return notes


def _data(many: dict[str, float], ideal: dict[str, float], step: float, facts: Facts) -> Cause:
    measured = f"{_ms(many['data'])}, {_percent(many['data'], step)} of a step; num_workers={facts.num_workers}"
    if facts.num_workers == 0:
        remedy = "num_workers=2 or more, so that batches are made beside the training"
    else:
        remedy = "more workers, cheaper augmentation, or data that are decoded already"
    return Cause("data waiting", measured, "< 2 % of a step", remedy, many["data"] - ideal["data"])


def _compute(
    many: dict[str, float], sending: float, ideal: dict[str, float], lost: float, facts: Facts, report: StepReport
) -> Cause:
    own = many["forward"] + many["backward"] - sending
    right = ideal["forward"] + ideal["backward"]
    measured = f"forward and backward {_ms(own)}; in proportion to one process {_ms(right)}"
    healthy = "<= 5 % above proportion"
    if facts.device == "cpu":
        remedy = "ranks share cores and memory: fewer ranks, or a larger batch for each"
        return Cause("slower computing", measured, healthy, remedy, lost)
    # The time of the host says little: once its queue is full, it waits for the GPU and takes as long.
    behind = statistics.fmean(report.values("behind"))
    if behind < 0.5:
        remedy = "the host cannot launch fast enough: torch.compile, CUDA graphs, or a larger batch for each rank"
        measured += f"; in {_percent(1 - behind, 1)} of the steps the GPU had caught up with the host at the end"
        return Cause("host-bound launches", measured, healthy, remedy, lost)
    remedy = "the batch of a rank is small for the GPU: a larger global batch (see --weak)"
    return Cause("slower computing", measured, healthy, remedy, lost)


def _skew(many: dict[str, float], step: float, report: StepReport) -> Cause:
    rank, phase, more = report.slowest()
    measured = f"{_ms(many['skew'])}, {_percent(many['skew'], step)} of a step"
    if more > 0.02 * step:
        measured += f"; rank {rank} works {_ms(more)} longer than the fastest in {phase}"
    remedy = "even out the data and work of the ranks; look for other processes on that rank's device"
    return Cause("skew between ranks", measured, "< 5 % of a step", remedy, many["skew"])


def _communication(
    many: dict[str, float],
    step: float,
    sending: float,
    exposed: float,
    buckets: list[Buckets],
    facts: Facts,
) -> list[Cause]:
    measured = f"{_ms(many['communication'])} exposed, {_percent(many['communication'], step)} of a step"
    if not buckets:
        remedy = "gradient accumulation, a larger batch, or lockstep.DistributedDataParallel, which can say more"
        return [Cause("exposed communication", f"{measured}; {facts.transport}", "< 5 % of a step", remedy, exposed)]
    one = buckets[-1]
    if one.count > _FEW_BUCKETS and one.total_bytes / one.count < SMALL_BUCKET and one.median_bytes < SMALL_BUCKET:
        return [
            Cause(
                "small buckets",
                f"{one.count} buckets of {_bytes(one.median_bytes)} on the median; {measured}, and {_ms(sending)} to "
                "pack and send",
                f"{_bytes(SMALL_BUCKET)} or more each, or a few",
                "leave bucket_cap_mb out, or find it with lockstep tune",
                exposed + sending,
            )
        ]
    measured = f"{measured}; {one.count} buckets at {one.bandwidth:.2g} GB/s (bus) through {facts.transport}"
    remedy = "a comm hook that compresses (lockstep tune), accumulation, a larger batch, or a faster link"
    return [
        Cause("exposed communication", measured, "< 5 % of a step", remedy, exposed),
        Cause(
            "kernels added",
            f"{_ms(sending)} to pack and send {_bytes(one.total_bytes)}",
            "< 2 % of a step",
            "gradient_as_bucket_view=True",
            sending,
        ),
    ]


def weak_links() -> list[str]:
    """The PCIe links of this machine that are narrower or slower than card and slot can; the GPUs must be at work."""
    from lockstep.tools.doctor import Status, gpus

    return [
        f"{finding.name}: {finding.value}"
        for finding in gpus.check(busy=True)
        if "PCIe" in finding.name and finding.status in (Status.WARNING, Status.PROBLEM)
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def _bytes(size: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"


def total(causes: list[Cause]) -> float:
    """Seconds of all causes together."""
    return sum(cause.seconds for cause in causes if cause.seconds is not None)


def as_rows(causes: list[Cause], lost: float) -> list[dict[str, Any]]:
    """For JSON: with the share of the lost time."""
    return [
        dataclasses.asdict(cause) | {"share": None if cause.seconds is None or lost <= 0 else cause.seconds / lost}
        for cause in causes
    ]
