"""Bandwidth of collectives by the convention of nccl-tests, so that figures can be compared.

Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md. Bus bandwidth is what the slowest link carries, whatever the
number of ranks: the size divided by the time, times a factor of the collective.
"""

from __future__ import annotations

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def bus_factor(kind: str, ranks: int) -> float:
    """What algorithm bandwidth (size / time) is multiplied by."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind == "broadcast" else (ranks - 1) / ranks


def bus_bandwidth(kind: str, size: int, seconds: float, ranks: int) -> float:
    """GB/s (1e9 bytes). ``size``: bytes of the larger of input and output on one rank."""
    return bus_factor(kind, ranks) * size / seconds / 1e9 if seconds > 0 else 0.0
