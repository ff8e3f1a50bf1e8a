"""Random numbers that depend on what they are for: the model, the rank, or the sample."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from lockstep._codes import Code, tagged
from lockstep._ranks import rank_and_world


def sample_seed(base: int, epoch: int, index: int) -> int:
    """A seed for one sample in one epoch: the same on every rank, in every worker, on every machine.

    Seeds of neighbours have nothing in common (they come from a hash, BLAKE2b), other than ``base + epoch + index``.

    Returns:
        An integer from 0 to 2**63 - 1; for NumPy's old generator take it modulo 2**32.

    Example:
        >>> generator = torch.Generator().manual_seed(sample_seed(0, epoch, index))
    """
    return _hash("sample", base, epoch, index)


def _hash(*parts: object) -> int:
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def sample_rng(base: int, epoch: int, index: int) -> Iterator[None]:
    """Inside, the global generators of Python, NumPy (if imported) and torch's CPU depend on the sample only.

    For augmentations that draw from the global generators, as torchvision's do. Afterwards they are as before.
    """
    numpy = sys.modules.get("numpy")
    before = random.getstate(), torch.get_rng_state(), numpy and numpy.random.get_state()
    _seed_host(sample_seed(base, epoch, index))
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        if numpy:
            numpy.random.set_state(before[2])


class SampleSeeded(Dataset):
    """``dataset`` whose random augmentation of a sample depends on base, epoch and index, not on rank or worker.

    Call ``set_epoch`` before each epoch, between passes over the loader; workers that persist see it, too. Other
    attributes are those of ``dataset``.

    Args:
        dataset: one with ``__getitem__`` and ``__len__``.
        base: the seed of the run; the same on every rank.
    """

    def __init__(self, dataset: Any, base: int) -> None:
        self.dataset, self.base = dataset, base
        # In shared memory: persistent workers hold a copy of this object made before the first epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Draw the random numbers of ``epoch`` from now on."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with sample_rng(self.base, int(self._epoch), int(index)):
            return self.dataset[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # pickle asks before there is a dataset
            return object.__getattribute__(self, name)
        return getattr(self.dataset, name)


def worker_init(worker_id: int) -> None:
    """A ``worker_init_fn`` for ``DataLoader``: no two workers of any two ranks share a random stream.

    Torch seeds workers by their number, so with equal seeds on all ranks worker 0 augments alike on each of them. This
    seeds Python, NumPy and torch by seed, rank and worker. Augmentation that must not depend on rank and worker at all
    comes from ``SampleSeeded``, ``sample_rng`` or ``sample_seed``, which this leaves alone.
    """
    info = get_worker_info()
    base = torch.initial_seed() - worker_id if info is None else info.seed - info.id
    rank, _ = rank_and_world()
    _seed_host(_hash("worker", base, rank, worker_id))


def seed_everything(seed: int) -> torch.Generator:
    """Seed the model equally on all ranks and the data by rank. Call it first, on every rank with the same ``seed``.

    Torch's global generators (CPU and all GPUs) are equal on all ranks afterwards, so that models begin equal. Python's
    and NumPy's global generators, which augmentations use, differ by rank. Once the model is built, call
    ``seed_rank_streams(seed)``: from then on dropout masks differ by rank, as those of one large batch do.

    Returns:
        A generator that differs by rank, for ``DataLoader(generator=...)``.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2**32 - 1.
    """
    _check_seed(seed)
    rank, _ = rank_and_world()
    _seed_host(_hash("data", seed, rank))
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(_hash("loader", seed, rank))


def seed_rank_streams(seed: int) -> None:
    """Make torch's global generators differ by rank, for dropout. Call it after the model is built."""
    _check_seed(seed)
    torch.manual_seed(_hash("dropout", seed, rank_and_world()[0]))


def _check_seed(seed: int) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        text = f"seed must be a whole number from 0 to 2**32 - 1, but is {seed!r}."
        raise ValueError(tagged(Code.BAD_ARGUMENT, text))


def _seed_host(seed: int) -> None:
    """Seed the global generators of Python, torch's CPU and NumPy, if the program has imported it."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)
