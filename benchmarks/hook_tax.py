"""What communication hooks cost or save: every hook of lockstep, and torch's equivalents.

Models and method are those of step_tax.py. "over floor" compares with the larger of limit and the time that this hook's
share of the bytes takes on the wire.

    torchrun --standalone --nproc-per-node 2 benchmarks/hook_tax.py --json hook_tax.json
"""

from __future__ import annotations

import functools
import importlib
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
INT8 = {"tolerance": 0.05, "wire_share": 0.25}
#: What a hook must give to be timed, by its fidelity in the registry.
PROMISES: dict[str, dict[str, Any]] = {"half": HALF, "quantized": INT8, "low_rank": LOSSY}


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


def lockstep_hooks() -> list[Contender]:
    """Our engine without a hook and with each row of the registry but the plain all-reduce, which is the same."""
    engine = lockstep_engine()
    if isinstance(engine, str):
        return []
    plain = with_options(engine)
    found = [Contender(LOCKSTEP_DEFAULT, plain)]
    for name, fidelity, _ in importlib.import_module("lockstep._C").comm_hooks():
        if fidelity == "exact":
            continue
        for rank in RANKS if fidelity == "low_rank" else (None,):
            arguments = {} if rank is None else {"rank": rank, "start_iteration": FIRST_COMPRESSED_STEP}
            label = f"lockstep {name}" if rank is None else f"lockstep {name} rank {rank}"
            register = functools.partial(_set_hook, name, arguments)
            found.append(Contender(label, hooked(plain, register), **PROMISES[fidelity]))
    return found


def _set_hook(name: str, arguments: dict[str, Any], model: Any) -> None:
    model.set_comm_hook(name, **arguments)


def contenders(_: str) -> tuple[list[Contender], dict[str, str]]:
    """Hooks of both engines; and why ours are missing, if they are."""
    engine = lockstep_engine()
    missing = {LOCKSTEP_DEFAULT: engine} if isinstance(engine, str) else {}
    return torch_hooks() + lockstep_hooks(), missing


if __name__ == "__main__":
    main("hook_tax", __doc__.splitlines()[0], contenders, group_size=5)
