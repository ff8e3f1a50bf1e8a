"""What carries the collectives of a wrapped model."""

from __future__ import annotations

import dataclasses
from typing import Literal

from lockstep import _C
from lockstep._codes import Code, tagged

KINDS = ("auto", "group", "nccl")
_MOST_MB = 2.0**40  # larger than any gradient; infinity fits no integer


@dataclasses.dataclass(frozen=True)
class Nccl:
    """``communicator=lockstep.Nccl(max_ctas=8)`` is ``communicator="nccl"`` with settings of NCCL, equal on all ranks.

    Args:
        max_ctas: thread blocks that a collective takes at most, and compute lacks meanwhile; 0: NCCL decides.
        net_name: network plugin or transport, such as "Socket" or "IB"; empty: NCCL decides.
        split_share: keeps the communicator that joining took, whose connections are then shared.
        in_place_mb: gradients of so many MiB and more are averaged where they lie, and need no bucket memory. None:
            0.25 where all ranks are on one host (and NCCL_P2P_DISABLE is not 1), else 16: each tensor then pays for the
            way through the network.

    Raises:
        ValueError: ``max_ctas`` is negative or no integer, ``net_name`` no text, or ``in_place_mb`` negative or no
            number.
    """

    max_ctas: int = 0
    net_name: str = ""
    split_share: bool = False
    in_place_mb: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.max_ctas, int) or isinstance(self.max_ctas, bool) or self.max_ctas < 0:
            text = f"Nccl: max_ctas is a number of thread blocks, 0 for NCCL's choice, but is {self.max_ctas!r}"
            raise ValueError(tagged(Code.BAD_OPTION, text))
        if not isinstance(self.net_name, str):
            text = (
                f"Nccl: net_name is a word such as 'Socket' or 'IB', empty for NCCL's choice, but is {self.net_name!r}"
            )
            raise ValueError(tagged(Code.BAD_OPTION, text))
        size = self.in_place_mb
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | float) or not size >= 0):
            text = f"Nccl: in_place_mb is a size in MiB, or None for lockstep's choice, but is {size!r}"
            raise ValueError(tagged(Code.BAD_OPTION, text))


Communicator = Literal["auto", "group", "nccl"] | Nccl


def check(communicator: Communicator) -> None:
    """
    Raises:
        ValueError: it is none of these.
    """
    if not isinstance(communicator, Nccl) and communicator not in KINDS:
        text = f"communicator must be 'auto', 'group', 'nccl' or a lockstep.Nccl, but is {communicator!r}"
        raise ValueError(tagged(Code.BAD_OPTION, text))


def kind_of(communicator: Communicator) -> str:
    return "nccl" if isinstance(communicator, Nccl) else communicator


def options_of(communicator: Communicator) -> _C.NcclOptions:
    chosen = communicator if isinstance(communicator, Nccl) else Nccl()
    size = None if chosen.in_place_mb is None else int(min(chosen.in_place_mb, _MOST_MB) * 2**20)
    return _C.NcclOptions(
        max_ctas=chosen.max_ctas, net_name=chosen.net_name, split_share=chosen.split_share, in_place_bytes=size
    )
