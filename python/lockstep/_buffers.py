"""Buffers on their way from one rank to all, and the devices of a module."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lockstep import _C
from lockstep._codes import Code, tagged

#: Host buffers with at least so many elements are compared first, and sent only where some rank has changed them.
WORTH_COMPARING = 65_536


class Buffers:
    """Mixed into the wrapper class: torch calls ``_distributed_broadcast_coalesced`` to synchronise buffers."""

    def _distributed_broadcast_coalesced(
        self, tensors: list[torch.Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        if not self._worth_comparing(tensors):
            self._copy(tensors, buffer_size, authoritative_rank)
            return
        sums = [_C.checksum(tensor) for tensor in tensors]
        changed = self._changed_anywhere(sums)
        copies = self._copy([tensors[i] for i in changed], buffer_size, authoritative_rank)
        for i, tensor in zip(changed, copies, strict=True):
            sums[i] = _C.checksum(tensor)
        self._buffer_sums = sums

    def _copy(self, tensors: list[torch.Tensor], buffer_size: int, root: int) -> list[torch.Tensor]:
        """Give the module the values of rank ``root``. Returns the tensors that hold them."""
        if not tensors:
            return []
        if not self.reducer.expects_backward():
            self.reducer.copy_from(tensors, buffer_size, root)
            return tensors
        # Autograd may have saved the old values: they stay, and the module gets other tensors.
        fresh = [tensor.clone() for tensor in tensors]
        self.reducer.copy_from(fresh, buffer_size, root)
        self._rebind(tensors, fresh)
        return fresh

    def _worth_comparing(self, tensors: list[torch.Tensor]) -> bool:
        return (
            all(tensor.device.type == "cpu" for tensor in tensors)
            and sum(tensor.numel() for tensor in tensors) >= WORTH_COMPARING
        )

    def _changed_anywhere(self, sums: list[int]) -> list[int]:
        """Indices of what some rank has changed since all ranks had the same. Collective."""
        last = self.__dict__.get("_buffer_sums", [])
        known = len(last) == len(sums)
        changed = torch.tensor([not known or value != last[i] for i, value in enumerate(sums)], dtype=torch.uint8)
        self.reducer.max(changed)
        return changed.nonzero().flatten().tolist()

    def _rebind(self, old: list[torch.Tensor], new: list[torch.Tensor]) -> None:
        """Replace the buffers ``old`` by ``new`` wherever the module has them and the values differ."""
        successor = {
            id(before): after
            for before, after in zip(old, new, strict=True)
            if before.device.type != "cpu" or not torch.equal(before, after)
        }
        if not successor:
            return
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) in successor:
                    module._buffers[name] = successor[id(buffer)]


def check_devices(module: torch.nn.Module, device_ids: list[Any] | None, output_device: Any) -> None:
    """Find the mistakes about devices that torch has one sentence for, or none.

    Raises:
        ValueError: ``device_ids`` for a module that is (partly) on the CPU; the text names parameters.
    """
    if device_ids and len(device_ids) == 1:
        on_host = [name for name, parameter in module.named_parameters() if parameter.device.type == "cpu"]
        if on_host:
            names = ", ".join(on_host[:5])
            text = (
                "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU "
                f"modules, but got device_ids {device_ids}, and these parameters are on the cpu: {names}. "
                "Move the module to its GPU before wrapping it, or leave device_ids out."
            )
            raise ValueError(tagged(Code.WRONG_DEVICES, text))
    elif output_device is not None:
        text = f"output_device={output_device!r} has no effect without device_ids: outputs stay where forward made them"
        warnings.warn(tagged(Code.WRONG_DEVICES, text), stacklevel=3)
