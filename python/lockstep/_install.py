"""Makes programs that build torch's class by name build ours, and undoes it."""

from __future__ import annotations

import sys
from types import ModuleType

from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from lockstep.ddp import DistributedDataParallel

#: What was replaced: (module, name of its global).
_replaced: list[tuple[ModuleType, str]] = []


def install() -> None:
    """Replace ``torch.nn.parallel.DistributedDataParallel`` by Lockstep's class in every imported module.

    Modules imported later find Lockstep's class in torch. Models wrapped before keep torch's engine. Calling it twice
    does no harm. ``torch.distributed.Reducer`` stays torch's: whoever builds a reducer by hand passes buckets of
    torch's making and wants torch's engine.

    Example:
        >>> lockstep.install()
        >>> torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
        True
    """
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__.split(".")[0] == "lockstep":
            continue
        for name, value in list(vars(module).items()):
            if value is TorchDDP:
                setattr(module, name, DistributedDataParallel)
                _replaced.append((module, name))


def uninstall() -> None:
    """Put torch's class back wherever ``install`` replaced it."""
    while _replaced:
        module, name = _replaced.pop()
        if getattr(module, name, None) is DistributedDataParallel:
            setattr(module, name, TorchDDP)
