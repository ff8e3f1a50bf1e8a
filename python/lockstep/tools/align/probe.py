"""What kind of loss and model a recipe has, found by trying: on one batch, doubled, halved, and twice."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

#: Relative. Losses of equal samples differ by rounding only, which is 1e-6 in float32.
_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was found out. None: it could not be.

    Attributes:
        loss: over the samples of a batch: "mean", "sum", "weighted mean" (by tokens, say), or "cross-sample", when the
            loss of a sample depends on which others are in its batch.
        batch_statistics: names of modules that normalise by the batch and are not synchronised over ranks; empty: the
            loss of a sample in training does not depend on the batch, beyond ``loss``.
        random: whether two forwards of the same batch differ; ``dropout`` names the modules that draw.
    """

    loss: Literal["mean", "sum", "weighted mean", "cross-sample"] | None
    batch_statistics: tuple[str, ...] | None
    random: bool | None
    dropout: tuple[str, ...] = ()


def probe(module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, samples: int) -> Probe:
    """Try ``loss`` on a copy of ``module``. Random streams are as before afterwards.

    Args:
        batch: of ``samples`` samples, which are the rows of all tensors in it with so many rows.
    """
    devices = [device for device in {p.device for p in module.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices), torch.no_grad():
        try:
            return _Trial(copy.deepcopy(module), loss, batch, samples).result()
        except Exception:  # a model that cannot be copied, or a batch that cannot be cut: then nothing is known
            return Probe(None, None, None)


class _Trial:
    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Any], Tensor], batch: Any, samples: int) -> None:
        self._module, self._loss, self._batch, self._samples = module, loss, batch, samples
        self._even = samples - samples % 2
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        self._dropout = {n: m for n, m in module.named_modules() if isinstance(m, _DropoutNd) and m.p > 0}
        self._norms = {
            name: m
            for name, m in module.named_modules()
            if isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)
        }

    def result(self) -> Probe:
        self._module.eval()
        kind = self._kind_of_loss()
        self._module.train()
        first, second = self._value(self._rows(), seed=0), self._value(self._rows(), seed=1)
        random = not _close(first, second)
        for module in self._dropout.values():
            module.eval()
        return Probe(kind, self._batch_statistics(kind), random, tuple(self._dropout))

    def _kind_of_loss(self) -> Any:
        whole, halves = self._value(self._rows(self._even)), self._halves()
        if abs(whole) < 1e-12 or self._even < 2:
            return None
        doubled = self._value(self._rows(self._even) * 2)
        if _close(doubled, 2 * whole) and _close(sum(halves), whole):
            return "sum"
        if not _close(doubled, whole):
            return "cross-sample"
        if _close(sum(halves) / 2, whole):
            return "mean"
        between = min(halves) - abs(whole) * _TOLERANCE <= whole <= max(halves) + abs(whole) * _TOLERANCE
        return "weighted mean" if between else "cross-sample"

    def _batch_statistics(self, kind: Any) -> tuple[str, ...] | None:
        """Names of the normalisations, if halving the batch changes the loss and does not once they are fixed."""
        if not self._norms or self._even < 4:
            return ()
        expected = sum if kind == "sum" else (lambda halves: sum(halves) / 2)
        whole, halves = self._value(self._rows(self._even)), self._halves()
        return () if _close(expected(halves), whole) else tuple(self._norms)

    def _halves(self) -> list[float]:
        middle = self._even // 2
        rows = self._rows(self._even)
        return [self._value(rows[:middle]), self._value(rows[middle:])]

    def _rows(self, count: int | None = None) -> list[int]:
        return list(range(self._samples if count is None else count))

    def _value(self, rows: list[int], seed: int = 0) -> float:
        for name, buffer in self._module.named_buffers():
            buffer.copy_(self._buffers[name])  # as at first: a forward may change them
        torch.manual_seed(seed)
        return float(self._loss(self._module, _take(self._batch, rows, self._samples)))


def _take(value: Any, rows: list[int], samples: int) -> Any:
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and value.size(0) == samples else value
    if isinstance(value, dict):
        return {key: _take(item, rows, samples) for key, item in value.items()}
    if isinstance(value, list | tuple):
        taken = [_take(item, rows, samples) for item in value]
        return type(value)(*taken) if hasattr(value, "_fields") else type(value)(taken)
    return value


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other))
