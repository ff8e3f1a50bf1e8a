"""The random streams of one rank."""

from __future__ import annotations

import importlib
import random
import sys
from typing import Any

import torch


def state() -> dict[str, Any]:
    """Where the global generators of Python, NumPy (if imported), torch's CPU and the current GPU stand."""
    numpy = sys.modules.get("numpy")
    name, keys, *rest = numpy.random.get_state() if numpy else (None, None)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.tensor(keys.astype("int64")), *rest) if numpy else None,
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None,
    }


def restore(saved: dict[str, Any]) -> None:
    """Let the generators go on from ``saved``."""
    random.setstate(saved["python"])
    torch.set_rng_state(saved["torch"])
    if saved["numpy"] is not None:
        numpy = importlib.import_module("numpy")
        name, keys, *rest = saved["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if saved["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
