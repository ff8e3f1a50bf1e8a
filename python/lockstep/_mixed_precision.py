"""Torch's experimental native mixed precision: forward and backward compute with low-precision copies of parameters.

Torch swaps the storage of every parameter for forward and backward, and upcasts parameters and gradients in a hook, on
streams of an accelerator. Here a parameter stays what it is. While forward runs, its place in the module is taken by a
differentiable cast of it, so that its gradient arrives in its own dtype and by the usual way: accumulation is exact,
every mode of the engine works as it does without, and so does a CPU. The casts run on the current stream; nothing is
left to be ordered by hand. What travels between ranks has ``reduce_dtype``.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lockstep._codes import Code, tagged
from lockstep._outputs import tensors_in

_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


def check_config(config: Any, module: nn.Module) -> None:
    """Refuse what cannot be meant, before anything has been changed or sent.

    Raises:
        AttributeError: ``config`` lacks a field of torch's ``_MixedPrecision``.
        TypeError: a field is neither None nor a dtype.
        RuntimeError: a field is a dtype of integers or complex numbers.
        NotImplementedError: a submodule is compiled by TorchScript, whose parameters cannot be replaced.
    """
    if config is None:
        return
    lacking = [field for field in _FIELDS if not hasattr(config, field)]
    if lacking:
        text = (
            f"mixed_precision is a torch.nn.parallel.distributed._MixedPrecision(param_dtype, reduce_dtype, "
            f"buffer_dtype), but {config!r} has no {', '.join(lacking)}"
        )
        raise AttributeError(tagged(Code.MIXED_PRECISION, text))
    for field in _FIELDS:
        dtype = getattr(config, field)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            text = f"mixed_precision.{field} is a torch.dtype or None, but is {dtype!r}"
            raise TypeError(tagged(Code.MIXED_PRECISION, text))
        if dtype is not None and not dtype.is_floating_point:
            text = f"mixed_precision.{field} must be a floating point dtype, such as torch.float16, but is {dtype}"
            raise RuntimeError(tagged(Code.MIXED_PRECISION, text))
    scripted = [name for name, submodule in module.named_modules() if isinstance(submodule, torch.jit.ScriptModule)]
    if scripted:
        text = (
            f"mixed_precision cannot replace the parameters of '{scripted[0]}', which TorchScript has compiled. Use "
            "torch.autocast around forward."
        )
        raise NotImplementedError(tagged(Code.MIXED_PRECISION, text))


class MixedPrecision:
    """Mixed into the wrapper class. Without a config it does nothing."""

    def _start_mixed_precision(self, config: Any) -> None:
        """Cast the buffers for good, prepare the casts of parameters and take the place of the comm hook."""
        self.mixed_precision = config
        if config is None:
            return
        if self._use_python_reducer or self._delay_all_reduce_all_params:
            mode = "the Python reducer" if self._use_python_reducer else "delayed all-reduce of all parameters"
            text = f"mixed_precision does not work together with {mode}. Use torch.autocast around forward."
            raise NotImplementedError(tagged(Code.MIXED_PRECISION, text))
        for buffer in self.module.buffers():
            if _is_cast(buffer) and config.buffer_dtype is not None:
                buffer.data = buffer.to(config.buffer_dtype)
        self.__dict__["_low_precision"] = LowPrecision(self.module, config.param_dtype)
        self._reduce_in_low_precision()

    def _reduce_in_low_precision(self) -> None:
        config = self.__dict__.get("mixed_precision")
        if config is None:
            return
        dtype = config.reduce_dtype or config.param_dtype
        if dtype is None:
            return
        name = f"mixed_precision({dtype})"  # ranks compare it
        self.reducer.set_python_hook((weakref.ref(self), dtype), reduce_in, name)
        self._note_hook(name)

    @contextmanager
    def _in_low_precision(self) -> Iterator[None]:
        """For forward."""
        low = self.__dict__.get("_low_precision")
        if low is None:
            yield
            return
        with low.forward():
            yield

    def _watch_for_recomputation(self, output: Any) -> None:
        """After forward."""
        low = self.__dict__.get("_low_precision")
        if low is not None:
            low.watch(tensors_in(output))


class _Place(NamedTuple):
    """Where a module looks for a parameter, or an RNN for its list of them."""

    holder: MutableMapping[str, Any]
    key: str
    original: Any
    low: Any


class LowPrecision:
    """Puts low-precision copies in the place of the parameters of ``module``, for a while."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        self._module = module
        self._dtype = dtype
        self._last: list[_Place] = []  # of the forward that has just ended
        self._recomputing: list[_Place] = []  # of a backward that is running, or has thrown
        for parameter in module.parameters():
            if _is_cast(parameter):
                # Torch's names. The low-precision one tells dtype and shape; its values live only during a step.
                parameter._fp_param = parameter.data
                parameter._mp_param = torch.empty_like(parameter, dtype=dtype, device="meta", requires_grad=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": self._module, "_dtype": self._dtype, "_last": [], "_recomputing": []}

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Inside, every module finds its parameters cast."""
        if self._dtype is None:
            yield
            return
        outer, self._recomputing = self._recomputing, []
        _take_out(outer)
        places = self._cast()
        _put_in(places)
        try:
            yield
            self._last = places if torch.is_grad_enabled() else []
        finally:
            _take_out(places)
            if outer and torch._C._current_graph_task_id() >= 0:  # this forward is a part of a backward
                self._recomputing = outer
                _put_in(outer)

    def watch(self, outputs: list[torch.Tensor]) -> None:
        """Put the copies of the last forward in place again while a backward from ``outputs`` runs.

        Activation checkpointing runs parts of the module again then, and must find what forward has found.
        """
        places, self._last = self._last, []

        def begin(*_: Any) -> None:
            self._recomputing = places
            _put_in(places)
            torch.autograd.Variable._execution_engine.queue_callback(end)

        def end() -> None:
            self._recomputing = []
            _take_out(places)

        for tensor in outputs if places else []:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(begin)

    def _cast(self) -> list[_Place]:
        low: dict[int, torch.Tensor] = {}  # one cast of a parameter that has several places
        places: list[_Place] = []
        for module in self._module.modules():
            for key, parameter in module._parameters.items():
                if parameter is None or not _is_cast(parameter):
                    continue
                if id(parameter) not in low:
                    low[id(parameter)] = parameter.to(self._dtype)
                places.append(_Place(module._parameters, key, parameter, low[id(parameter)]))
        for module in self._module.modules():
            flat = module.__dict__.get("_flat_weights")  # RNNs read this list
            if isinstance(flat, list):
                places.append(_Place(module.__dict__, "_flat_weights", flat, [low.get(id(p), p) for p in flat]))
        return places


def _put_in(places: list[_Place]) -> None:
    for place in places:
        place.holder[place.key] = place.low


def _take_out(places: list[_Place]) -> None:
    for place in places:
        place.holder[place.key] = place.original


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not getattr(tensor, "_ddp_ignored", False)


def reduce_in(
    state: tuple[weakref.ref, torch.dtype], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A comm hook: the mean, summed in the given dtype where the bucket holds dense floating point numbers.

    Args:
        state: the wrapper, whose process group may be exchanged, and the dtype.
    """
    wrapper, dtype = state
    group = wrapper().process_group
    gradients = bucket.buffer()
    convertible = gradients.is_floating_point() and not gradients.is_sparse
    # Divided before it is summed, so that the sum stays in range where the mean does.
    summand = (gradients.to(dtype) if convertible else gradients).div_(group.size())

    def reduced(future: torch.futures.Future) -> torch.Tensor:
        mean = future.value()[0]
        return gradients.copy_(mean) if convertible and mean.dtype != gradients.dtype else mean

    return dist.all_reduce(summand, group=group, async_op=True).get_future().then(reduced)
