#!/usr/bin/env python3
"""Checks the shape of csrc: includes point down the layers only, device code stays in its place, files stay short.

Usage: scripts/check_layers.py [FOLDER]     FOLDER holds the layers; default: csrc beside this script.
Prints one line per violation (file:line: what) and exits with 1 if there is any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

# Layer -> what its files may include from csrc: a whole layer ("core/") or one file of it ("hooks/comm_hook.h").
# A layer may always include itself. Shared headers (compat.h) lie directly in csrc and include no layer.
MAY_INCLUDE: dict[str, tuple[str, ...]] = {
    "core": (),
    "kernels": (),
    "comm": ("core/",),
    "buckets": ("core/", "kernels/"),
    "hooks": ("core/", "buckets/", "comm/", "kernels/"),
    "reducer": ("core/", "buckets/", "comm/", "hooks/comm_hook.h"),
    "api": ("core/", "kernels/", "comm/", "buckets/", "hooks/", "reducer/"),
    "python": ("core/", "kernels/", "comm/", "buckets/", "hooks/", "reducer/", "api/"),
    "lockstep": ("core/", "kernels/", "comm/", "buckets/", "hooks/", "reducer/", "api/"),
    "examples": ("core/", "lockstep/"),
}
# core/error.h and core/ids.h are vocabulary (std and fmt only): the layers beside the core raise the same errors.
VOCABULARY = ("core/error.h", "core/ids.h")
SHARED = ("compat.h",)

# Headers from outside, by the start of their path, that a layer must never see.
TORCH = ("ATen/", "c10/", "torch/", "caffe2/")
PYTHON = ("pybind11/", "Python.h", "torch/extension.h", "torch/csrc/utils/pybind.h", "torch/python.h")
CUDA = ("cuda", "cub/", "thrust/", "nccl", "ATen/cuda/", "c10/cuda/")
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "core": (*TORCH, *PYTHON, *CUDA),
    "kernels": PYTHON,
    "comm": PYTHON,
    "buckets": (*PYTHON, *CUDA, "torch/csrc/autograd/", "torch/csrc/distributed/"),
    "hooks": (*PYTHON, *CUDA, "torch/csrc/autograd/"),
    "reducer": (*PYTHON, *CUDA),
    "api": (*PYTHON, *CUDA),
    "python": CUDA,
    "lockstep": (*PYTHON, *CUDA),
}
DEVICE_LAYERS = ("kernels", "comm")
DEVICE_CODE = re.compile(
    r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b.*\b\w*(?:CUDA|NCCL|NVCC)\w*|\bis_cuda\s*\(", re.IGNORECASE
)
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
MAX_LINES = 400
SUFFIXES = {".h", ".hpp", ".cuh", ".cpp", ".cu"}


def check_include(layer: str, kind: str, target: str, root: Path, file: Path) -> str | None:
    """Returns what is wrong with one include of a file in `layer`, or None."""
    owner = target.split("/", 1)[0] if "/" in target else ""
    if owner in MAY_INCLUDE and (kind == '"' or (root / target).exists()):
        allowed = (f"{layer}/", *MAY_INCLUDE[layer], *VOCABULARY)
        if not any(target == entry or (entry.endswith("/") and target.startswith(entry)) for entry in allowed):
            return f"{layer} must not include {target} (a layer may include what lies below it only)"
        return None
    if kind == '"' and target not in SHARED and ((file.parent / target).exists() or "../" in target):
        return f"write the include of {target} from csrc on, so that its layer can be seen"
    if any(target.startswith(start) for start in FORBIDDEN.get(layer, ())):
        return f"{layer} must not know {target}"
    return None


def check_file(root: Path, file: Path) -> Iterator[tuple[int, str]]:
    """Yields (line number, what is wrong) for one file."""
    parts = file.relative_to(root).parts
    layer = parts[0] if len(parts) > 1 else None
    lines = file.read_text(encoding="utf-8").splitlines()
    if len(lines) > MAX_LINES:
        yield len(lines), f"{len(lines)} lines; {MAX_LINES} is the ceiling: split the file by job"
    if layer is not None and layer not in MAY_INCLUDE:
        yield 1, f"unknown layer '{layer}': add it to MAY_INCLUDE in scripts/check_layers.py"
        return
    if file.name == "pch.h":  # a list for the build; no file may include it
        return

    in_block_comment = False
    for number, line in enumerate(lines, start=1):
        code, in_block_comment = strip_comments(line, in_block_comment)
        include = INCLUDE.match(code)
        if include and layer is not None:
            if problem := check_include(layer, *include.groups(), root, file):
                yield number, problem
        elif include and include.group(2).split("/")[0] in MAY_INCLUDE and include.group(1) == '"':
            yield number, f"a shared header must not include a layer: {include.group(2)}"
        if layer not in DEVICE_LAYERS and DEVICE_CODE.search(code):
            yield number, "code for one device belongs into kernels/ or comm/: the build picks files"


def strip_comments(line: str, in_block: bool) -> tuple[str, bool]:
    """Returns the line without comments, and whether a block comment goes on in the next line."""
    code = ""
    while line:
        if in_block:
            _, closed, line = line.partition("*/")
            in_block = not closed
            continue
        start = re.search(r"//|/\*", line)
        if start is None:
            return code + line, False
        code += line[: start.start()]
        if start.group() == "//":
            return code, False
        line, in_block = line[start.end() :], True
    return code, in_block


def main() -> int:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "csrc").resolve()
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    problems = [f"{file}:{line}: {what}" for file in files for line, what in check_file(root, file)]
    print("\n".join(problems or [f"layers: {len(files)} files in order"]))
    return 1 if problems or not files else 0


if __name__ == "__main__":
    sys.exit(main())
