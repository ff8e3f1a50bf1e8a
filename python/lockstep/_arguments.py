"""Checks of the constructor's arguments that torch does not make, or leaves to something deep inside.

Each raises what torch's class raises for the same input, where torch notices it at all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from lockstep._codes import Code, tagged


def check_arguments(
    module: Any,
    device_ids: Any,
    process_group: Any,
    bucket_cap_mb: Any,
    delayed: Any,
    trigger: Any,
    device_mesh: Any,
    bucket_cap_mb_list: Any,
) -> None:
    """Before anything has been changed or sent.

    Raises:
        AttributeError: ``module``, ``device_mesh`` or ``param_to_hook_all_reduce`` is something else.
        TypeError: another argument is of another kind, or this rank is not in ``process_group``.
        ValueError: the size of a bucket is not positive.
        OverflowError: the size of a bucket is infinite.
    """
    if not isinstance(module, torch.nn.Module):
        _refuse(AttributeError, f"module is a torch.nn.Module, but got {_kind(module)}")
    if device_ids is not None and not hasattr(device_ids, "__len__"):
        _refuse(TypeError, f"device_ids is a list with one device, or None, but got {device_ids!r}")
    if device_mesh is not None and not hasattr(device_mesh, "ndim"):
        _refuse(AttributeError, f"device_mesh is a torch.distributed.DeviceMesh, but got {device_mesh!r}")
    if process_group is not None:
        check_group(process_group)
    _check_cap("bucket_cap_mb", bucket_cap_mb)
    if bucket_cap_mb_list is not None and not hasattr(bucket_cap_mb_list, "__iter__"):
        _refuse(TypeError, f"bucket_cap_mb_list is a list of sizes in MiB, but got {bucket_cap_mb_list!r}")
    for cap in bucket_cap_mb_list or []:
        _check_cap("bucket_cap_mb_list", cap)
    if delayed is not None and trigger is not None:
        _check_delayed(delayed, trigger)


def check_group(process_group: Any) -> None:
    """Refuse what is no process group with this rank in it.

    Raises:
        TypeError: ``process_group`` is something else.
    """
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        _refuse(
            TypeError,
            "this rank is not in the process group (torch.distributed.new_group answers so where it is not). Wrap the "
            "module on the ranks of the group only.",
        )
    if not isinstance(process_group, dist.ProcessGroup):
        _refuse(TypeError, f"a process group is a torch.distributed.ProcessGroup, but got {process_group!r}")


def _check_cap(name: str, cap: Any) -> None:
    if cap is None:
        return
    try:
        size = float(cap)
    except (TypeError, ValueError) as error:
        _refuse(type(error), f"{name} is the size of a bucket in MiB, but is {cap!r}")
    if math.isinf(size):
        _refuse(OverflowError, f"{name} is the size of a bucket in MiB, but is {cap}. Give a large number instead")
    if not size > 0:
        text = f"{name} is the size of a bucket in MiB and must be positive, but is {cap}."
        raise ValueError(tagged(Code.BUCKET_CAP, text))


def _check_delayed(delayed: Any, trigger: Any) -> None:
    for entry in delayed:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2:
            _refuse(TypeError, f"delay_all_reduce_named_params is a list of (name, parameter), but has {entry!r}")
    if not isinstance(trigger, torch.Tensor):
        _refuse(AttributeError, f"param_to_hook_all_reduce is a parameter of the module, but got {trigger!r}")


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


def _refuse(kind: type[Exception], text: str) -> None:
    raise kind(tagged(Code.BAD_ARGUMENT, text))
