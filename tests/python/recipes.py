"""Recipes for ``lockstep align``: right ones, and one for each fault, small enough to train in a second."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

import lockstep
from lockstep.tools.align import Recipe

CLASSES, FEATURES, SAMPLES, BATCH = 4, 16, 72, 12


class Shapes(Dataset):
    """Pictures of 4 x 4 pixels, as the handwritten digits' but smaller: a prototype of their class, and noise."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        prototypes = torch.randn(CLASSES, FEATURES, generator=generator)
        self.labels = torch.arange(SAMPLES) % CLASSES
        self.inputs = prototypes[self.labels] + 0.5 * torch.randn(SAMPLES, FEATURES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.labels[index]


class Augmented(Shapes):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn(FEATURES), label


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def recipe(*middle: nn.Module, lr: float = 0.1, dataset: Dataset | None = None, loss=mean_loss, **settings) -> Recipe:
    model = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), *middle, nn.Linear(12, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    return Recipe(model, dataset or Shapes(), loss, optimizer, **({"batch_size": BATCH} | settings))


def right() -> Recipe:
    return recipe()


def right_as_a_tuple(rank: int, world_size: int) -> tuple:
    made = recipe()
    return made.model, made.dataset, made.loss, made.optimizer, {"batch_size": BATCH, "accumulate": 2}


def right_augmentation() -> Recipe:
    return recipe(dataset=lockstep.data.SampleSeeded(Augmented(), base=0))


def right_unequal_samples(rank: int, world_size: int) -> Recipe:
    sampler = lockstep.data.OrderPreservingSampler(SAMPLES, 9, rank=rank, world_size=world_size)

    def loss(model: nn.Module, batch: Any) -> Tensor:  # nine samples on two ranks: five and four
        return mean_loss(model, batch) * len(batch[0]) * world_size / 9

    return recipe(batches=sampler, loss=loss)


def right_unequal_tokens(rank: int, world_size: int) -> Recipe:
    def loss(model: nn.Module, batch: Any) -> Tensor:  # class 0 is padding
        if world_size > 1:
            model.set_step_weight(int((batch[1] != 0).sum()))
        return cross_entropy(model(batch[0]), batch[1], ignore_index=0)

    return recipe(loss=loss)


def whole_batch_on_each_rank(rank: int, world_size: int) -> Recipe:
    """Insists on it, as is right with weak scaling only."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if len(batch[0]) != BATCH:
            raise ValueError(f"[rank {rank}] the batch has {len(batch[0])} samples, not {BATCH}")
        return mean_loss(model, batch)

    return recipe(loss=loss)


class Bytes(Dataset):
    """Windows of a text, each with the byte that follows every position."""

    text = torch.tensor(list(b"the ranks together see what one process sees, and keep in step. " * 3))

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index : index + 9]
        return window[:-1], window[1:]


class ByteModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1), device=tokens.device)
        return self.head(self.layer(self.embed(tokens), mask, is_causal=True))


def right_language_model() -> Recipe:
    return language_model(lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))


def language_model_with_adam() -> Recipe:
    return language_model(torch.optim.AdamW)


def language_model(optimizer_of) -> Recipe:
    model = ByteModel()
    optimizer = optimizer_of(model.parameters())
    return Recipe(model, Bytes(), lambda m, b: cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()), optimizer, BATCH)


# ---- one fault each ----


def _own_sampler(rank: int, world_size: int, per_rank: int, seed: int) -> BatchSampler:
    sampler = DistributedSampler(range(SAMPLES), num_replicas=world_size, rank=rank, seed=seed)
    return BatchSampler(sampler, per_rank, drop_last=True)


def global_batch(rank: int, world_size: int) -> Recipe:
    return recipe(batches=_own_sampler(rank, world_size, BATCH, seed=0))  # should be BATCH // world_size


def data_order(rank: int, world_size: int) -> Recipe:
    return recipe(batches=_own_sampler(rank, world_size, BATCH // world_size, seed=world_size))


def augmentation(rank: int, world_size: int) -> Recipe:
    return recipe(dataset=Augmented())


def worker_counts(rank: int, world_size: int) -> Recipe:
    return recipe(dataset=Augmented(), num_workers=1 if world_size == 1 else 0)


def loss_is_a_sum(rank: int, world_size: int) -> Recipe:
    return recipe(loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1], reduction="sum"), lr=0.01)


def unequal_samples(rank: int, world_size: int) -> Recipe:
    sampler = lockstep.data.OrderPreservingSampler(SAMPLES, 9, rank=rank, world_size=world_size)
    return recipe(batches=sampler)


def unequal_tokens(rank: int, world_size: int) -> Recipe:
    def loss(model: nn.Module, batch: Any) -> Tensor:  # class 0 is padding
        return cross_entropy(model(batch[0]), batch[1], ignore_index=0)

    return recipe(loss=loss)


def batch_statistics(rank: int, world_size: int) -> Recipe:
    return recipe(nn.BatchNorm1d(12))


def dropout(rank: int, world_size: int) -> Recipe:
    return recipe(nn.Dropout(0.2))


def accumulation(rank: int, world_size: int) -> Recipe:
    return recipe(accumulate=1 if world_size == 1 else 2, divide_loss=False)


def cross_sample_loss(rank: int, world_size: int) -> Recipe:
    def loss(model: nn.Module, batch: Any) -> Tensor:  # each sample must find its own noisy twin in the batch
        features = model(batch[0])
        return cross_entropy(features @ features.detach().T, torch.arange(len(features), device=features.device))

    return recipe(loss=loss, lr=0.01)


def optimizer_settings(rank: int, world_size: int) -> Recipe:
    return recipe(lr=0.1 * world_size)


class RunningScale(nn.Module):
    """Multiplies by a buffer that follows the inputs of this rank: nobody synchronises it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        result = inputs * self.scale.clone()
        self.scale.lerp_(inputs.detach().abs().mean() + 0.5, 0.5)
        return result


def buffers(rank: int, world_size: int) -> Recipe:
    def wrap(model: nn.Module) -> nn.Module:
        return lockstep.DistributedDataParallel(model, broadcast_buffers=False)

    return recipe(RunningScale(), wrap=wrap)


def initial_weights(rank: int, world_size: int) -> Recipe:
    torch.manual_seed(world_size)
    return recipe()


FAULTS = {
    "global batch": global_batch,
    "data order": data_order,
    "augmentation": augmentation,
    "loss is a sum": loss_is_a_sum,
    "unequal samples": unequal_samples,
    "unequal tokens": unequal_tokens,
    "batch statistics": batch_statistics,
    "dropout": dropout,
    "accumulation": accumulation,
    "cross-sample loss": cross_sample_loss,
    "optimizer settings": optimizer_settings,
    "buffers": buffers,
    "initial weights": initial_weights,
}
RIGHT = [right, right_as_a_tuple, right_augmentation, right_language_model]


# ---- what cannot be run ----


def fails_on_rank_1(rank: int, world_size: int) -> Recipe:
    if rank == 1:
        raise FileNotFoundError("no data on this disk")
    return recipe()


def fails_late_on_rank_1(rank: int, world_size: int) -> Recipe:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(batch)
        if rank == 1 and len(calls) == 3:
            raise MemoryError("no room for step 2")  # rank 0 is in the reduction by now, and fails in its turn
        return mean_loss(model, batch)

    return recipe(loss=loss)


def dies_on_rank_1(rank: int, world_size: int) -> Recipe:
    if rank == 1:
        os.kill(os.getpid(), 9)
    return recipe()


def wrong_thing() -> int:
    return 3


def no_length() -> Recipe:
    return recipe(dataset=iter(()))


def vector_loss() -> Recipe:
    return recipe(loss=lambda model, batch: mse_loss(model(batch[0]), torch.zeros(1), reduction="none"))
