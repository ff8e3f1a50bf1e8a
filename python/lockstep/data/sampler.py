"""Shares the batches of one process out over the ranks, so that together they see the same samples in each step."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch.utils.data import Sampler

from lockstep._codes import Code, tagged
from lockstep._ranks import rank_and_world

Item = TypeVar("Item")

#: What must be equal for a position to mean the same. The number of ranks is not among them: a position is a step.
_IDENTITY = ("length", "batch_size", "shuffle", "seed", "drop_last")


class OrderPreservingSampler(Sampler[list[int]]):
    """The batches that one process would see, cut into one part a rank: a ``batch_sampler`` for ``DataLoader``.

    One process takes a global batch of ``batch_size`` samples a step. Here rank r takes the r-th part of each, and the
    parts, put together by rank, are that batch, in its order. Where the batch cannot be divided, the first ranks take
    one sample more: then weigh the loss with ``loss_scale``, for a mean over ranks of means is not the mean.

    The order depends on ``seed`` and the epoch only: the one that torch's ``DistributedSampler`` has for one process.
    ``torch.utils.data.DistributedSampler`` itself repeats or drops samples where ranks do not divide the data.

    Args:
        data: the dataset, or its length in samples.
        batch_size: samples of one step, over all ranks together. With accumulation: of one micro-step.
        shuffle: draw a new order in each epoch; else 0, 1, 2, ...
        seed: of the order; the same on every rank.
        drop_last: leave out the batch at the end of an epoch that is smaller than ``batch_size``.
        rank, world_size: default: of the process group, else of torchrun's environment, else one process.
        empty: a step with fewer samples than ranks leaves some without any. "error" refuses that at construction,
            "yield" gives those ranks an empty list, which the loader's ``collate_fn`` must be able to take.

    Raises:
        ValueError: an argument makes no sense, or a step would leave a rank without samples and ``empty`` is "error".

    Example:
        >>> sampler = OrderPreservingSampler(range(10), batch_size=4, shuffle=False, rank=1, world_size=2)
        >>> list(sampler)
        [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        empty: Literal["error", "yield"] = "error",
    ) -> None:
        own_rank, own_world = rank_and_world()
        self.length = _whole("the number of samples", data if isinstance(data, int) else len(data), minimum=0)
        self.batch_size = _whole("batch_size", batch_size, minimum=1)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        self.seed = _whole("seed", seed, minimum=0)
        self.world_size = _whole("world_size", own_world if world_size is None else world_size, minimum=1)
        self.rank = _whole("rank", own_rank if rank is None else rank, minimum=0)
        if self.rank >= self.world_size:
            _refuse(f"rank is {self.rank}, but ranks go from 0 to {self.world_size - 1}: world_size is {world_size}")
        if empty not in ("error", "yield"):
            _refuse(f"empty must be 'error' or 'yield', but is {empty!r}")
        self.epoch = 0
        self._resume_at = 0
        self._first_step = 0  # where the youngest iterator began
        self._handed_out = 0  # steps of this epoch, by the youngest iterator
        self._consumed: int | None = None  # steps that `track` gave to the training loop; None: nobody tracks
        self._warned = False
        self._finished_epoch: int | None = None
        if empty == "error":
            self._refuse_empty_parts()

    def _refuse_empty_parts(self) -> None:
        tail = self.length % self.batch_size
        sizes = ([self.batch_size] if self.length >= self.batch_size else []) + (
            [tail] if tail and not self.drop_last else []
        )
        if sizes and min(sizes) < self.world_size:
            where = "every step" if min(sizes) == self.batch_size else "the last step of an epoch"
            _refuse(
                f"{where} has {min(sizes)} samples for {self.world_size} ranks, so that ranks {min(sizes)} and up "
                "would get none and could not take part in the step. Take a larger batch_size, drop_last=True, or "
                "fewer ranks; or pass empty='yield' and a collate_fn that makes a batch of no samples"
            )

    def __len__(self) -> int:
        """Steps of a whole epoch: equal on all ranks."""
        whole, tail = divmod(self.length, self.batch_size)
        return whole + (tail > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """The parts of this rank, from the position that ``load_state_dict`` set, else from the start of the epoch."""
        self._first_step = self._handed_out = self._resume_at
        self._consumed = None
        return _Steps(self, self.order(), self._resume_at)

    def _begin_pass(self) -> None:
        """Called for the first step and not in ``__iter__``: a loader with workers makes two iterators and uses one."""
        if self.shuffle and self._finished_epoch == self.epoch and not self._resume_at and not self._warned:
            self._warned = True
            text = f"epoch {self.epoch} begins a second time, so its samples come in the same order again. Call "
            warnings.warn(tagged(Code.REPEATED_EPOCH, text + "set_epoch(epoch) before each epoch."), stacklevel=4)
        self._resume_at = 0

    def order(self) -> list[int]:
        """All indices of this epoch, in the order in which one process would see them."""
        if not self.shuffle:
            return list(range(self.length))
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.length, generator=generator).tolist()

    def shares(self, step: int) -> list[int]:
        """How many samples each rank gets in ``step`` (from 0) of an epoch."""
        if not 0 <= step < len(self):
            _refuse(f"step must be from 0 to {len(self) - 1}, but is {step}")
        size = min(self.batch_size, self.length - step * self.batch_size)
        return [_part(size, rank, self.world_size)[1] for rank in range(self.world_size)]

    def loss_scale(self, step: int | None = None) -> float:
        """What this rank multiplies its mean loss with, so that the mean over ranks is the mean over samples.

        1.0 wherever all ranks have equally many samples.

        Args:
            step: default: that of the batch handed out last. Right only with ``track``, or with a loader without
                workers: others fetch batches before the loop asks for them.
        """
        shares = self.shares(self.position - 1 if step is None else step)
        return self.world_size * shares[self.rank] / sum(shares)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the coming pass. A position from ``load_state_dict`` stays if it is of the same epoch."""
        epoch = _whole("epoch", epoch, minimum=0)
        if epoch != self.epoch:
            self.epoch = epoch
            self._resume_at = self._handed_out = 0
            self._consumed = None

    @property
    def position(self) -> int:
        """Steps of this epoch that are behind: counted when a batch is handed out."""
        return self._handed_out if self._consumed is None else self._consumed

    def track(self, loader: Iterable[Item]) -> Iterator[Item]:
        """Iterate over ``loader``, which uses this sampler, and count what the training loop has really received.

        A loader with workers asks the sampler for batches ahead of the loop. Without this, a position saved in
        mid-epoch would skip those. (torchdata's ``StatefulDataLoader`` keeps its own count and does not need it.)
        """
        stream = torch.get_rng_state()
        iterator = iter(loader)  # takes the position that load_state_dict set
        if self._first_step > 0:
            # A pass draws the seed of its workers from torch's stream; the interrupted one had done so at its start.
            torch.set_rng_state(stream)
        consumed = self._consumed = self._first_step
        for batch in iterator:
            consumed += 1
            self._consumed = consumed
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Epoch, position (in steps) and what they belong to; the same on every rank, valid for any number of ranks."""
        return {name: getattr(self, name) for name in _IDENTITY} | {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on where ``state`` was taken. An epoch that was complete yields nothing more.

        Raises:
            ValueError: ``state`` is of a sampler with other data, batch size, order or seed, or not of a sampler.
        """
        missing = [name for name in (*_IDENTITY, "epoch", "position") if name not in state]
        if missing:
            raise ValueError(tagged(Code.SAMPLER_STATE, f"the state of the sampler lacks {', '.join(missing)}."))
        for name in _IDENTITY:
            if state[name] != getattr(self, name):
                text = f"the state is of a sampler with {name} {state[name]}, but this one has {getattr(self, name)}"
                hint = "A run that goes on needs the same data, batch size over all ranks, order and seed."
                raise ValueError(tagged(Code.SAMPLER_STATE, f"{text}. {hint}"))
        if not 0 <= state["position"] <= len(self):
            text = f"position {state['position']} lies outside an epoch of {len(self)} steps."
            raise ValueError(tagged(Code.SAMPLER_STATE, text))
        self.epoch = state["epoch"]
        self._resume_at = self._handed_out = state["position"]
        self._consumed = None


class _Steps(Iterator[list[int]]):
    """One pass over an epoch. Has a state of its own because torchdata's loader restores iterators."""

    def __init__(self, sampler: OrderPreservingSampler, order: list[int], start: int) -> None:
        self._sampler, self._order = sampler, order
        self._step, self._steps = start, len(sampler)
        self._begun = False

    def __next__(self) -> list[int]:
        sampler = self._sampler
        if not self._begun:
            self._begun = True
            sampler._begin_pass()
        if self._step >= self._steps:
            sampler._finished_epoch = sampler.epoch
            raise StopIteration
        first = self._step * sampler.batch_size
        size = min(sampler.batch_size, sampler.length - first)
        offset, count = _part(size, sampler.rank, sampler.world_size)
        self._step += 1
        sampler._handed_out = self._step
        return self._order[first + offset : first + offset + count]

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._step = self._sampler._first_step = self._sampler._handed_out = state["step"]


def _part(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Where the part of ``rank`` begins in a batch of ``size`` samples, and how many it has."""
    each, more = divmod(size, world_size)
    return rank * each + min(rank, more), each + (rank < more)


def _whole(name: str, value: Any, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        _refuse(f"{name} must be a whole number, but is {value!r}")
    if number < minimum:
        _refuse(f"{name} must be at least {minimum}, but is {number}")
    return number


def _refuse(text: str) -> NoReturn:
    raise ValueError(tagged(Code.BAD_SAMPLER, f"OrderPreservingSampler: {text}."))
