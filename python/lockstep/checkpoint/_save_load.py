"""``save`` and ``load``."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from lockstep._codes import Code, tagged
from lockstep.checkpoint import _file, _streams
from lockstep.checkpoint._errors import CheckpointError
from lockstep.checkpoint._exchange import Exchange


class Stateful(Protocol):
    """Anything with a state to keep."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


def save(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    sampler: Stateful | None = None,
    extra: Any = None,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    **others: Stateful,
) -> None:
    """Replace the checkpoint at ``path``, so that ``load`` continues the run bit for bit.

    Call it on every rank, after an optimizer step. Rank 0 writes; when it returns, the file is on the disk. A crash at
    any moment leaves the previous checkpoint or this one. Kept are the states of what is given, of the model's comm
    hooks if they have a ``state_dict``, and each rank's random streams (Python, NumPy, torch, current GPU). Names carry
    no ``module.`` prefix: data-parallel and compiled wrappers are taken off, so any program can load the model.

    Args:
        model: wrapped or not.
        sampler: whose position counts, such as ``OrderPreservingSampler``; equal on all ranks.
        extra: anything else that is equal on all ranks: tensors, numbers, text, and containers of those.
        timeout: in seconds, how long the other ranks wait for rank 0 to write.
        others: more objects with ``state_dict`` and ``load_state_dict``, equal on all ranks, by a name of your choice.

    Raises:
        WriterFailedError: on the other ranks, when rank 0 failed, died or was too slow.
        CheckpointError: a state cannot be taken on some rank, or holds something that could not be read back.

    Example:
        >>> lockstep.checkpoint.save("run.pt", model=model, optimizer=optimizer, sampler=sampler, extra={"step": step})
    """
    target = Path(path)
    exchange = Exchange(group, timeout)
    parts = exchange.gather(_own_part(model, exchange.rank))
    named = _given(optimizer, scheduler, scaler, sampler, others)

    def write() -> None:
        for rank, part in enumerate(parts):
            if isinstance(part, str):
                raise CheckpointError(f"[rank {rank}] its state could not be taken: {part}.")
        states = {name: thing.state_dict() for name, thing in named.items()}
        _file.write(
            target,
            {
                "format": _file.FORMAT,
                "version": _file.VERSION,
                "world_size": exchange.world_size,
                "model": unwrapped(model).state_dict(),
                "states": states,
                "extra": extra,
                "ranks": parts,
            },
        )

    exchange.on_rank_0(f"write {target}", write)


def load(
    path: str | os.PathLike[str],
    *,
    model: torch.nn.Module,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    sampler: Stateful | None = None,
    per_rank: bool = True,
    group: dist.ProcessGroup | None = None,
    timeout: float = 600.0,
    **others: Stateful,
) -> Any:
    """Continue from the checkpoint at ``path``; return the ``extra`` that was saved.

    Call it on every rank, with everything built as for the run that saved. Only rank 0 reads the file, so the ranks
    need no common disk. What is not asked for is not touched. On one or two ranks the run goes on bit for bit; on more,
    to rounding, because a sum of three numbers depends on the order, and buckets may be laid out anew. In mid-epoch,
    iterate with ``sampler.track(loader)``: a loader draws from torch's random stream whenever a pass over it begins.

    Args:
        per_rank: restore random streams and hook states, too. They belong to a rank each, so with another number of
            ranks pass False; everything else, the sampler's position included, fits any number.
        timeout: in seconds, how long the other ranks wait for rank 0 to read.

    Raises:
        WriterFailedError: on the other ranks, when rank 0 could not read the file.
        CheckpointError: no such file, or it is damaged, lacks what is asked for, or holds another model: nothing has
            been changed then. Or a state does not fit its object, which is found out while loading it.
    """
    source = Path(path)
    exchange = Exchange(group, timeout)
    named = _given(optimizer, scheduler, scaler, sampler, others)
    content = exchange.on_rank_0(f"read {source}", lambda: _file.read(source))
    parts = content.pop("ranks") if content else None
    content = exchange.broadcast(content)
    _check_fit(source, content, unwrapped(model), named, exchange.world_size if per_rank else None)
    pairs = [("model", unwrapped(model), content["model"])]
    pairs += [(name, thing, content["states"][name]) for name, thing in named.items()]
    if per_rank:
        part, hooks = exchange.scatter(parts), _hook_states(model)
        if len(hooks) != len(part["hooks"]):
            text = f"{source} holds {len(part['hooks'])} states of comm hooks, but the model has {len(hooks)}."
            raise CheckpointError(f"{text} Register the same hooks before loading, or pass per_rank=False.")
        pairs += [("a comm hook", hook, state) for hook, state in zip(hooks, part["hooks"], strict=True)]
    for name, thing, state in pairs:
        try:
            thing.load_state_dict(state)
        except Exception as error:
            text = f"the state of {name} in {source} does not fit: {type(error).__name__}: {error}."
            raise CheckpointError(text) from error
    if per_rank:
        _streams.restore(part["streams"])  # last: what comes before may draw
    return content["extra"]


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside data-parallel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(model, TorchDDP):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):  # torch.compile's wrapper
            model = model._orig_mod
        else:
            return model


def _given(
    optimizer: Any, scheduler: Any, scaler: Any, sampler: Any, others: dict[str, Stateful]
) -> dict[str, Stateful]:
    named = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler} | others
    return {name: thing for name, thing in named.items() if thing is not None}


def _own_part(model: torch.nn.Module, rank: int) -> dict[str, Any] | str:
    """What belongs to this rank alone; a text if it cannot be had, because the other ranks must learn of it."""
    try:
        states = [state.state_dict() for state in _hook_states(model, warn_of_others=rank == 0)]
        return {"streams": _streams.state(), "hooks": states}
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _hook_states(model: torch.nn.Module, warn_of_others: bool = False) -> list[Stateful]:
    found = []
    for hook, state in getattr(model, "_comm_hooks", []):
        if hasattr(state, "state_dict") and hasattr(state, "load_state_dict"):
            found.append(state)
        elif warn_of_others and not (state is None or isinstance(state, dist.ProcessGroup)):
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            text = f"the state of comm hook '{name}', a {type(state).__name__}, has no state_dict and load_state_dict. "
            text += "It is not in the checkpoint, so that a resumed run begins with a new one."
            warnings.warn(tagged(Code.CHECKPOINT, text), stacklevel=4)
    return found


def _check_fit(
    source: Path, content: dict[str, Any], module: torch.nn.Module, named: dict[str, Stateful], ranks: int | None
) -> None:
    if absent := sorted(named.keys() - content["states"].keys()):
        held = ", ".join(sorted(content["states"])) or "only the model"
        raise CheckpointError(f"{source} holds no state of {', '.join(absent)}; it holds {held}.")
    if ranks is not None and ranks != content["world_size"]:
        raise CheckpointError(
            f"{source} was written by {content['world_size']} ranks, but now there are {ranks}, so that random streams "
            "and hook states have no owner. Pass per_rank=False to go on without them."
        )
    ours = {name: tuple(value.shape) for name, value in module.state_dict().items() if torch.is_tensor(value)}
    theirs = {name: tuple(value.shape) for name, value in content["model"].items() if torch.is_tensor(value)}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "absent"), ours.get(name, "absent")
            raise CheckpointError(f"{source} holds another model: '{name}' is {there} there and {here} here.")
