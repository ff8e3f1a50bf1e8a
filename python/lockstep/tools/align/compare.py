"""Compares the run in one process with that on N ranks, step by step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from lockstep.tools.align.causes import Cause, Evidence, find_causes
from lockstep.tools.align.probe import Probe
from lockstep.tools.align.trace import StepRecord

#: Level 2: no weight differs by more.
WEIGHTS_EQUAL = 1e-5
#: Relative length of the difference of two gradients that rounding does not explain.
_GRADIENTS_PART = 1e-3
#: Level 1: the losses of the last quarter differ by less than this share of how far they fell.
_CONVERGE_ALIKE = 0.1

LEVELS = {
    0: "does not converge alike",
    1: "converges alike",
    2: f"equal within rounding ({WEIGHTS_EQUAL:g} on weights)",
    3: "equal bit for bit",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One step: both losses, the largest difference of a weight, and the relative difference of the gradients."""

    step: int
    loss_one: float
    loss_many: float
    weight_difference: float
    gradient_difference: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The answer. ``parts_at``: first step in which rounding does not explain the difference; None: there is none."""

    world_size: int
    rows: list[Row]
    level: int
    parts_at: int | None
    causes: list[Cause]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"level_means": LEVELS[self.level]}


def compare(one: Iterable[StepRecord], many: list[Iterable[StepRecord]]) -> Comparison:
    """Compare two runs while they run: one record of each process is held at a time, and dropped.

    Args:
        one: the run in one process.
        many: that of each rank. Rank 0's records hold weights and gradients.
    """
    rows: list[Row] = []
    evidence: list[Evidence] = []
    probe, parts_at, bits_equal = Probe(None, None, None), None, True
    for record, *ranks in _together(one, many):
        probe = record.probe or probe
        ratio, cosine, difference = _gradients(record.gradient, ranks[0].gradient)
        apart = float((record.weights - ranks[0].weights).abs().max())
        rows.append(Row(record.step, record.loss, _mean_loss(ranks), apart, difference))
        lights = [_light(rank) for rank in ranks]
        bits_equal = bits_equal and all(rank.end == record.end for rank in ranks)
        if parts_at is None:
            evidence.append(Evidence(_light(record), lights, probe, ratio, cosine, difference))
            if not (apart <= WEIGHTS_EQUAL and difference <= _GRADIENTS_PART):  # NaN parts, too
                parts_at = record.step
    level = 3 if bits_equal else _level(rows)
    causes = [] if parts_at is None else find_causes(evidence)
    return Comparison(len(many), rows, level, parts_at, causes)


def _together(one: Iterable[StepRecord], many: list[Iterable[StepRecord]]) -> Iterator[tuple[StepRecord, ...]]:
    return zip(one, *many, strict=True)


def _light(record: StepRecord) -> StepRecord:
    return dataclasses.replace(record, gradient=None, weights=None)


def _mean_loss(ranks: list[StepRecord]) -> float:
    samples = sum(record.samples for record in ranks)
    return sum(record.loss * record.samples for record in ranks) / max(1, samples)


def _gradients(one: Tensor, many: Tensor) -> tuple[float, float, float]:
    """Length of ``many`` over that of ``one``, the cosine between them, and the relative length of the difference."""
    one, many = one.double(), many.double()
    length, other = float(one.norm()), float(many.norm())
    if length == 0 or other == 0:
        return (1.0, 1.0, 0.0) if length == other else (math.inf, 0.0, math.inf)
    return other / length, float(one @ many) / (length * other), float((many - one).norm()) / length


def _level(rows: list[Row]) -> int:
    if all(row.weight_difference <= WEIGHTS_EQUAL for row in rows):
        return 2
    last = rows[-max(1, len(rows) // 4) :]
    one = sum(row.loss_one for row in last) / len(last)
    many = sum(row.loss_many for row in last) / len(last)
    fallen = max(abs(rows[0].loss_one - one), 0.05 * abs(rows[0].loss_one))
    return 1 if abs(one - many) <= _CONVERGE_ALIKE * fallen else 0
