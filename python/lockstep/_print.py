"""Printing and logging on rank 0 only, without making the host wait for the device."""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lockstep._ranks import rank_and_world


class DeferredLines:
    """Lines whose tensors are still on their way from a device. They come out complete, and in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[list[Any], list[Any], Callable[[list[Any]], None]]] = deque()
        self._lock = threading.RLock()

    def add(self, values: list[Any], emit: Callable[[list[Any]], None]) -> None:
        """Start copying the tensors among ``values`` to the host, and hand all to ``emit`` once they are there."""
        copies, events = [], []
        for value in values:
            copy, event = start_copy(value) if isinstance(value, Tensor) else (value, None)
            copies.append(copy)
            if event is not None:
                events.append(event)
        with self._lock:
            self._waiting.append((events, copies, emit))
        self.poll()

    def poll(self) -> None:
        """Emit the lines, oldest first, whose tensors have arrived; wait for nothing."""
        with self._lock:
            while self._waiting and all(event.query() for event in self._waiting[0][0]):
                _, values, emit = self._waiting.popleft()
                emit(values)

    def flush(self) -> None:
        """Wait for the device, and emit every line."""
        with self._lock:
            for events, _, _ in self._waiting:
                for event in events:
                    event.synchronize()
            self.poll()


def start_copy(tensor: Tensor) -> tuple[Tensor, Any]:
    """A copy of ``tensor`` on the host, and an event that says when it is complete; None: it is."""
    tensor = tensor.detach()
    if tensor.device.type != "cuda":
        return tensor.clone(), None
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    with torch.cuda.device(tensor.device):
        host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return host, event


_lines = DeferredLines()


def print0(*values: object, sep: str = " ", end: str = "\n", file: Any = None) -> None:
    """``print`` on rank 0; nothing on other ranks.

    Tensors on a GPU are copied while training goes on: the line appears at the first ``print0`` or ``log0`` after they
    have arrived, at ``flush0``, or when the program ends, in the order of the calls and with the values that the
    tensors had. A tensor of one element prints as a number.
    """
    if rank_and_world()[0] != 0:
        return
    target = sys.stdout if file is None else file
    _lines.add(list(values), lambda ready: print(*map(_shown, ready), sep=sep, end=end, file=target))


def log0(logger: logging.Logger, level: int, message: str, *values: object) -> None:
    """``logger.log(level, message, *values)`` on rank 0; nothing on other ranks. Tensors as with ``print0``.

    Example:
        >>> log0(logger, logging.INFO, "step %d: loss %.4f", step, loss)   # loss: a tensor on the GPU
    """
    if rank_and_world()[0] != 0 or not logger.isEnabledFor(level):
        return
    _lines.add(list(values), lambda ready: logger.log(level, message, *map(_shown, ready)))


def flush0() -> None:
    """Wait for the device and put out every line that ``print0`` and ``log0`` still hold."""
    _lines.flush()


atexit.register(flush0)


def _shown(value: object) -> object:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
