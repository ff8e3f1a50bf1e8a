"""Versions: of Python, torch, CUDA, NCCL, and of this package."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from lockstep._build_check import build_info
from lockstep.tools.doctor.finding import Finding, Status


def check() -> Iterator[Finding]:
    """What is installed and what this package was built for. That torch fits was checked when lockstep was imported."""
    built = build_info()
    yield _info("Python", platform.python_version())
    yield _info("lockstep", f"{built['lockstep']} ({built['compiler']}, {built['build_type']})")
    yield Finding("versions", "torch", Status.OK, f"{torch.__version__} (lockstep was built for {built['torch']})")
    yield _cuda(torch.version.cuda, built["cuda"])
    yield _nccl(built["nccl"])


def _info(name: str, value: str) -> Finding:
    return Finding("versions", name, Status.INFO, value)


def _cuda(of_torch: str | None, of_build: str | None) -> Finding:
    value = f"torch: {of_torch or 'none'}, lockstep: {of_build or 'none'}"
    if of_torch and not of_build:
        detail = "lockstep was built without CUDA and serves CPU tensors only. Build it again where there is an nvcc."
        return Finding("versions", "CUDA runtime", Status.WARNING, value, detail)
    if of_torch and of_build and of_torch.split(".")[0] != of_build.split(".")[0]:
        detail = "Another major version of CUDA than torch's: build lockstep again."
        return Finding("versions", "CUDA runtime", Status.PROBLEM, value, detail)
    return Finding("versions", "CUDA runtime", Status.OK, value)


def _nccl(of_build: str | None) -> Finding:
    loaded = _loaded_nccl()
    value = f"loaded: {loaded or 'none'}, lockstep was built for: {of_build or 'none'}"
    if loaded and of_build and loaded.split(".")[:2] != of_build.split(".")[:2]:
        detail = "Another NCCL was loaded than lockstep was built for: look for an old one in LD_LIBRARY_PATH."
        return Finding("versions", "NCCL", Status.WARNING, value, detail)
    return Finding("versions", "NCCL", Status.OK if loaded else Status.INFO, value)


def _loaded_nccl() -> str | None:
    """The version of the NCCL library in this process; None: torch was built without it."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return None
