"""Medians with an interval, for samples whose distribution nobody knows."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

_RESAMPLES = 2000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"


def estimate(values: Sequence[float]) -> Estimate:
    """The median, with a percentile bootstrap of it (Efron, Annals of Statistics 7(1), 1979). The same every time."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    low, high = medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES) - 1]
    return Estimate(statistics.median(values), low, high)


def trimmed_mean(rows: list[dict[str, float]], by: str, share: float = 0.1) -> dict[str, float]:
    """The mean of each entry over the rows that are left when ``share`` of them at either end, by ``by``, is cut off.

    One set of rows for all entries, so that what adds up in each row adds up in the result.
    """
    cut = int(len(rows) * share)
    kept = sorted(rows, key=lambda row: row[by])[cut : len(rows) - cut]
    return {name: statistics.fmean(row[name] for row in kept) for name in kept[0]}
