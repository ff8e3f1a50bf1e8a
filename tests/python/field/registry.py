"""The list of cases: a number, a title, and a function that raises when the behaviour is not right."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from field.flaws import FLAWS


class NotOffered(Exception):
    """The engine has no interface for what the case asks for."""


@dataclass(frozen=True)
class Engine:
    """A class to wrap models with: torch's, ours, or ours with a flaw of that name."""

    name: str

    @property
    def ours(self) -> bool:
        return self.name != "torch"

    @property
    def cls(self) -> type:
        return {"torch": TorchDDP, "lockstep": lockstep.DistributedDataParallel, **FLAWS}[self.name]

    @property
    def signature(self) -> inspect.Signature:
        """Of the constructor."""
        return inspect.signature((lockstep.DistributedDataParallel if self.ours else TorchDDP).__init__)

    def wrap(self, module: torch.nn.Module, **options: Any) -> Any:
        return self.cls(module, **options)

    def where_offered(self, **options: Any) -> dict[str, Any]:
        """Those of ``options`` that the constructor knows."""
        known = self.signature.parameters
        return {name: value for name, value in options.items() if name in known}

    def require(self, *methods: str, **options: Any) -> dict[str, Any]:
        """``options``, all of which the constructor must know, as the class must have ``methods``.

        Raises:
            NotOffered: something is missing.
        """
        missing = [f"{name}()" for name in methods if not hasattr(self.cls, name)]
        missing += [f"{name}=" for name in options if name not in self.where_offered(**options)]
        if missing:
            raise NotOffered(f"{self.name} has no {', '.join(missing)}")
        return options


TORCH, LOCKSTEP = Engine("torch"), Engine("lockstep")
BROKEN = [Engine(name) for name in FLAWS]


@dataclass(frozen=True)
class Variant:
    """One way to run a case."""

    name: str
    arguments: dict[str, Any]
    ranks: int
    own_processes: bool  #: afterwards the group is of no use
    lost: tuple[int, ...]  #: ranks that die or hang on purpose


@dataclass
class Case:
    number: int
    title: str
    run: Callable[..., None]
    limit: float  #: seconds until the watchdog ends it
    variants: dict[str, Variant] = field(default_factory=dict)


CASES: dict[int, Case] = {}


def case(
    number: int,
    title: str,
    *,
    variants: dict[str, dict[str, Any]] | None = None,
    ranks: int = 2,
    own_processes: bool = False,
    lost: tuple[int, ...] = (),
    limit: float = 60,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register ``function(engine, **arguments)``, which runs on every rank.

    A variant is a dict of arguments, in which ``ranks``, ``own_processes`` and ``lost`` replace those of the case.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        listed = CASES.setdefault(number, Case(number, title, function, limit))
        assert listed.run is function, f"case {number} is registered twice"
        for name, given in (variants or {"": {}}).items():
            how = {"ranks": ranks, "own_processes": own_processes, "lost": lost}
            how |= {key: value for key, value in given.items() if key in how}
            if how["lost"] or how["ranks"] != 2:
                how["own_processes"] = True
            arguments = {key: value for key, value in given.items() if key not in how}
            listed.variants[name] = Variant(name, arguments, **how)
        return function

    return register


def all_variants() -> Iterator[tuple[Case, Variant]]:
    from field import scenarios  # noqa: F401  (registers every case)

    for number in sorted(CASES):
        for variant in CASES[number].variants.values():
            yield CASES[number], variant
