"""Every difference between the supported torch versions (2.11 and newer) on the Python side, in one place."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch.distributed as dist
from torch.nn.parallel.distributed import DistributedDataParallel as TorchDDP

_TORCH_KEYWORDS = frozenset(inspect.signature(TorchDDP.__init__).parameters)

#: 2.13 renamed ``broadcast_buffers`` and warns whenever the old name is used.
_KNOWS_FORWARD_SYNC = "forward_sync_buffers" in _TORCH_KEYWORDS


def buffer_keywords(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> dict[str, Any]:
    """The keywords for torch's constructor that say whether forward synchronises buffers.

    Given is only what the user gave, so that torch's deprecation warning appears exactly when the user's own call
    deserves it. None for both means yes on every version.
    """
    if _KNOWS_FORWARD_SYNC:
        given = {"broadcast_buffers": broadcast_buffers, "forward_sync_buffers": forward_sync_buffers}
        return {name: value for name, value in given.items() if value is not None}
    wanted = forward_sync_buffers if forward_sync_buffers is not None else broadcast_buffers
    return {"broadcast_buffers": wanted is None or wanted}


def bucket_limits(ddp: TorchDDP, static_graph: bool) -> tuple[list[int], list[int]]:
    """Limits in bytes for the first buckets and for those made from the order of gradients, by torch's rules."""
    if ddp.bucket_bytes_cap_list:
        return ddp.bucket_bytes_cap_list, ddp.bucket_bytes_cap_list
    first = dist._DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap
    limits = [first, ddp.bucket_bytes_cap]
    dynamic = ddp.find_unused_parameters and not static_graph
    return (limits if dynamic else [sys.maxsize]), limits
