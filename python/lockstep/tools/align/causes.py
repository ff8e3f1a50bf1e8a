"""Why two runs part: one check a cause, each of them a fact about the records or the probe, none a guess."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from lockstep.tools.align.probe import Probe

#: Relative length of the difference of two gradients in float32 that rounding explains.
_ROUNDING = 1e-5


class Record(Protocol):
    """What the checks read of a step; ``trace.StepRecord`` is one."""

    step: int
    micro_batches: list[list[int]]
    contents: dict[int, str]
    settings: dict
    accumulate: int
    num_workers: int
    start: str
    end: str
    buffers: dict[str, str]
    samples: int


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One step of both runs, with what the gradients say.

    Attributes:
        ratio, cosine: length of the ranks' mean gradient over that of one process's, and the angle between them.
        difference: length of the difference of both, relative to that of one process.
    """

    one: Record
    many: list[Record]
    probe: Probe
    ratio: float
    cosine: float
    difference: float


@dataclasses.dataclass(frozen=True)
class Cause:
    """``key``: stable, for scripts. ``found``: what the check saw. ``remedy``: what to change."""

    key: str
    found: str
    remedy: str


def find_causes(steps: list[Evidence]) -> list[Cause]:
    """All causes that a check confirms in ``steps``, the first step of parting last; the likeliest first."""
    found: dict[str, Cause] = {}
    for check in _CHECKS:
        for evidence in steps:
            cause = check(evidence)
            if cause is not None and cause.key not in found:
                found[cause.key] = cause
    return list(found.values()) or _amplified_rounding(steps[-1])


def _amplified_rounding(e: Evidence) -> list[Cause]:
    """Where no check found anything: whether the gradients were equal within rounding, which the optimizer enlarged."""
    if e.difference > _ROUNDING:
        return []
    text = f"Step {e.one.step}: the gradients differ by {e.difference:.1e} of their length, which is rounding, and "
    text += f"{e.one.settings['type']} makes more of it: it divides by the size of gradients, also of those near zero."
    return [Cause("amplified rounding", text, "No fault. Compare with SGD or a larger eps, or accept level 1.")]


def _initial_weights(e: Evidence) -> Cause | None:
    if e.one.step > 0 or all(record.start == e.one.start for record in e.many):
        return None
    text = "The weights differ before the first step."
    return Cause("initial weights", text, "Seed the model alike everywhere: lockstep.data.seed_everything.")


def _settings(e: Evidence) -> Cause | None:
    for rank, record in enumerate(e.many):
        names = e.one.settings.keys() | record.settings.keys()
        for name in sorted(names, key=lambda name: (name != "type", name)):
            ours, theirs = e.one.settings.get(name), record.settings.get(name)
            if ours != theirs:
                text = f"Step {e.one.step}: optimizer {name} is {ours} in one process and {theirs} on rank {rank}."
                remedy = "Use the settings of one process: the global batch is the same, so a scaled rate is too large."
                return Cause("optimizer settings", text, remedy)
    return None


def _global_batch(e: Evidence) -> Cause | None:
    many = sum(record.samples for record in e.many)
    if many == e.one.samples:
        return None
    text = f"Step {e.one.step}: {e.one.samples} samples in one process, {many} on all ranks together"
    text += f" ({', '.join(str(record.samples) for record in e.many)})."
    remedy = "Divide the batch size by the number of ranks, or use OrderPreservingSampler with the global one."
    return Cause("global batch", text, remedy)


def _data_order(e: Evidence) -> Cause | None:
    one = Counter(index for batch in e.one.micro_batches for index in batch)
    many = Counter(index for record in e.many for batch in record.micro_batches for index in batch)
    if one == many or one.total() != many.total():
        return None
    strange = sorted((many - one).elements())[:5]
    text = f"Step {e.one.step}: the ranks train on other samples than one process, such as {strange}."
    return Cause("data order", text, "Use OrderPreservingSampler with the same seed on every rank, and set_epoch.")


def _unequal_samples(e: Evidence) -> Cause | None:
    if e.probe.loss not in ("mean", "weighted mean"):
        return None
    for sizes in zip(*([len(batch) for batch in record.micro_batches] for record in e.many), strict=False):
        if len(set(sizes)) > 1:
            text = f"Step {e.one.step}: ranks have {', '.join(map(str, sizes))} samples, and the loss is their mean."
            remedy = "Multiply the loss by sampler.loss_scale(), or choose a batch size that the ranks divide."
            return Cause("unequal samples", text, remedy)
    return None


