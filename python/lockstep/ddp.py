"""The stand-in for ``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

from lockstep import _C, _codes, _communicators, _compat
from lockstep._arguments import check_arguments
from lockstep._buffers import Buffers, check_devices
from lockstep._build_check import build_info
from lockstep._codes import Code, tagged
from lockstep._extras import Extras
from lockstep._hooks import CommHooks
from lockstep._logger import make_logger
from lockstep._measuring import Measuring
from lockstep._mixed_precision import MixedPrecision, check_config
from lockstep._outputs import tensors_in
from lockstep._reducer import Reducer


class DistributedDataParallel(Extras, Measuring, CommHooks, Buffers, MixedPrecision, TorchDDP):
    """Keep one copy of ``module`` on each rank and average the gradients while backward runs.

    Takes the arguments of torch's class, of every supported version, and means the same by them. It is a subclass, so
    whatever asks ``isinstance(model, torch.nn.parallel.DistributedDataParallel)`` is content; the engine underneath
    is Lockstep's. Construction is collective: ranks must pass the same model and arguments.

    Args:
        strict: warnings about gradients that stayed on one rank are errors (RuntimeError).
        check_sync_every: compare parameters and buffers over ranks before every so many reduced forwards; 0: never.
        stall_threshold: in seconds. A rank that waits for the others longer than this prints who is missing. A GPU
            that waits longer for one that has died or failed has its collectives aborted, of the group too, and the
            next forward raises. 0: no monitor. None: the environment variable LOCKSTEP_STALL_THRESHOLD, else 30.
        uneven_forwards: ranks may run different numbers of forwards between two reductions.
        guards: ranks agree in each step, by one small all-reduce that nobody waits for, on what they are about to
            reduce; without it ranks in different modes hang or mix gradients, as with torch. Equal on all ranks.
        communicator: what carries the collectives. "auto": connections of our own for gloo, so that they cannot meet
            collectives of yours in the same group; the group for NCCL. "group": the process group. "nccl": an NCCL
            communicator of our own, called without c10d in between (CUDA only); ``lockstep.Nccl`` gives it settings.
        allow_passthrough: a module without trainable parameters is wrapped too, and simply forwarded.

    Raises:
        RuntimeError: on every rank, when ranks wrap different models (the message names the first difference), or when
            no parameter requires a gradient.
        ValueError: an argument makes no sense, such as a ``bucket_cap_mb`` that is not positive.

    Example:
        >>> model = lockstep.DistributedDataParallel(net)
        >>> model(inputs).sum().backward()      # .grad: mean over ranks
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: list[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, torch.nn.Parameter]] | None = None,
        param_to_hook_all_reduce: torch.nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        *,
        strict: bool = False,
        check_sync_every: int = 0,
        stall_threshold: float | None = None,
        uneven_forwards: bool = False,
        guards: bool = True,
        communicator: _communicators.Communicator = "auto",
        allow_passthrough: bool = False,
    ) -> None:
        check_arguments(
            module,
            device_ids,
            process_group,
            bucket_cap_mb,
            delay_all_reduce_named_params,
            param_to_hook_all_reduce,
            device_mesh,
            bucket_cap_mb_list,
        )
        check_config(mixed_precision, module)
        if self._passes_through(module, allow_passthrough):
            return
        check_devices(module, device_ids, output_device)
        self._guards = guards
        self._set_watch_options(strict, check_sync_every, stall_threshold, uneven_forwards, communicator)
        # Torch would check and copy the model with its own collectives; `_ddp_init_helper` does it with ours.
        self._init_sync_due = init_sync
        self._init_sync_buffers = broadcast_buffers is not False
        # The engine packs a whole bucket at a time in any case.
        self.batched_grad_copy = batched_grad_copy
        self.lazy_bucket_allocation = lazy_bucket_allocation
        super().__init__(
            module,
            device_ids=device_ids,
            output_device=output_device,
            dim=dim,
            init_sync=False,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            **_compat.buffer_keywords(broadcast_buffers, forward_sync_buffers),
        )
        self._start_mixed_precision(mixed_precision)

    # ---- construction: torch calls these, and gets our engine ----

    def _ddp_init_helper(
        self,
        parameters: list[torch.nn.Parameter],
        expect_sparse_gradient: list[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        self._check_device()
        dynamic = self.find_unused_parameters and not static_graph
        first_limits, limits = _compat.bucket_limits(self, static_graph)
        if self.bucket_bytes_cap_default and self.device_type == "cuda" and not self.bucket_bytes_cap_list:
            limits = _C.chosen_limits(sum(parameter.nbytes for parameter in parameters))
            first_limits = limits if dynamic else first_limits
        self._engine_hook: str | None = None
        self._linked_state = None
        self.reducer = Reducer(
            params=parameters,
            names=[param_to_name_mapping[i].removeprefix(".") for i in range(len(parameters))],
            expect_sparse_gradients=expect_sparse_gradient,
            process_group=self.process_group,
            graph=_C.GraphKind.DYNAMIC if dynamic else _C.GraphKind.COMPLETE,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            first_limits=first_limits,
            limits=limits,
            lazy_buckets=self.lazy_bucket_allocation,
            skip_unused_buckets=self.skip_all_reduce_unused_params,
            strict=self._strict,
            uneven_forwards=self._uneven_forwards,
            guards=self._guards,
            stall_threshold_ms=round(1000 * self._stall_threshold),
            communicator=_communicators.kind_of(self._communicator),
            nccl=_communicators.options_of(self._communicator),
        )
        self.reducer.set_warning_observer(_codes.warn)
        if self._use_python_reducer:
            self.reducer._remove_autograd_hooks()  # torch registers hooks in Python instead
        if self.__dict__.pop("_init_sync_due", False):
            self.reducer.verify_same_model()
            self.reducer.isolate()
            self.reducer.copy_from(self._initial_state(), self.broadcast_bucket_size, 0)
            self._compare_initial_buffers()
        elif _communicators.kind_of(self._communicator) == "nccl":
            self.reducer.isolate()
        self._start_watch(parameters)
        self.logger = make_logger(self, static_graph)
        self._passing_sync_batchnorm_handle(self.module)

    def _check_device(self) -> None:
        served = {"cpu"} | ({"cuda"} if build_info()["cuda"] else set())
        if self.device_type not in served:
            self._log_and_throw(
                RuntimeError,
                tagged(
                    Code.DEVICE,
                    f"[rank {self.process_group.rank()}] the module's parameters are on '{self.device_type}', but this "
                    f"build of lockstep serves {', '.join(sorted(served))} only. Move the module there before wrapping "
                    "it, or use torch's own class.",
                ),
            )

    def _build_params_for_reducer(self) -> tuple[list[torch.nn.Parameter], list[bool]]:
        # Torch's loops call a parameter of the root module ".name" and would not find it in the list of ignored names.
        self.parameters_to_ignore |= {f".{name}" for name in self.parameters_to_ignore if "." not in name}
        return super()._build_params_for_reducer()

    def _initial_state(self) -> list[torch.Tensor]:
        """Parameters, frozen ones too, and buffers: what rank 0 hands to the others at construction."""
        named = list(self.module.named_parameters())
        if self._init_sync_buffers:
            named += self.module.named_buffers()
        return [tensor.detach() for name, tensor in named if name not in self.parameters_to_ignore]

    # ---- one step ----

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and not self._use_python_reducer:
            self._check_before_forward()
        return super()._pre_forward(*inputs, **kwargs)

    def _post_forward(self, output: Any) -> Any:
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            return super()._post_forward(output)
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        reduces = torch.is_grad_enabled() and self.require_backward_grad_sync
        if reduces:
            # Outputs go out as they are: the engine watches them instead of passing them through a node of its own.
            tensors = tensors_in(output)
            if not tensors and output is not None and (self.find_unused_parameters or self.static_graph):
                self._refuse_output(output)
            self.reducer.prepare_for_backward([tensor for tensor in tensors if tensor.requires_grad])
        elif torch.is_grad_enabled():
            self.reducer.expect_local_backward()
        if torch.is_grad_enabled():  # an evaluation, perhaps on one rank alone, changes nothing for the next forward
            self.require_forward_param_sync = reduces
            self._watch_for_recomputation(output)
        self._clear_grad_buffer()
        return output

    def will_sync_module_buffers(self) -> bool:
        # Under no_grad in eval mode forward changes no buffer, and one rank may evaluate alone.
        return bool(super().will_sync_module_buffers()) and (torch.is_grad_enabled() or self.training)

    def _delayed_all_reduce_hook(self, grad: torch.Tensor) -> torch.Tensor:
        # As torch's, but it respects no_sync and somebody waits for the result.
        if self.require_backward_grad_sync:
            self._delay_grad_buffer.div_(dist.get_world_size(self.process_group))
            work = dist.all_reduce(self._delay_grad_buffer, group=self.process_group, async_op=True)
            torch.autograd.Variable._execution_engine.queue_callback(work.wait)
        return grad

    # Manual finalization came with torch 2.15; here it works on every version.

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether the end of backward leaves publishing the mean gradients to ``finalize_backward``."""
        return self.__dict__.get("_manual_finalization", False)

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self._check_manual_finalization()
        self.reducer._set_manual_finalization_required(bool(required))
        self.__dict__["_manual_finalization"] = required

    @property
    def should_finalize_after_backward(self) -> bool:
        """Whether finalizing right after this backward pays, because the bucket plan is still to be made from it."""
        return bool(self.require_manual_backward_finalization) and self.reducer._should_finalize_after_backward()

    def finalize_backward(self) -> None:
        """Wait for the reductions of the last synchronised backward and hand the means to the gradients.

        Raises:
            RuntimeError: finalization is automatic, there is nothing to finalize, or gradients are still missing.
        """
        self._check_manual_finalization()
        self.reducer._finalize_backward_manual()

    def _check_manual_finalization(self) -> None:
        if self._use_python_reducer:
            raise RuntimeError(
                tagged(
                    Code.NO_MANUAL_FINALIZATION,
                    "Manual backward finalization is not supported with the Python reducer.",
                )
            )
        if self._delay_all_reduce_all_params:
            raise RuntimeError(
                tagged(
                    Code.NO_MANUAL_FINALIZATION,
                    "Manual backward finalization is not supported when all DDP parameters use delayed all-reduce.",
                )
            )

    @contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        # torch.compile asks torch's own class which model is running.
        outer = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = self
        try:
            with self._in_low_precision():
                yield
        finally:
            TorchDDP._active_ddp_module = outer

    # ---- ranks that run out of data (`join`) ----

    def _match_all_reduce_for_bwd_pass(self) -> None:
        self.reducer.shadow_step()

    def _match_unused_params_allreduce(self) -> None:
        """Part of ``shadow_step``."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        manual = state.pop("_manual_finalization", False)
        state.pop("_init_sync_due", None)
        state.pop("_reduced_hooks", None)  # called by the reducer of the original
        super().__setstate__(state)
        self._reduce_in_low_precision()
        if manual:
            self.require_manual_backward_finalization = manual

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                tagged(
                    Code.SAMPLE_RATE,
                    f"DDP runtime logging sample rate should be equal or greater than 1, but is {sample_rate}",
                ),
            )
        self.logger.set_sample_rate(sample_rate)
