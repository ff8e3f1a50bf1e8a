"""A recipe as one rank that trains so many steps at a time, as it is told, and times them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

import lockstep
from lockstep._measuring import Measuring
from lockstep.data import OrderPreservingSampler, seed_everything, seed_rank_streams
from lockstep.tools.align.recipe import Recipe, RecipeError, build
from lockstep.tools.align.trace import each_tensor, moved

#: Passes are taken from the engine after so many steps, before it drops the oldest.
_TAKE_AFTER = 32


@dataclasses.dataclass(frozen=True)
class Buckets:
    """What one rank's engine did with its buckets, on average over passes. Seconds and bytes."""

    count: int
    median_bytes: float
    total_bytes: int
    sending: float  # packing and handing over, in backward
    bandwidth: float  # GB/s by the convention of nccl-tests; 0: unknown


class Trainer:
    """Builds a recipe for one rank. ``wrap``: instead of the recipe's; with one rank nothing is wrapped.

    Raises:
        RecipeError: the recipe is not one, or its data do not fill a batch.
    """

    def __init__(
        self, make: Callable[..., Any], rank: int, world_size: int, device: str, batch_factor: int = 1
    ) -> None:
        self._generator = seed_everything(0)
        self.recipe: Recipe = build(make, rank, world_size)
        self.rank, self.world_size, self.device = rank, world_size, device
        self._batch_size = self.recipe.batch_size * batch_factor
        self._module = self.recipe.model.to(device).train()
        self.model: nn.Module = self._module
        self._timer: lockstep.StepTimer | None = None
        self._batches: Iterator[Any] | None = None
        self._own_data = self._endless()
        seed_rank_streams(0)

    def wrap(self, wrap: Callable[[nn.Module], nn.Module] | None = None, record: bool = False) -> None:
        """Make the module data-parallel, instead of what it was."""
        self.unwrap()
        if self.world_size > 1:
            self.model = (wrap or self.recipe.wrap)(self._module)
        if record and isinstance(self.model, Measuring):
            self.model.record_comm()
        self._timer = lockstep.StepTimer(self.model, self.recipe.optimizer, warmup=0)
        self._batches = self._timer.batches(self._own_data)

    def unwrap(self) -> None:
        """Back to the module alone."""
        if self._timer is not None:
            self._timer.close()
        self._timer = self._batches = None
        self.model = self._module
        gc.collect()  # a wrapper holds on to itself, and its engine to the gradients

    def steps(self, count: int) -> tuple[list[dict[str, float]], Buckets | None]:
        """Train so many optimizer steps. Returns their times, and what became of the buckets where that is recorded."""
        self._timer.reset()
        passes = []
        for number in range(1, count + 1):
            self._one_step()
            if number % _TAKE_AFTER == 0:
                passes += self._passes()
        times = self._timer.steps()
        return times, _buckets(passes + self._passes(), self.world_size)

    def _one_step(self) -> None:
        recipe = self.recipe
        recipe.optimizer.zero_grad()
        for number in range(recipe.accumulate):
            batch = moved(next(self._batches), self.device)
            alone = number + 1 < recipe.accumulate and hasattr(self.model, "no_sync")
            with self.model.no_sync() if alone else contextlib.nullcontext():
                loss = recipe.loss(self.model, batch)
                (loss / recipe.accumulate if recipe.divide_loss else loss).backward()
        recipe.optimizer.step()
        if recipe.scheduler is not None:
            recipe.scheduler.step()

    def _passes(self) -> list[Any]:
        return self.model.reducer.take_recorded() if isinstance(self.model, Measuring) else []

    def _endless(self) -> Iterator[Any]:
        recipe, batches = self.recipe, self.recipe.batches
        if batches is None:
            options = {"shuffle": recipe.shuffle, "seed": recipe.seed, "drop_last": True}
            micro = self._batch_size // recipe.accumulate
            try:
                batches = OrderPreservingSampler(
                    recipe.dataset, micro, rank=self.rank, world_size=self.world_size, **options
                )
            except ValueError as error:
                raise RecipeError(f"the recipe's batch_size does not fit: {error}") from error
        loader = DataLoader(
            recipe.dataset,
            batch_sampler=batches,
            num_workers=recipe.num_workers,
            collate_fn=recipe.collate_fn,
            generator=self._generator,
            pin_memory=self.device == "cuda" and recipe.num_workers > 0,
            persistent_workers=recipe.num_workers > 0,
        )
        for epoch in range(1_000_000_000):
            for thing in (batches, getattr(batches, "sampler", None), recipe.dataset):
                if hasattr(thing, "set_epoch"):
                    thing.set_epoch(epoch)
            empty = True
            for batch in loader:
                empty = False
                yield each_tensor(batch, _pinned) if self.device == "cuda" else batch
            if empty:
                text = f"[rank {self.rank}] the recipe's data hold no batch: fewer samples than batch_size?"
                raise RecipeError(text)


def _pinned(tensor: Tensor) -> Tensor:
    """From other memory a copy to the GPU would make the host wait for all that the GPU has to do before."""
    return tensor if tensor.is_cuda else tensor.pin_memory()


def _buckets(passes: list[Any], ranks: int) -> Buckets | None:
    from lockstep.timing.comm_report import pass_of

    found = [pass_of(times, []) for times in passes if times.buckets]
    if not found:
        return None
    sizes = [bucket.size for bucket in found[-1].buckets]
    sending = statistics.median(sum(bucket.sent - bucket.started for bucket in one.buckets) for one in found)
    bandwidth = statistics.median(bucket.bandwidth(ranks) for one in found for bucket in one.buckets)
    return Buckets(len(sizes), statistics.median(sizes), sum(sizes), sending, bandwidth)
