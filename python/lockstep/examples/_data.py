"""The handwritten digits: a fixed split, and the batches of one rank."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Batch = tuple[Tensor, Tensor]
"""Images (n, 1, 8, 8) between 0 and 1, and labels (n,)."""

Item = TypeVar("Item")


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,437 images to train on and 360 to test on: the same split on every rank and in every run."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().div(16).unsqueeze(1)  # pixels are 0 to 16
    labels = torch.from_numpy(digits.target).long()
    train, test = train_test_split(range(len(labels)), test_size=360, random_state=0, stratify=labels)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def rank_batches(
    train_set: TensorDataset, args: argparse.Namespace, epoch: int, rank: int, world_size: int
) -> DataLoader[Batch]:
    """Return one rank's micro-batches of one epoch: on each rank equally many, and of equal sizes."""
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank, seed=args.seed)
    sampler.set_epoch(epoch)  # else every epoch repeats the order of the first
    return DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)


def in_groups(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield ``size`` items at a time; the last group may be shorter.

    Example:
        >>> list(in_groups("abcde", 2))
        [['a', 'b'], ['c', 'd'], ['e']]
    """
    iterator = iter(items)
    while group := list(itertools.islice(iterator, size)):
        yield group


def concatenate(parts: Iterable[Batch]) -> Batch:
    """Return one batch with the samples of all parts, in their order."""
    images, labels = zip(*parts, strict=True)
    return torch.cat(images), torch.cat(labels)
