"""Torch's own comm hooks, and the hooks of the engine that do exactly the same."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from lockstep import hooks
from lockstep._codes import Code, tagged

#: Set to 0 to run torch's hooks as they are, unless ``register_comm_hook(..., native=True)`` says otherwise.
SWITCH = "LOCKSTEP_NATIVE_HOOKS"

#: What the engine's PowerSGD can do; other ranks stay with torch's.
_MAX_RANK = 32

_CASTS: dict[Callable[..., Any], hooks.NativeHook] = {
    default_hooks.allreduce_hook: hooks.AllReduce(division="after_packing"),
    default_hooks.fp16_compress_hook: hooks.FP16(order="cast_first"),
    default_hooks.bf16_compress_hook: hooks.BF16(order="cast_first"),
}
_POWER_SGD: dict[Callable[..., Any], type[hooks.PowerSGD]] = {
    powerSGD_hook.powerSGD_hook: hooks.PowerSGD,
    powerSGD_hook.batched_powerSGD_hook: hooks.BatchedPowerSGD,
}


def native_by_default() -> bool:
    return os.environ.get(SWITCH, "1") != "0"


def equivalent(state: object, hook: Callable[..., Any], group: dist.ProcessGroup) -> hooks.NativeHook | None:
    """The engine's hook that gives what ``hook(state, ...)`` gives on a model of ``group``, or None.

    Casts and the plain all-reduce are equal bit for bit. PowerSGD is equal up to rounding.
    """
    if hook in _CASTS and _is_group(state, group):
        return _CASTS[hook]
    kind = _POWER_SGD.get(hook)
    if kind is None or not isinstance(state, PowerSGDState) or not _is_group(state.process_group, group):
        return None
    if type(state) is PowerSGDState and (state.error_dict or state.p_memory_dict):
        return None  # in the middle of a run, with memory by bucket of a plan that we do not know
    if type(state) not in (PowerSGDState, LinkedPowerSGDState):
        return None
    if not 1 <= state.matrix_approximation_rank <= _MAX_RANK or state.min_compression_rate < 0:
        return None
    return kind(
        rank=state.matrix_approximation_rank,
        start_iteration=state.start_powerSGD_iter,
        min_compression_rate=float(state.min_compression_rate),
        epsilon=float(state.orthogonalization_epsilon),
        error_feedback=bool(state.use_error_feedback),
        warm_start=bool(state.warm_start),
        batch_same_shape=bool(state.batch_tensors_with_same_shape),
    )


def _is_group(given: object, group: dist.ProcessGroup) -> bool:
    return given is group or (given is None and dist.group.WORLD is group)


class LinkedPowerSGDState(PowerSGDState):
    """Torch's state while the engine runs PowerSGD: it answers from the engine.

    ``register_comm_hook`` turns the state that it is given into this class, so that scripts that look at it see what
    is true. ``iter``, the totals of ``compression_stats()``, ``error_dict`` and ``q_memory_dict`` (by bucket index of
    the present plan) and ``rng`` are copies; ``p_memory_dict`` is always empty. Assigning to what the engine has taken
    over raises. It can be pickled, with the errors of this rank, and registered again: by parameter name, so that a
    changed bucket plan does not matter. Loading needs lockstep.
    """

    __slots__ = ()

    @property
    def iter(self) -> int:  # type: ignore[override]
        return _memory(self).stats()[0]

    @property
    def total_numel_before_compression(self) -> int:  # type: ignore[override]
        return _memory(self).stats()[1]

    @property
    def total_numel_after_compression(self) -> int:  # type: ignore[override]
        return _memory(self).stats()[2]

    @property
    def error_dict(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        return _memory(self).by_bucket("error/")

    @property
    def q_memory_dict(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        return _memory(self).by_bucket("factor/")

    @property
    def p_memory_dict(self) -> dict[int, torch.Tensor]:  # type: ignore[override]
        return {}

    @property
    def rng(self) -> Any:  # type: ignore[override]
        import numpy as np  # torch needs it for a PowerSGDState, nothing else of ours does

        rng = np.random.RandomState()
        words = _memory(self).state()[f"{_memory(self).kind}/seeds"].numpy()
        rng.set_state(("MT19937", words[:-1].astype(np.uint32), int(words[-1])))
        return rng

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            return super().__setattr__(name, value)
        raise AttributeError(
            tagged(
                Code.BAD_ARGUMENT,
                f"'{name}' of this PowerSGDState has been taken over by the engine, which would not see a new value. "
                "Set it before register_comm_hook, or use model.set_comm_hook('power_sgd', ...), or register with "
                "native=False.",
            )
        )

    def __reduce__(self) -> tuple[Any, ...]:
        kept = {name: _slot(name).__get__(self) for name in _KEPT}
        return _restored, (kept, _memory(self).kind, _memory(self).state())


class _Memory:
    """What the engine knows of a state: asked, or, without a living engine, as it was last."""

    def __init__(self, kind: str, saved: dict[str, torch.Tensor] | None, reducer: Any = None) -> None:
        self.kind = kind
        self.saved = saved
        self.reducer = reducer

    def state(self) -> dict[str, torch.Tensor]:
        return self.saved if self.reducer is None else self.reducer.hook_state()

    def stats(self) -> list[int]:
        if self.reducer is not None:
            return list(self.reducer.hook_stats())
        return [int(self.saved[f"{self.kind}/{name}"]) for name in ("step", "numel_before", "numel_after")]

    def by_bucket(self, prefix: str) -> dict[int, torch.Tensor]:
        if self.reducer is None:
            return {}
        state, result = self.state(), {}
        for index, members in enumerate(self.reducer.bucket_params()):
            names = [self.reducer.param_names[i] for i in members]
            parts = [state[prefix + name] for name in names if prefix + name in state]
            if parts:
                result[index] = torch.cat(parts)
        return result


#: Slots that the engine does not take over.
_OWN = ("process_group", "compression_stats_logging_frequency", "next_stats_report")
#: Slots that mean what they say in a linked state too.
_KEPT = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "orthogonalization_epsilon",
    "use_error_feedback",
    "warm_start",
    "batch_tensors_with_same_shape",
    "compression_stats_logging_frequency",
    "next_stats_report",
)


def _slot(name: str) -> Any:
    return PowerSGDState.__dict__[name]


def _memory(state: LinkedPowerSGDState) -> _Memory:
    return _slot("error_dict").__get__(state)  # the slot itself; the property of that name asks it


def _restored(kept: dict[str, Any], kind: str, saved: dict[str, torch.Tensor]) -> LinkedPowerSGDState:
    state = LinkedPowerSGDState.__new__(LinkedPowerSGDState)
    for name, value in kept.items():
        _slot(name).__set__(state, value)
    _slot("process_group").__set__(state, None)  # the default group, as with torch
    _slot("error_dict").__set__(state, _Memory(kind, saved))
    return state


def is_linked(state: LinkedPowerSGDState | None, reducer: Any) -> bool:
    """Whether ``state`` answers from the engine of ``reducer``."""
    return state is not None and _memory(state).reducer is reducer


def link(state: PowerSGDState, native: hooks.PowerSGD, reducer: Any, rank: int) -> None:
    """Let the engine's hook, just selected, go on from ``state``; from now on ``state`` answers from the engine.

    Raises:
        RuntimeError: the state was saved from a model with other parameters.
    """
    if isinstance(state, LinkedPowerSGDState):
        memory = _memory(state)
        reducer.load_hook_state(memory.state())
        if memory.reducer is not None:
            _warn_of_sharing()
        memory.reducer = reducer
        return
    _, words, position, *_ = state.rng.get_state()
    numbers = {
        "step": state.iter,
        "saved_by_rank": rank,
        "rank": state.matrix_approximation_rank,
        "numel_before": state.total_numel_before_compression,
        "numel_after": state.total_numel_after_compression,
    }
    start = {f"{native.name}/{name}": torch.tensor([number]) for name, number in numbers.items()}
    start[f"{native.name}/seeds"] = torch.tensor([*words.tolist(), position])
    reducer.load_hook_state(start)
    state.error_dict = _Memory(native.name, None, reducer)
    state.__class__ = LinkedPowerSGDState


def _warn_of_sharing() -> None:
    text = (
        "this PowerSGDState was in use by another model. That one keeps its errors and goes on by itself; the new one "
        "starts with a copy of them, and the state shows the new one's from here on. Make a state of its own for each "
        "model."
    )
    warnings.warn(tagged(Code.SHARED_HOOK_STATE, text), UserWarning, stacklevel=5)  # the caller of register_comm_hook


def unlink(state: LinkedPowerSGDState, last: dict[str, torch.Tensor]) -> None:
    """The engine's hook has been replaced: ``state`` answers with ``last``, what the engine knew of it."""
    memory = _memory(state)
    memory.saved, memory.reducer = last, None
