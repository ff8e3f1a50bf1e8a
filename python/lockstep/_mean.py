"""The mean of a metric over ranks: weighted, never a mean of means."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep._codes import Code, tagged
from lockstep._ranks import joined

Value = TypeVar("Value", float, Tensor, Mapping[str, float | Tensor])


def mean(value: Value, weight: float | Tensor = 1.0, *, group: dist.ProcessGroup | None = None) -> Value:
    """The mean over ranks of ``value``, each counted ``weight`` times: sum(weight * value) / sum(weight).

    Give the number of samples (or tokens) behind a rank's value as its weight, and the result is the mean over all
    samples, however they are spread over ranks. A rank of weight 0 takes part but does not count, whatever its value,
    NaN included. Collective: all ranks call it, with values of equal kind and shape; one all-reduce in float64.

    Args:
        value: a number, a tensor, or a mapping of names to those, with the same names on every rank.
        weight: not negative; a number, or a tensor of one element.

    Returns:
        Like ``value``, and the same on every rank. Tensors stay on their device and the host does not wait for it;
        integers become float64. Numbers come back as float. Without a process group: the mean over one rank.

    Raises:
        TypeError: ``value`` is none of these.
        ValueError: a weight is negative or no finite number, or all are 0, so that there is no mean. Weights that are
            tensors on a GPU are not looked at, because the host would have to wait: the result is then NaN.

    Example:
        >>> mean(loss_of_this_rank, len(batch))   # rank 0: (1.0, 3 samples), rank 1: (2.0, 1 sample)
        1.25
    """
    if isinstance(value, Mapping):
        names = list(value)
        return dict(zip(names, _means([value[name] for name in names], weight, group), strict=True))
    return _means([value], weight, group)[0]


def _means(
    values: list[float | Tensor], weight: float | Tensor, group: dist.ProcessGroup | None
) -> list[float | Tensor]:
    for value in values:
        if not isinstance(value, Real | Tensor) or (isinstance(value, Tensor) and value.is_complex()):
            text = f"mean takes numbers, real tensors and mappings of those, not {type(value).__name__}."
            raise TypeError(tagged(Code.BAD_MEAN, text))
    device = _meeting_place(values, group)
    # Non-blocking, because torch would otherwise wait for the whole stream; only copies towards the device come here.
    weights = _check_weight(weight).to(device, torch.float64, non_blocking=True).reshape(1)
    flat = [
        torch.as_tensor(value).detach().to(device, torch.float64, non_blocking=True).reshape(-1) for value in values
    ]
    weighted = torch.cat(flat) * weights
    packed = torch.cat([torch.where(weights == 0, torch.zeros_like(weighted), weighted), weights])
    if joined():
        dist.all_reduce(packed, group=group)
    total = packed[-1]
    if device.type == "cpu" and total == 0:
        text = "the weights of all ranks are 0, so there is no mean. Call it only when some rank has samples."
        raise ValueError(tagged(Code.BAD_MEAN, text))
    results = (packed[:-1] / total).split([part.numel() for part in flat])
    return [_like(value, result) for value, result in zip(values, results, strict=True)]


def _meeting_place(values: list[float | Tensor], group: dist.ProcessGroup | None) -> torch.device:
    """Where the all-reduce takes place: with the tensors, unless the group only serves GPUs."""
    devices = [value.device for value in values if isinstance(value, Tensor)]
    device = next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
    if device.type == "cpu" and joined() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_weight(weight: float | Tensor) -> Tensor:
    tensor = torch.as_tensor(weight).detach()
    if tensor.numel() != 1:
        text = f"the weight of a rank is one number, but has {tensor.numel()} elements."
        raise ValueError(tagged(Code.BAD_MEAN, text))
    if tensor.device.type == "cpu" and not (math.isfinite(tensor.item()) and tensor.item() >= 0):
        text = f"the weight of a rank is how many samples it has seen, but is {tensor.item()}."
        raise ValueError(tagged(Code.BAD_MEAN, text))
    return tensor


def _like(value: float | Tensor, result: Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        return result.item()
    dtype = value.dtype if value.is_floating_point() else torch.float64
    return result.reshape(value.shape).to(value.device, dtype)
