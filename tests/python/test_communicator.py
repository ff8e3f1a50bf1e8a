"""The engine's collectives over a c10d process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep import _C


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
