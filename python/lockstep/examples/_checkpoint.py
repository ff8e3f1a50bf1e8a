"""Checkpoints of the example: written whole or not at all, read by rank 0 for all ranks."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_KEYS = {"epoch", "settings", "model", "optimizer"}


class CheckpointError(Exception):
    """A checkpoint cannot be continued: absent, unreadable, or of a different run."""


def save(
    path: Path, epoch: int, settings: Mapping[str, Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Replace ``path`` by the state after ``epoch`` finished epochs. Call it on one rank only.

    A crash at any moment leaves the old file or the new one, never half of one: the bytes go to a temporary file
    in the same folder, reach the disk, and only then take the name. Pass the module that is *inside* the data-parallel
    wrapper, so that the names carry no ``module.`` prefix and any program can load them.
    """
    content = {
        "epoch": epoch,
        "settings": dict(settings),
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name is an entry of the folder and needs its own trip to the disk
    finally:
        os.close(folder)


def restore(
    path: Path, settings: Mapping[str, Any], epochs: int, module: nn.Module, optimizer: torch.optim.Optimizer
) -> int:
    """Load ``path`` into module and optimizer on every rank; return how many epochs it has behind it.

    Collective: all ranks call it. Only rank 0 reads the file (it alone wrote it), so no shared file system is needed,
    and a file that cannot be used is the same error everywhere instead of one rank that stops and others that wait.

    A resumed run repeats the uninterrupted one bit for bit on one or two ranks, and to rounding on more: an engine may
    lay out its first buckets in another order than its later ones, and a sum of three numbers depends on the order.

    Raises:
        CheckpointError: on every rank, if the file is absent or unreadable, or if its settings or its model's shapes
            differ from this run's, or if it is past ``epochs``.
    """
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer[0] = _read(path, settings, epochs, module)
        except CheckpointError as error:
            answer[0] = error
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], CheckpointError):
        raise answer[0]
    module.load_state_dict(answer[0]["model"])
    optimizer.load_state_dict(answer[0]["optimizer"])
    return answer[0]["epoch"]


def _read(path: Path, settings: Mapping[str, Any], epochs: int, module: nn.Module) -> dict[str, Any]:
    """Return the content of ``path``; raise CheckpointError unless this run can continue it."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist. Start without --resume to create it.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {reason}") from error
    if not isinstance(content, dict) or not content.keys() >= _KEYS:
        raise CheckpointError(f"{path} is not a checkpoint of this program: it lacks some of {sorted(_KEYS)}.")

    for name, ours in settings.items():
        theirs = content["settings"].get(name)
        if theirs != ours:
            raise CheckpointError(
                f"{path} was written with {name} {theirs}, but this run has {name} {ours}. A resumed run continues "
                "the same run: give the same options, or start anew without --resume."
            )
    if content["epoch"] > epochs:
        raise CheckpointError(f"{path} has {content['epoch']} epochs behind it, but --epochs is {epochs}.")
    ours_by_name = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    theirs_by_name = {name: tuple(tensor.shape) for name, tensor in content["model"].items()}
    for name in sorted(ours_by_name.keys() | theirs_by_name.keys()):
        theirs, ours = theirs_by_name.get(name, "absent"), ours_by_name.get(name, "absent")
        if theirs != ours:
            raise CheckpointError(f"{path} holds another model: '{name}' is {theirs} there and {ours} here.")
    return content
