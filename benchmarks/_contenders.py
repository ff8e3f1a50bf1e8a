"""The engines that every benchmark compares, and why one of them is missing."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]

TORCH_DEFAULT = "torch default"
TORCH_TUNED = "torch tuned"
TORCH_BATCHED = "torch batched"
LOCKSTEP_DEFAULT = "lockstep default"
LOCKSTEP_VIEWS = "lockstep views"

_TUNED = {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}


@dataclass(frozen=True)
class Contender:
    """A name for tables, and how to put a module under this engine."""

    name: str
    wrap: Wrap


def _with_options(engine: type[nn.Module], **options: object) -> Wrap:
    return lambda module, group: engine(module, process_group=group, **options)


def engines() -> tuple[list[Contender], dict[str, str]]:
    """Contenders that exist here, torch's first, and name -> reason for those that do not."""
    found = [
        Contender(TORCH_DEFAULT, _with_options(DistributedDataParallel)),
        Contender(TORCH_TUNED, _with_options(DistributedDataParallel, **_TUNED)),
    ]
    missing = {}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        found.append(Contender(TORCH_BATCHED, _with_options(DistributedDataParallel, batched_grad_copy=True, **_TUNED)))
    else:
        missing[TORCH_BATCHED] = "batched_grad_copy needs torch 2.12 or newer"
    try:
        engine = importlib.import_module("lockstep").DistributedDataParallel
        found.append(Contender(LOCKSTEP_DEFAULT, _with_options(engine)))
        found.append(Contender(LOCKSTEP_VIEWS, _with_options(engine, gradient_as_bucket_view=True)))
    except (ImportError, AttributeError) as error:
        reason = " ".join(f"lockstep cannot be imported: {error}".split())  # on one line
        missing |= dict.fromkeys((LOCKSTEP_DEFAULT, LOCKSTEP_VIEWS), reason)
    return found, missing
