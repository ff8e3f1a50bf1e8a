"""Trainings of the handwritten digits for ``lockstep bench`` and ``tune``, healthy and each with one planted fault."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import lockstep
from lockstep.examples._data import load_data
from lockstep.examples.digits import DigitNet
from lockstep.tools.align import Recipe

#: In seconds, far beyond the noise of a busy machine.
LOADER_WAITS, RANK_WAITS, COLLECTIVE_COSTS = 0.4, 0.2, 0.02
BATCH_SIZE = 48


def digits(model: nn.Module | None = None, **settings: Any) -> Recipe:
    model = model or DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    usual = {"loss": mean_loss, "optimizer": optimizer, "batch_size": BATCH_SIZE}
    return Recipe(model, load_data()[0], **(usual | settings))


def healthy() -> Recipe:
    return digits()


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def slow_loader() -> Recipe:
    def collate(items: list[Any]) -> Any:
        time.sleep(LOADER_WAITS)  # as long for a rank's part as for the whole batch
        return default_collate(items)

    return digits(collate_fn=collate)


def slow_rank(rank: int, world_size: int) -> Recipe:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        if rank == 1:
            time.sleep(RANK_WAITS)
        return cross_entropy(outputs, batch[1])

    return digits(loss=loss)


class Deep(nn.Module):
    """Many small layers."""

    def __init__(self, layers: int = 200, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh() / len(self.layers)
        return self.last(hidden)


def tiny_buckets() -> Recipe:
    def wrap(model: nn.Module) -> nn.Module:
        return lockstep.DistributedDataParallel(model, bucket_cap_mb=1e-5)

    return digits(Deep(), wrap=wrap)


def late_mean(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The mean, on a wire where every collective costs some time, however small it is."""
    time.sleep(COLLECTIVE_COSTS)
    work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def one_megabyte_buckets() -> Recipe:
    """Next to no computing for 24 MB of gradients."""

    def wrap(model: nn.Module) -> nn.Module:
        wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=1)
        wrapped.register_comm_hook(None, late_mean)
        return wrapped

    return digits(Deep(layers=24, width=512), batch_size=2, wrap=wrap)


# ---- what cannot be run ----


def fails_on_rank_1(rank: int, world_size: int) -> Recipe:
    if rank == 1:
        raise FileNotFoundError("no data on this disk")
    return digits()


def wrong_thing() -> int:
    return 3


def out_of_memory_on_rank_1(rank: int, world_size: int) -> Recipe:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(batch)
        if rank == 1 and len(calls) == 3:
            raise torch.OutOfMemoryError("tried to allocate 1000.00 GiB")  # rank 0 is in the reduction by now
        return mean_loss(model, batch)

    return digits(loss=loss)


def no_length() -> Recipe:
    recipe = digits()
    recipe.dataset = iter(())
    return recipe
