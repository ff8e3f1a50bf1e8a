"""The logger of a wrapper: torch's logging data about our engine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep import _C

_Wrapped = getattr(torch._C._distributed_c10d, "_ProcessGroupWrapper", None)


def make_logger(wrapper: Any, static_graph: bool) -> _C.Logger:
    """After the reducer of ``wrapper`` was built."""
    logger = _C.Logger(
        wrapper.reducer,
        _bare(wrapper.process_group),
        bucket_cap_bytes=wrapper.bucket_bytes_cap,
        find_unused_parameters=wrapper.find_unused_parameters,
        gradient_as_bucket_view=wrapper.gradient_as_bucket_view,
    )
    logger.set_construction_data_and_log(
        wrapper.module.__class__.__name__,
        wrapper.device_ids or [],
        -1 if wrapper.output_device is None else wrapper.output_device,
        bool(wrapper.broadcast_buffers),
        any(isinstance(submodule, torch.nn.SyncBatchNorm) for submodule in wrapper.module.modules()),
        static_graph,
    )
    return logger


def _bare(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """``group``, or one around what TORCH_DISTRIBUTED_DEBUG=DETAIL has put its wrapper around.

    Torch's logger takes that wrapper for gloo itself and reads memory that is not there. Nothing is sent through the
    group that it gets.
    """
    gloo = dist.ProcessGroup.BackendType.GLOO
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # this group does not serve the host
        return group
    if _Wrapped is None or not isinstance(backend, _Wrapped) or backend.wrapped_pg.name() != "gloo":
        return group
    bare = dist.ProcessGroup(dist.HashStore(), group.rank(), group.size())
    bare._set_default_backend(gloo)
    bare._register_backend(torch.device("cpu"), gloo, backend.wrapped_pg)
    return bare
