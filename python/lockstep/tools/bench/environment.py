"""What a reader must know to compare two results."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
from typing import Any

import torch

from lockstep._version import __version__


def environment(device: str) -> dict[str, Any]:
    """Date, machine, versions, and the variables that change what NCCL does. ``device``: "cpu" or "cuda"."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": __version__,
    }
    if device == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(0),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _driver(),
            "variables": {key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")},
        }
    return found


def _driver() -> str | None:
    with contextlib.suppress(Exception):  # without nvidia-ml-py it is not known, and nothing else is lost
        import pynvml

        pynvml.nvmlInit()
        try:
            return str(pynvml.nvmlSystemGetDriverVersion())
        finally:
            pynvml.nvmlShutdown()
    return None
