"""One file that is replaced as a whole, and only ever holds what can be read without running foreign code."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint._errors import CheckpointError

FORMAT = "lockstep.checkpoint"
VERSION = 1

_PLAIN = (str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_UNREADABLE = (OSError, EOFError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile)


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace ``path``. A crash at any moment, of the program or the machine, leaves the old content or the new.

    The bytes go to a temporary file beside it, reach the disk, and only then take the name. The temporary file has
    always the same name, so that killed runs leave at most one behind.

    Raises:
        CheckpointError: ``content`` holds something that could not be read back.
        OSError: the file cannot be written.
    """
    _check(content, "")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is an entry of the folder and needs its own trip to the disk
    finally:
        os.close(folder)


def read(path: Path) -> dict[str, Any]:
    """The content of ``path``, tensors on the CPU.

    Raises:
        CheckpointError: there is no such file, or it is damaged, or not a checkpoint of this kind.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist, so there is nothing to continue.")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not compare checksums
        if damaged is not None:
            raise ValueError(f"the bytes of '{damaged}' in it have changed since [LS-144]")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by lockstep.checkpoint.save; torch.load may read it.")
    if content["version"] > VERSION:
        text = f"{path} has format {content['version']}, but this version of lockstep reads {VERSION} and older."
        raise CheckpointError(f"{text} Update lockstep.")
    return content


def _check(value: Any, place: str) -> None:
    """Refuse at once what ``torch.load(weights_only=True)`` would refuse when it is too late."""
    kind = type(value)
    if kind in _PLAIN or kind in _TENSORS:
        return
    if kind in (dict, OrderedDict):
        for key, item in value.items():
            _check(key, f"{place}, a key")
            _check(item, f"{place}[{key!r}]" if place else str(key))
    elif kind in (list, tuple, set):
        for number, item in enumerate(value):
            _check(item, f"{place}[{number}]")
    else:
        raise CheckpointError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which could not be read back: checkpoints hold "
            "tensors, numbers, text, and lists, tuples, sets and dicts of those. Convert it before."
        )
