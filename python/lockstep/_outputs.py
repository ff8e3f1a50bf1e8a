"""Finds the tensors in whatever a forward returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._pytree import tree_leaves

from lockstep._codes import Code, tagged

#: Classes that the user has explained, with what finds their tensors.
_flatteners: dict[type, Callable[[Any], Iterable[Any]]] = {}

#: Nothing of the kind is searched: they hold no outputs, and some would lead through the whole program.
_MOST_OBJECTS = 100_000  # searched in one output
_LEAVES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    bool,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    torch.nn.Module,
)
_RRef = torch.distributed.rpc.RRef if torch.distributed.rpc.is_available() else ()


def register_output_type(cls: type, flatten: Callable[[Any], Iterable[Any]]) -> None:
    """Tell the wrapper how to find the tensors in a class that ``forward`` returns.

    Needed only for classes that hide their tensors: lists, tuples, mappings, dataclasses, registered pytree nodes and
    the attributes of any object are searched anyway.

    Args:
        cls: the class; subclasses are covered too.
        flatten: called with an instance; returns its tensors, or objects that hold them.

    Raises:
        TypeError: ``cls`` is no class, or ``flatten`` cannot be called.
    """
    if not isinstance(cls, type) or not callable(flatten):
        text = f"register_output_type takes a class and a function, but got {cls!r} and {flatten!r}"
        raise TypeError(tagged(Code.BAD_ARGUMENT, text))
    _flatteners[cls] = flatten


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in ``output``, with or without a graph."""
    return [output] if isinstance(output, torch.Tensor) else list(_search(output, set()))


def _search(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if value is None or isinstance(value, _LEAVES) or id(value) in seen or len(seen) > _MOST_OBJECTS:
        return
    seen.add(id(value))
    for part in _parts(value):
        yield from _search(part, seen)


def _parts(value: Any) -> Iterable[Any]:
    for cls in type(value).__mro__:
        if cls in _flatteners:
            return list(_flatteners[cls](value))
    if isinstance(value, _RRef):
        return list(_find_tensors(value))
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves
    slots = [name for cls in type(value).__mro__ for name in _slots_of(cls)]
    attributes = getattr(value, "__dict__", {})
    return [*attributes.values(), *(getattr(value, name) for name in slots if hasattr(value, name))]


def _slots_of(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return [name for name in ([slots] if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")]
