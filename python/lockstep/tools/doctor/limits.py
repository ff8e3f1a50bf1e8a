"""Shared memory and limits of this process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from lockstep.tools.doctor.finding import Finding, Status

_MIB = 1024**2
#: Docker gives a container 64 MiB unless told otherwise; a loader's workers and NCCL need more.
_ENOUGH_SHM = 1024 * _MIB
_ENOUGH_FILES = 4096


def check() -> Iterator[Finding]:
    """Whether loaders' workers and many connections find room."""
    yield shared_memory()
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    detail = "" if soft == resource.RLIM_INFINITY else "InfiniBand needs it unlimited (ulimit -l); nothing else does."
    yield Finding("limits", "locked memory", Status.INFO, _size(soft), detail)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("limits", "CPU cores", Status.INFO, str(cores), "Shared by all ranks and their loaders' workers.")


def shared_memory(path: str = "/dev/shm") -> Finding:
    """Size of the shared memory."""
    try:
        room = os.statvfs(path)
    except OSError as error:
        return Finding("limits", path, Status.UNCHECKED, str(error.strerror))
    size, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    value = f"{_size(size)}, {_size(free)} free"
    if free < _ENOUGH_SHM:
        detail = (
            "Data loaders with workers and NCCL put data there and die with 'bus error' or 'No space left on device'. "
            "Start the container with --shm-size=8g or --ipc=host."
        )
        return Finding("limits", path, Status.WARNING, value, detail)
    return Finding("limits", path, Status.OK, value)


def open_files(limit: int) -> Finding:
    """How many files and sockets one process may hold."""
    value = _count(limit)
    if limit != resource.RLIM_INFINITY and limit < _ENOUGH_FILES:
        detail = "Each rank holds sockets to others, each worker files: 'Too many open files'. ulimit -n 65536."
        return Finding("limits", "open files", Status.WARNING, value, detail)
    return Finding("limits", "open files", Status.OK, value)


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _size(size: int) -> str:
    return "unlimited" if size == resource.RLIM_INFINITY else f"{size / _MIB:,.0f} MiB"
