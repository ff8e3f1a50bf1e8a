"""What torch's class does not have: methods for synchronisation on demand, and checks that name what would go wrong."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from lockstep import _communicators, _monitor, _parameters
from lockstep._arguments import check_group
from lockstep._codes import Code, tagged


class Extras:
    """Mixed into ``DistributedDataParallel``, in front of torch's class."""

    # ---- for users ----

    def sync_gradients(self) -> None:
        """Average the gradients accumulated so far over the ranks, without another forward. Collective.

        For the end of an epoch that leaves micro-batches of ``no_sync`` behind. Honours the comm hook and bucket
        views. A parameter without a gradient on every rank keeps none; where only some ranks have one, the others
        count as zeros.

        Raises:
            RuntimeError: a backward that reduces by itself is expected or running.
        """
        self.reducer.sync_gradients()

    def assert_in_sync(self) -> None:
        """Compare parameters and buffers over the ranks, bit by bit, through their checksums. Collective.

        Raises:
            RuntimeError: on every rank; names the first tensors that differ from rank 0's, and the ranks.
        """
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        named = [(name, tensor) for name, tensor in named if name not in self.parameters_to_ignore]
        self.reducer.assert_in_sync([tensor.detach() for _, tensor in named], [name for name, _ in named])

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the wrapped module as if it were ``forward``: its backward is reduced.

        Example:
            >>> loss = model.call("compute_loss", batch)        # not model.module.compute_loss(batch)
        """
        function = getattr(self.module, method)
        with torch.autograd.profiler.record_function("DistributedDataParallel.forward"):
            inputs, kwargs = self._pre_forward(*args, **kwargs)
            with self._inside_ddp_forward():
                output = function(*inputs, **kwargs)
            return self._post_forward(output)

    def expect_unused(self, names: Iterable[str]) -> None:
        """Say that the next backward will probably not use these parameters, so that nobody waits for them.

        Only with ``find_unused_parameters=True``, where it saves time when the subset changes from step to step. A
        wrong hint costs a small reduction more and a warning; the gradients are right in any case.

        Args:
            names: of parameters, or of submodules whose parameters are all meant.

        Raises:
            ValueError: a name is neither.
        """
        chosen: list[int] = []
        for name in names:
            matching = [i for i, full in enumerate(self._hooked_names) if full == name or full.startswith(f"{name}.")]
            if not matching:
                text = f"expect_unused: the wrapped module has no trainable parameter or submodule called '{name}'"
                raise ValueError(tagged(Code.UNKNOWN_NAME, text))
            chosen += matching
        self.reducer.expect_unused(chosen)

    def register_reduced_hook(self, hook: Callable[[torch.nn.Parameter], Any]) -> RemovableHandle:
        """Have ``hook(parameter)`` called whenever a parameter's mean gradient was published.

        It runs at the end of backward, in the thread that called it, while the engine is locked: an optimizer step
        on the parameter is fine, a call of this model is not.
        """
        hooks: OrderedDict[int, Callable[[torch.nn.Parameter], Any]] = self.__dict__.setdefault(
            "_reduced_hooks", OrderedDict()
        )
        if not hooks:
            parameters = self._hooked_parameters

            def published(i: int) -> None:
                for function in list(hooks.values()):
                    function(parameters[i])

            self.reducer.set_published_observer(published)
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    # ---- the switch that forward and backward must agree on ----

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward of the next forward is reduced. ``no_sync`` sets it."""
        return self.__dict__.get("_grad_sync", True)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, reduces: bool) -> None:
        self.__dict__["_grad_sync"] = reduces
        if (reducer := self.__dict__.get("reducer")) is not None:
            reducer.note_sync_switch(bool(reduces))

    # ---- construction ----

    def _set_watch_options(
        self,
        strict: bool,
        check_sync_every: int,
        stall_threshold: float | None,
        uneven_forwards: bool,
        communicator: _communicators.Communicator,
    ) -> None:
        if check_sync_every < 0:
            text = f"check_sync_every is a number of steps, 0 for never, but is {check_sync_every}"
            raise ValueError(tagged(Code.BAD_OPTION, text))
        if stall_threshold is None:
            stall_threshold = float(os.environ.get("LOCKSTEP_STALL_THRESHOLD", "30"))
        if not math.isfinite(stall_threshold) or stall_threshold < 0:
            text = f"stall_threshold is in seconds, 0 for no monitor, but is {stall_threshold}"
            raise ValueError(tagged(Code.BAD_OPTION, text))
        _communicators.check(communicator)
        self._strict = strict
        self._check_sync_every = check_sync_every
        self._stall_threshold = stall_threshold
        self._uneven_forwards = uneven_forwards
        self._communicator = communicator
        self._reduced_forwards = 0

    def _start_watch(self, hooked: list[torch.nn.Parameter]) -> None:
        """After the engine was built over ``hooked``."""
        named = dict(self.module.named_parameters())
        names = {id(parameter): name for name, parameter in named.items()}
        self.__dict__["_hooked_parameters"] = hooked
        self._hooked_names = [names.get(id(parameter), "") for parameter in hooked]
        frozen = {
            name: parameter
            for name, parameter in named.items()
            if not parameter.requires_grad and name not in self.parameters_to_ignore
        }
        self.reducer.watch_frozen(list(frozen.values()), list(frozen))
        self._known_parameters = {id(parameter) for parameter in named.values()}
        _parameters.watch_registrations()
        self._seen_registrations = _parameters.registrations()
        self._notice_other_wrappers()
        _monitor.register(self)

    def _notice_other_wrappers(self) -> None:
        older = _parameters.wrapper_of(self.module)
        inner = [
            name
            for name, submodule in self.module.named_modules()
            if isinstance(submodule, torch.nn.parallel.distributed.DistributedDataParallel)
        ]
        if older is not None and older is not self:
            older.reducer.mute(Code.UNANNOUNCED)  # its parameters get gradients from the newer wrapper's forwards
            what = "the module is wrapped by another living DistributedDataParallel already"
        elif inner:
            what = f"the module contains a DistributedDataParallel already ('{inner[0]}')"
        else:
            what = ""
        _parameters.note_wrapper(self.module, self)
        if what:
            text = (
                f"{what}. Gradients are reduced by each wrapper whose forward runs. Wrap the model once, at the "
                "outside."
            )
            warnings.warn(tagged(Code.WRAPPED_TWICE, text), stacklevel=2)

    def _compare_initial_buffers(self) -> None:
        """Without buffer synchronisation torch leaves buffers as each rank made them."""
        named = {n: b for n, b in self.module.named_buffers() if n not in self.parameters_to_ignore}
        if self._init_sync_buffers or not named:
            return
        try:
            self.reducer.assert_in_sync(list(named.values()), list(named))
        except RuntimeError as error:
            text = (
                f"with broadcast_buffers=False buffers are not synchronised, and they differ at construction: {error}"
            )
            warnings.warn(tagged(Code.INITIAL_BUFFERS, text), stacklevel=2)

    # ---- before and after forward ----

    def _check_before_forward(self) -> None:
        if self._seen_registrations != _parameters.registrations():
            self._check_added_parameters()
            self._seen_registrations = _parameters.registrations()
        if self._check_sync_every and self.require_backward_grad_sync:
            self._reduced_forwards += 1
            if self._reduced_forwards % self._check_sync_every == 0:
                self.assert_in_sync()

    def _check_added_parameters(self) -> None:
        added = [
            name
            for name, parameter in self.module.named_parameters()
            if parameter.requires_grad
            and id(parameter) not in self._known_parameters
            and name not in self.parameters_to_ignore
        ]
        if added:
            self._fail(
                RuntimeError,
                Code.ADDED_PARAMETER,
                f"{len(added)} trainable parameters were added or replaced after the module was wrapped: "
                f"{', '.join(added[:20])}. They would not be reduced, and ranks would drift apart. Wrap the "
                "module again after changing its parameters.",
            )

    def _refuse_output(self, output: Any) -> NoReturn:
        option = "static_graph" if self.static_graph else "find_unused_parameters"
        self._fail(
            TypeError,
            Code.OUTPUT_TYPE,
            f"forward returned a {type(output).__module__}.{type(output).__qualname__} in which no tensor can "
            f"be found, but {option}=True needs the outputs of forward. Return tensors in a list, tuple, dict or "
            "dataclass, or explain the class with lockstep.register_output_type(cls, flatten).",
        )

    def _fail(self, kind: type[Exception], code: Code, text: str) -> NoReturn:
        """Raise, and let the ranks that wait for this one know."""
        text = tagged(code, f"[rank {self.process_group.rank()}] {text}")
        self.reducer.publish_failure(text)
        self._log_and_throw(kind, text)
        raise AssertionError("unreachable")

    # ---- layers that communicate in forward ----

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Any:
        """As torch's: trains on while other ranks have run out of data.

        Raises:
            ValueError: a SyncBatchNorm would wait in forward for ranks that run none any more.
        """
        if enable and not throw_on_early_termination and (name := self._first_sync_batchnorm()) is not None:
            text = (
                f"[rank {self.process_group.rank()}] join() cannot stand in for the collectives of layer '{name}' "
                "(SyncBatchNorm), which waits in forward for every rank: a rank that has run out of data would hang "
                "the others. Pass throw_on_early_termination=True, or give every rank equally many batches."
            )
            raise ValueError(tagged(Code.SYNC_BATCHNORM, text))
        return self._joined(super().join(divide_by_initial_world_size, enable, throw_on_early_termination))

    @contextlib.contextmanager
    def _joined(self, join: Any) -> Iterator[None]:
        with join:
            yield
            # A backward of the last batch that threw: the others wait for it, before they look who has joined.
            self.reducer.finish_failed_pass()

    def _first_sync_batchnorm(self) -> str | None:
        layers = (name for name, layer in self.module.named_modules() if isinstance(layer, torch.nn.SyncBatchNorm))
        return next(layers, None)

    def _passing_sync_batchnorm_handle(self, module: torch.nn.Module) -> None:
        if self.device_type == "cpu" and (name := self._first_sync_batchnorm()) is not None:
            self._fail(
                ValueError,
                Code.SYNC_BATCHNORM,
                f"SyncBatchNorm layers only work with GPU modules, but '{name}' is on the CPU. Use BatchNorm there.",
            )

    # ---- modules without anything to reduce ----

    def _passes_through(self, module: torch.nn.Module, allowed: bool) -> bool:
        """Turn this object into a plain wrapper when ``module`` has nothing to train and the user allows it."""
        if not allowed or any(parameter.requires_grad for parameter in module.parameters()):
            return False
        torch.nn.Module.__init__(self)
        self.module = module
        self.forward = module.forward
        self.__dict__["reducer"] = None
        return True

    # ---- friendlier errors ----

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise
            text = (
                f"{error}; did you mean `.module.{name}`? (Note: what runs through `.module` is not "
                "reduced; see `call`.)"
            )
            raise AttributeError(tagged(Code.NO_SUCH_ATTRIBUTE, text)) from None

    def _update_process_group(self, new_process_group: Any) -> None:
        if new_process_group != torch.distributed.GroupMember.NON_GROUP_MEMBER:  # that one leaves all as it is
            check_group(new_process_group)
        super()._update_process_group(new_process_group)

    def _set_sparse_metadata(self, global_unique_ids: dict[str, torch.Tensor]) -> NoReturn:
        """Torch built for NCCLX takes the indices of sparse gradients from the user; elsewhere it ignores them."""
        text = (
            "_set_sparse_metadata() would have no effect: the engine finds the indices of sparse gradients itself. "
            "Remove the call."
        )
        raise NotImplementedError(tagged(Code.SPARSE_METADATA, text))

    def _check_comm_hook(self, hook: Any) -> None:
        try:
            super()._check_comm_hook(hook)
        except KeyError:
            parameters = ", ".join(inspect.signature(hook).parameters)
            text = f"a comm hook takes (state, bucket), by these names, but this one takes ({parameters})"
            raise KeyError(tagged(Code.BAD_ARGUMENT, text)) from None

    def _check_default_group(self) -> None:
        try:
            super()._check_default_group()
        except RuntimeError as error:
            text = f"{error} The attribute `process_group` cannot be copied or saved: copy or save `.module` instead."
            raise RuntimeError(tagged(Code.DEFAULT_GROUP_ONLY, text)) from None
