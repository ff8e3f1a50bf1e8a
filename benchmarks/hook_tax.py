"""What communication hooks cost or save: every hook of lockstep, and torch's equivalents.

Models and method are those of step_tax.py. "over floor" compares with the larger of limit and the time that this hook's
share of the bytes takes on the wire.

    torchrun --standalone --nproc-per-node 2 benchmarks/hook_tax.py --json hook_tax.json
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from _contenders import LOCKSTEP_DEFAULT, TORCH_DEFAULT, Contender, Wrap, lockstep_engine, with_options
from _step_run import main
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

RANKS = (1, 4)  # of PowerSGD
FIRST_COMPRESSED_STEP = 2  # the smallest that torch allows with error feedback
HALF = {"tolerance": 0.02, "wire_share": 0.5}
LOSSY = {"tolerance": None, "wire_share": None}
# What a hook promises, by the start of its name; one that is not here has to give the mean.
PROMISES: dict[str, dict[str, Any]] = {
    "fp16": HALF,
    "bf16": HALF,
    "int8": {"tolerance": 0.05, "wire_share": 0.25},
    "powersgd": LOSSY,
    "batched_powersgd": LOSSY,
}
NAMES = ("fp16", "bf16", "int8", "powersgd")  # for a lockstep that does not list its hooks


def hooked(wrap: Wrap, register: Callable[[nn.Module], object]) -> Wrap:
    """``wrap``, then ``register`` on the result."""

    def wrapped(module: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
        model = wrap(module, group, **options)
        register(model)
        return model

    return wrapped


def torch_hooks() -> list[Contender]:
    """Torch's engine without a hook and with its own."""
    plain = with_options(DistributedDataParallel)

    def power(rank: int) -> Callable[[nn.Module], object]:
        def register(model: Any) -> None:
            state = powerSGD_hook.PowerSGDState(
                dist.group.WORLD, matrix_approximation_rank=rank, start_powerSGD_iter=FIRST_COMPRESSED_STEP
            )
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        return register

    def half(hook: Callable) -> Callable[[nn.Module], object]:
        return lambda model: model.register_comm_hook(None, hook)

    return [
        Contender(TORCH_DEFAULT, plain),
        Contender("torch fp16", hooked(plain, half(default_hooks.fp16_compress_hook)), **HALF),
        Contender("torch bf16", hooked(plain, half(default_hooks.bf16_compress_hook)), **HALF),
        *(Contender(f"torch powersgd rank {rank}", hooked(plain, power(rank)), **LOSSY) for rank in RANKS),
    ]


def registry_names() -> list[str]:
    """Names of all rows of the registry but the plain all-reduce, which is what a model does without a hook."""
    native, hooks = importlib.import_module("lockstep._C"), None
    with contextlib.suppress(ImportError):
        hooks = importlib.import_module("lockstep.hooks")
    for owner in (native, hooks):
        for attribute in ("comm_hook_names", "hook_names", "names"):
            listed = getattr(owner, attribute, None)
            if listed is not None:
                names = listed() if callable(listed) else listed
                return [str(name) for name in names if name not in ("allreduce", "all_reduce")]
    return list(NAMES)


def power_sgd(rank: int) -> Callable[[Any], None]:
    """Register the native PowerSGD of this rank, compressing from the same step on as torch's."""

    def register(model: Any) -> None:
        factory = importlib.import_module("lockstep.hooks").PowerSGD
        known = inspect.signature(factory).parameters
        start = next((name for name in known if name.startswith("start")), None)
        model.register_comm_hook(factory(rank=rank, **({start: FIRST_COMPRESSED_STEP} if start else {})))

    return register


def by_name(name: str) -> Callable[[Any], None]:
    """Choose a hook by its name in the registry."""

    def register(model: Any) -> None:
        (model if hasattr(model, "set_comm_hook") else model.reducer).set_comm_hook(name)

    return register


def lockstep_hooks() -> list[Contender]:
    """Our engine without a hook and with each row of the registry. An unknown name becomes a failed row."""
    engine = lockstep_engine()
    if isinstance(engine, str):
        return []
    plain = with_options(engine)
    found = [Contender(LOCKSTEP_DEFAULT, plain)]
    for name in registry_names():
        promise = next((p for start, p in PROMISES.items() if name.lower().startswith(start)), {})
        if name.lower() == "powersgd":
            for rank in RANKS:
                found.append(Contender(f"lockstep powersgd rank {rank}", hooked(plain, power_sgd(rank)), **promise))
        else:
            found.append(Contender(f"lockstep {name}", hooked(plain, by_name(name)), **promise))
    return found


def contenders(_: str) -> tuple[list[Contender], dict[str, str]]:
    """Hooks of both engines; and why ours are missing, if they are."""
    engine = lockstep_engine()
    missing = {LOCKSTEP_DEFAULT: engine} if isinstance(engine, str) else {}
    return torch_hooks() + lockstep_hooks(), missing


if __name__ == "__main__":
    main("hook_tax", __doc__.splitlines()[0], contenders, group_size=5)
