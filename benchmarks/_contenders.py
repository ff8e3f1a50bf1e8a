"""The engines that every benchmark compares, and why one of them is missing."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.parallel import DistributedDataParallel

Wrap = Callable[..., nn.Module]  # (module, group, **options of the engine's constructor)

NO_REDUCTION = "no reduction"
LIMIT = "limit"
TORCH_DEFAULT = "torch default"
TORCH_TUNED = "torch tuned"
TORCH_BATCHED = "torch batched"
TORCH_UNUSED = "torch unused"
LOCKSTEP_DEFAULT = "lockstep default"
LOCKSTEP_VIEWS = "lockstep views"
LOCKSTEP_DIRECT = "lockstep direct"
LOCKSTEP_DIRECT_VIEWS = "lockstep direct views"
LOCKSTEP_UNUSED = "lockstep unused"

_TUNED = {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}
_UNUSED = {"find_unused_parameters": True}
_VIEWS = {"gradient_as_bucket_view": True}


@dataclass(frozen=True)
class Contender:
    """A name for tables, and how to put a module under this engine."""

    name: str
    wrap: Wrap
    reduces: bool = True  # False: gradients stay as this rank computed them
    waits_for_all: bool = False  # one all-reduce of one element after each backward
    tolerance: float | None = 0.02  # relative, of the mean gradient, by the 2-norm; None: too lossy to say
    wire_share: float | None = 1.0  # bytes on the wire over bytes of the gradients; None: depends on the model

    def with_options(self, **options: object) -> Contender:
        """The same engine with further keywords of its constructor, which its name then lists."""
        text = ", ".join(f"{key}={value}" for key, value in options.items())
        wrap = self.wrap
        return replace(self, name=f"{self.name}, {text}", wrap=lambda module, group: wrap(module, group, **options))


def with_options(engine: type[nn.Module], **options: object) -> Wrap:
    """A ``Wrap`` that constructs ``engine`` with these keywords."""
    return lambda module, group, **more: engine(module, process_group=group, **(options | more))


def lockstep_engine() -> type[nn.Module] | str:
    """Lockstep's class, or in one line why it cannot be imported."""
    try:
        return importlib.import_module("lockstep").DistributedDataParallel
    except (ImportError, AttributeError) as error:
        return " ".join(f"lockstep cannot be imported: {error}".split())


def engines() -> tuple[list[Contender], dict[str, str]]:
    """Contenders that exist here, torch's first, and name -> reason for those that do not."""
    found = [
        Contender(TORCH_DEFAULT, with_options(DistributedDataParallel)),
        Contender(TORCH_TUNED, with_options(DistributedDataParallel, **_TUNED)),
    ]
    missing = {}
    if "batched_grad_copy" in inspect.signature(DistributedDataParallel).parameters:
        found.append(Contender(TORCH_BATCHED, with_options(DistributedDataParallel, batched_grad_copy=True, **_TUNED)))
    else:
        missing[TORCH_BATCHED] = "batched_grad_copy needs torch 2.12 or newer"
    engine = lockstep_engine()
    if isinstance(engine, str):
        return found, missing | dict.fromkeys((LOCKSTEP_DEFAULT, LOCKSTEP_VIEWS), engine)
    found.append(Contender(LOCKSTEP_DEFAULT, with_options(engine)))
    found.append(Contender(LOCKSTEP_VIEWS, with_options(engine, **_VIEWS)))
    return found, missing


def baselines() -> list[Contender]:
    """What every group of contenders is measured against: no reduction, and a step that only waits for the others."""
    return [
        Contender(NO_REDUCTION, lambda module, _: module, reduces=False),
        Contender(LIMIT, lambda module, _: module, reduces=False, waits_for_all=True),
    ]


def step_engines(device_type: str) -> tuple[list[Contender], dict[str, str]]:
    """Those of ``engines``, find_unused_parameters and our NCCL communicator; name -> reason for what is missing."""
    found, missing = engines()
    found.append(Contender(TORCH_UNUSED, with_options(DistributedDataParallel, **_UNUSED)))
    engine = lockstep_engine()
    if isinstance(engine, str):
        return found, missing | dict.fromkeys((LOCKSTEP_DIRECT, LOCKSTEP_DIRECT_VIEWS, LOCKSTEP_UNUSED), engine)
    direct = {"communicator": "nccl"}
    if device_type != "cuda":
        missing |= dict.fromkeys((LOCKSTEP_DIRECT, LOCKSTEP_DIRECT_VIEWS), "NCCL needs CUDA tensors")
    elif "communicator" not in inspect.signature(engine).parameters:
        reason = "this version of lockstep has no keyword `communicator`"
        missing |= dict.fromkeys((LOCKSTEP_DIRECT, LOCKSTEP_DIRECT_VIEWS), reason)
    else:
        found.append(Contender(LOCKSTEP_DIRECT, with_options(engine, **direct)))
        found.append(Contender(LOCKSTEP_DIRECT_VIEWS, with_options(engine, **direct, **_VIEWS)))
    found.append(Contender(LOCKSTEP_UNUSED, with_options(engine, **_UNUSED)))
    return found, missing
