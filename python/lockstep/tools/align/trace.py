"""Runs a recipe as one rank and records, step by step, what two runs can be compared by."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lockstep.checkpoint._save_load import unwrapped
from lockstep.data import OrderPreservingSampler, seed_everything, seed_rank_streams
from lockstep.tools.align.probe import Probe, probe
from lockstep.tools.align.recipe import Recipe, RecipeError, build


@dataclasses.dataclass
class StepRecord:
    """One optimizer step of one rank."""

    step: int
    micro_batches: list[list[int]]  # the indices of the samples
    contents: dict[int, str]  # index -> hash of the sample as the dataset gave it
    loss: float  # mean over the micro-batches, weighted by samples
    settings: dict[str, Any]  # of the optimizer, before the step
    accumulate: int
    num_workers: int
    start: str  # hash of the weights before the step
    end: str  # and after it
    buffers: dict[str, str]  # name -> hash, when the last forward began
    gradient: Tensor | None  # flat, float32; None on ranks above 0
    weights: Tensor | None  # the same, after the step
    probe: Probe | None = None  # with the first step of a run in one process

    @property
    def samples(self) -> int:
        return sum(map(len, self.micro_batches))


def trace(
    make: Callable[..., Any], rank: int, world_size: int, steps: int, seed: int = 0, device: str = "cpu"
) -> Iterator[StepRecord]:
    """Train for ``steps`` optimizer steps; yield a record after each. With ``world_size`` 1 nothing is wrapped.

    Raises:
        RecipeError: the recipe is not one, or its data end before a single step.
    """
    generator = seed_everything(seed)
    recipe = build(make, rank, world_size)
    module = recipe.model.to(device).train()
    model = recipe.wrap(module) if world_size > 1 else module
    seed_rank_streams(seed)
    buffers: dict[str, str] = {}
    unwrapped(model).register_forward_pre_hook(lambda inner, _: buffers.update(_hashes(inner)))
    steps_of_data = _grouped(_forever(recipe, rank, world_size, generator), recipe.accumulate)
    found = None
    for step in range(steps):
        group = next(steps_of_data)
        if step == 0 and world_size == 1:
            found = probe(module, recipe.loss, moved(group[0][2], device), len(group[0][0]))
        yield _one_step(recipe, model, group, step, device, rank, buffers, found)
        found = None


def _one_step(
    recipe: Recipe,
    model: nn.Module,
    group: list[tuple[list[int], list[str], Any]],
    step: int,
    device: str,
    rank: int,
    buffers: dict[str, str],
    found: Probe | None,
) -> StepRecord:
    parameters = [parameter for parameter in unwrapped(model).parameters() if parameter.requires_grad]
    start, settings = _hash(_flat(parameters)), _settings(recipe.optimizer)
    recipe.optimizer.zero_grad()
    weighted = 0.0
    for number, (indices, _, batch) in enumerate(group, start=1):
        alone = number < len(group) and hasattr(model, "no_sync")
        with model.no_sync() if alone else contextlib.nullcontext():
            loss = recipe.loss(model, moved(batch, device))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise RecipeError(f"the recipe's loss must return one number as a tensor, not {type(loss).__name__}.")
            (loss / recipe.accumulate if recipe.divide_loss else loss).backward()
        weighted += loss.item() * len(indices)
    gradient = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]) if rank == 0 else None
    recipe.optimizer.step()
    if recipe.scheduler is not None:
        recipe.scheduler.step()
    weights = _flat(parameters)
    return StepRecord(
        step=step,
        micro_batches=[indices for indices, _, _ in group],
        contents={index: mark for indices, marks, _ in group for index, mark in zip(indices, marks, strict=True)},
        loss=weighted / max(1, sum(len(indices) for indices, _, _ in group)),
        settings=settings,
        accumulate=recipe.accumulate,
        num_workers=recipe.num_workers,
        start=start,
        end=_hash(weights),
        buffers=dict(buffers),
        gradient=gradient,
        weights=weights if rank == 0 else None,
        probe=found,
    )


class _Marked:
    """A dataset whose samples carry a hash of what they are, made where they are made."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[str, Any]:
        sample = self.dataset[index]
        digest = hashlib.blake2b(digest_size=8)
        _digest(sample, digest)
        return digest.hexdigest(), sample


@dataclasses.dataclass
class _Collate:
    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[tuple[str, Any]]) -> tuple[list[str], Any]:
        return [mark for mark, _ in items], self.collate([sample for _, sample in items])


class _Noted:
    """A batch sampler that remembers, in order, which indices it gave out; the loader hands batches back in order."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.given = batches, []

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            self.given.append([int(index) for index in batch])
            yield self.given[-1]


def _forever(
    recipe: Recipe, rank: int, world_size: int, generator: torch.Generator
) -> Iterator[tuple[list[int], list[str], Any]]:
    """This rank's micro-batches, epoch after epoch: (indices, hashes of the samples, batch)."""
    batches = recipe.batches
    if batches is None:
        micro = recipe.batch_size // recipe.accumulate
        options = {"shuffle": recipe.shuffle, "seed": recipe.seed, "drop_last": True}
        try:
            batches = OrderPreservingSampler(recipe.dataset, micro, rank=rank, world_size=world_size, **options)
        except ValueError as error:
            raise RecipeError(f"the recipe's batch_size does not fit: {error}") from error
    epoch = 0
    while True:
        for thing in (batches, getattr(batches, "sampler", None), recipe.dataset):
            if hasattr(thing, "set_epoch"):
                thing.set_epoch(epoch)
        noted = _Noted(batches)
        loader = DataLoader(
            _Marked(recipe.dataset),
            batch_sampler=noted,
            num_workers=recipe.num_workers,
            collate_fn=_Collate(recipe.collate_fn),
            generator=generator,
        )
        number = -1
        for number, (marks, batch) in enumerate(loader):
            yield noted.given[number], marks, batch
        if number < 0:
            raise RecipeError(f"[rank {rank}] the recipe's data hold no batch: fewer samples than batch_size?")
        epoch += 1


def _grouped(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while True:
        yield [next(items) for _ in range(size)]


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Name and hyperparameters, such as {"type": "SGD", "group 0 lr": 0.1}."""
    found: dict[str, Any] = {"type": type(optimizer).__name__}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                found[f"group {number} {name}"] = value.item() if isinstance(value, Tensor) else value
    return found


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).to("cpu", torch.float32) for tensor in tensors])


def _hash(tensor: Tensor) -> str:
    digest = hashlib.blake2b(digest_size=8)
    _digest(tensor, digest)
    return digest.hexdigest()


def _hashes(module: nn.Module) -> dict[str, str]:
    return {name: _hash(buffer) for name, buffer in module.named_buffers()}


def _digest(value: Any, digest: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(str((value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in value:
            digest.update(repr(key).encode())
            _digest(value[key], digest)
    elif isinstance(value, list | tuple):
        for item in value:
            _digest(item, digest)
    elif hasattr(value, "tobytes"):  # NumPy's arrays and numbers, PIL's images
        digest.update(value.tobytes())
    else:
        digest.update(pickle.dumps(value))


def moved(value: Any, device: str) -> Any:
    """The tensors in ``value`` on ``device``. Those in pinned memory may still be on their way when this returns."""
    return each_tensor(value, lambda tensor: tensor.to(device, non_blocking=not tensor.is_cuda and tensor.is_pinned()))


def each_tensor(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of containers as ``value``, with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: each_tensor(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [each_tensor(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
