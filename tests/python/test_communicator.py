"""The engine's collectives over a c10d process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.profiler import profile

import lockstep
from lockstep import _C
from models import SparseEmbedding, tokens
from oracle import Pair


def _all_collectives() -> None:
    comm = _C.Communicator(dist.group.WORLD)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert (comm.rank(), comm.size()) == (rank, size)
    ranks = torch.arange(1.0, size + 1)

    data = torch.tensor([rank + 1.0, 10.0])
    comm.sum(data)
    assert data.tolist() == [ranks.sum(), 10.0 * size]
    data = torch.tensor([rank + 1.0, -rank])
    comm.max(data)
    assert data.tolist() == [size, 0.0]
    data = torch.full((2,), rank + 1.0)
    comm.average(data)
    torch.testing.assert_close(data, torch.full((2,), ranks.mean().item()))
    data = torch.tensor([rank])
    comm.broadcast(data, size - 1)
    assert data.item() == size - 1

    gathered = torch.empty(2 * size)
    comm.all_gather(gathered, torch.tensor([rank + 1.0, -1.0]))
    assert gathered.view(size, 2)[:, 0].tolist() == ranks.tolist() and (gathered.view(size, 2)[:, 1] == -1).all()
    received = torch.empty(size)
    comm.all_to_all(received, 10.0 * torch.arange(size) + rank)  # rank r sends 10 * s + r to rank s
    assert received.tolist() == [10.0 * rank + r for r in range(size)]
    part = torch.empty(1)
    comm.reduce_scatter(part, (rank + 1) * torch.arange(1.0, size + 1))
    assert part.item() == (rank + 1) * ranks.sum()


def test_every_collective_does_what_its_comment_says(two_or_three_ranks):
    two_or_three_ranks.run(_all_collectives)


#: torch's gloo group keeps the name of the last collective in a string that its threads write without a lock: names
#: with memory of their own, 16 characters and more, are freed twice. These events have short ones.
SAFE = {"gloo:all_reduce", "gloo:all_gather", "gloo:all_to_all", "gloo:broadcast"}


def _issued() -> set[str]:
    comm = _C.Communicator(dist.group.WORLD)
    size = dist.get_world_size()
    pair = Pair(SparseEmbedding, lockstep.DistributedDataParallel)
    with profile() as profiler:
        pair.backward(lambda: tokens(0))
        part = torch.empty(3, dtype=torch.bfloat16)
        comm.reduce_scatter(part, torch.full((3 * size,), 1.0 + dist.get_rank(), dtype=torch.bfloat16))
    pair.check()
    assert part.tolist() == [size * (size + 1) / 2] * 3
    return {event.name for event in profiler.events() if event.name.startswith("gloo:")}


def test_no_collective_over_gloo_has_a_name_that_its_threads_free_twice(two_or_three_ranks):
    for issued in two_or_three_ranks.run(_issued):
        assert {"gloo:all_gather", "gloo:all_to_all"} <= issued <= SAFE