def _augmentation(e: Evidence) -> Cause | None:
    for rank, record in enumerate(e.many):
        for index, content in record.contents.items():
            if e.one.contents.get(index, content) != content:
                text = f"Step {e.one.step}: sample {index} has other content on rank {rank} than in one process."
                workers = {e.one.num_workers, *(record.num_workers for record in e.many)}
                if len(workers) > 1:
                    text += f" The runs have different numbers of workers ({', '.join(map(str, sorted(workers)))})."
                remedy = "Seed augmentation by sample: lockstep.data.SampleSeeded, sample_rng or sample_seed."
                return Cause("augmentation", text, remedy)
    return None


def _accumulation(e: Evidence) -> Cause | None:
    expected = e.many[0].accumulate / e.one.accumulate
    if expected == 1 or e.cosine < 0.99 or abs(e.ratio / expected - 1) > 0.05:
        return None
    text = (
        f"Step {e.one.step}: {e.many[0].accumulate} micro-batches on a rank and {e.one.accumulate} in one process, and "
        f"the gradient is {e.ratio:.3g} times as long."
    )
    return Cause("accumulation", text, "Divide each micro-batch's loss by the number of micro-batches of this run.")


def _sum(e: Evidence) -> Cause | None:
    if e.probe.loss != "sum":
        return None
    text = "Twice the samples give twice the loss: it is a sum, and the ranks' mean gradient is "
    text += f"{e.ratio:.3g} times that of one process."
    return Cause("loss is a sum", text, "Return the mean over samples, or multiply the loss by the number of ranks.")


def _tokens(e: Evidence) -> Cause | None:
    if e.probe.loss != "weighted mean":
        return None
    text = "The loss of a batch is not the mean of its halves' but lies between: samples have unequal weights (tokens)."
    remedy = "Sum the loss and divide it by the tokens of all ranks, times the number of ranks."
    return Cause("unequal tokens", text, remedy)


def _cross_sample(e: Evidence) -> Cause | None:
    if e.probe.loss != "cross-sample":
        return None
    text = "The loss of a sample depends on the others in its batch (in-batch negatives, say); a rank has fewer."
    return Cause("cross-sample loss", text, "Gather the features of all ranks, with gradient, before the loss.")


def _batch_norm(e: Evidence) -> Cause | None:
    if not e.probe.batch_statistics:
        return None
    names = ", ".join(e.probe.batch_statistics[:3])
    text = f"Halving a batch changes its loss through {names}: a rank normalises by its own part of the batch."
    return Cause("batch statistics", text, "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), or GroupNorm.")


def _dropout(e: Evidence) -> Cause | None:
    if not e.probe.random:
        return None
    names = ", ".join(e.probe.dropout[:3]) or "functional dropout or noise"
    text = f"Two forwards of one batch differ ({names}): ranks draw other masks than one process."
    return Cause("dropout", text, "Expected, and no fault: compare with it off (p=0), or accept level 1.")


def _buffers(e: Evidence) -> Cause | None:
    for name in e.many[0].buffers:
        if len({record.buffers.get(name) for record in e.many}) > 1:
            text = f"Step {e.one.step}: buffer '{name}' differs between ranks when forward begins."
            return Cause("buffers", text, "Wrap with broadcast_buffers=True, or reduce the buffer over ranks yourself.")
    return None


def _drift(e: Evidence) -> Cause | None:
    if len({record.end for record in e.many}) == 1:
        return None
    text = f"Step {e.one.step}: the weights differ between ranks after the step."
    return Cause("ranks apart", text, "Some gradient is not reduced, or optimizers differ: model.assert_in_sync().")


#: In the order of how directly a check shows the cause.
_CHECKS: tuple[Callable[[Evidence], Cause | None], ...] = (
    _initial_weights,
    _settings,
    _global_batch,
    _data_order,
    _augmentation,
    _accumulation,
    _sum,
    _unequal_samples,
    _cross_sample,
    _tokens,
    _batch_norm,
    _dropout,
    _buffers,
    _drift,
)
