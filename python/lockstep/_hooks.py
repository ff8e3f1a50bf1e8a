"""Comm hooks: registered as with torch, selected by name, saved and loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from lockstep import _torch_hooks, hooks
from lockstep._codes import Code, tagged

#: ``hook(state, bucket)`` returns a future of the bucket's mean.
Hook = Callable[[object, dist.GradBucket], torch.futures.Future]


class CommHooks:
    """Mixed into ``DistributedDataParallel``, in front of torch's class."""

    _engine_hook: str | None
    _linked_state: object = None

    def register_comm_hook(self, state: object, hook: Hook | None = None, *, native: bool | None = None) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket. Hooks written for torch's class run unchanged.

        The bucket's gradients are not divided by the number of ranks: that is the hook's duty. All ranks must register
        the same hook. Of torch's own hooks, ``allreduce_hook``, ``fp16_compress_hook``, ``bf16_compress_hook`` and the
        two PowerSGD hooks are replaced by the engine's where those give the same (PowerSGD: up to rounding); a
        ``PowerSGDState`` then answers from the engine.

        Args:
            state: passed to ``hook``; or, without ``hook``, one of ``lockstep.hooks``.
            native: whether hooks of torch may be replaced. None: unless LOCKSTEP_NATIVE_HOOKS=0.

        Raises:
            TypeError: ``hook`` cannot be called.
            ValueError: its annotations are not ``bucket: dist.GradBucket -> torch.futures.Future[torch.Tensor]``.
            RuntimeError: a hook has been registered before, or a backward is running.

        Example:
            >>> model.register_comm_hook(lockstep.hooks.PowerSGD(rank=2))
        """
        if hook is None and isinstance(state, hooks.NativeHook):
            self._check_no_hook(state.name)
            return self.set_comm_hook(state)
        self._check_comm_hook(_with_types(hook))
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self._check_no_hook(name)
        may_replace = _torch_hooks.native_by_default() if native is None else native
        if self._use_python_reducer or not may_replace or not self._select_equivalent(state, hook):
            self.reducer.set_python_hook(state, hook, name, _counting_groups(self.process_group))
        self._note_hook(name)
        self._comm_hooks.append((hook, state))

    def set_comm_hook(self, hook: str | hooks.NativeHook, **arguments: hooks.Value) -> None:
        """Replace the comm hook by one of the engine's, between steps. Every rank must do the same.

        Args:
            hook: one of ``lockstep.hooks``, or its name: ``"allreduce"``, ``"fp16"``, ``"bf16"``, ``"int8"``,
                ``"power_sgd"``, ``"batched_power_sgd"``.
            arguments: with a name, the arguments of that hook.

        Raises:
            RuntimeError: no such hook or argument (the text names the right ones), a value out of range, or a backward
                is running. The hook is what it was.
            TypeError: a value that is no bool, int, float or str.

        Example:
            >>> model.set_comm_hook("power_sgd", rank=2, start_iteration=100)
        """
        if self._use_python_reducer:
            text = "torch.compile runs this model with its Python reducer, which knows hooks written in Python only."
            raise RuntimeError(tagged(Code.BAD_OPTION, text))
        if isinstance(hook, hooks.NativeHook):
            hook, arguments = hook.name, {**hook.arguments(), **arguments}
        for name, value in arguments.items():
            if not isinstance(value, bool | int | float | str):
                text = f"set_comm_hook: {name} is {value!r}; arguments of comm hooks are bool, int, float or str."
                raise TypeError(tagged(Code.BAD_ARGUMENT, text))
        linked, before = self._linked_state, self._linked_snapshot()
        self.reducer.set_comm_hook(hook, arguments)
        if before is not None:
            _torch_hooks.unlink(linked, before)
        self._linked_state = None
        self._comm_hooks.clear()
        self._note_hook(hook)

    def comm_hook_state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of all that the engine's hook keeps between steps, by parameter name, and the bucket plan.

        What compression leaves out is different on each rank: save one state per rank, and a run that loads it goes on
        bit for bit.

        Raises:
            RuntimeError: a backward is running.
        """
        return self.reducer.hook_state()

    def load_comm_hook_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Give the hook, registered as when the state was saved, what ``comm_hook_state_dict`` returned.

        Warns of parameters that do not fit, whose memory starts from zero, and of a state that another rank saved.

        Raises:
            RuntimeError: the state is of another hook or of another model, or a backward is running. Nothing has
                changed then.
        """
        self.reducer.load_hook_state(state)

    def comm_hook_stats(self) -> dict[str, Any]:
        """Steps of the hook, and elements before and after compression with their ratio (PowerSGD; else zeros)."""
        steps, before, after = self.reducer.hook_stats()
        return {"steps": steps, "numel_before": before, "numel_after": after, "rate": before / after if after else 0.0}

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        if not isinstance(comm_hook_type, dist.BuiltinCommHookType):
            text = f"a built-in comm hook is a torch.distributed.BuiltinCommHookType, but got {comm_hook_type!r}"
            self._log_and_throw(TypeError, tagged(Code.BAD_ARGUMENT, text))
        name = str(comm_hook_type)
        self._check_no_hook(name)
        is_half = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        native = hooks.FP16(order="cast_first") if is_half else hooks.AllReduce()
        self.reducer.set_comm_hook(native.name, native.arguments())
        self._note_hook(name)

    def _select_equivalent(self, state: Any, hook: Hook) -> bool:
        native = _torch_hooks.equivalent(state, hook, self.process_group)
        if native is None:
            return False
        self.reducer.set_comm_hook(native.name, native.arguments())
        if isinstance(native, hooks.PowerSGD):
            try:
                _torch_hooks.link(state, native, self.reducer, self.process_group.rank())
            except RuntimeError:
                self.reducer.set_comm_hook("allreduce")
                raise
            self._linked_state = state
        return True

    def _linked_snapshot(self) -> dict[str, torch.Tensor] | None:
        return self.reducer.hook_state() if _torch_hooks.is_linked(self._linked_state, self.reducer) else None

    def _check_no_hook(self, name: str) -> None:
        if self._engine_hook is not None:
            self._log_and_throw(
                RuntimeError,
                tagged(
                    Code.HOOK_TWICE,
                    f"register_comm_hook or register_builtin_comm_hook can only be called once; "
                    f"'{self._engine_hook}' is registered already and '{name}' would replace it. Combine both in one "
                    "hook, or replace it by one of the engine's with set_comm_hook().",
                ),
            )

    def _note_hook(self, name: str) -> None:
        self._engine_hook = name
        self.logger._set_comm_hook_name(name)


def _with_types(hook: Any) -> Any:
    """``hook`` with annotations that are types also where ``from __future__ import annotations`` made them strings."""
    try:
        signature = inspect.signature(hook, eval_str=True)
    except (NameError, TypeError, ValueError):
        return hook  # torch's check knows what to say

    @functools.wraps(hook)
    def typed(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    typed.__signature__ = signature
    return typed


def _counting_groups(group: dist.ProcessGroup) -> list[dist.ProcessGroup]:
    """The groups that a hook most likely uses, those of gloo, which counts collectives when they are issued."""
    groups = {id(group): group, id(dist.group.WORLD): dist.group.WORLD}.values()
    return [group for group in groups if group is not None and group.name() == "gloo"]
