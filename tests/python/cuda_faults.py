"""Ways in which one rank of a job on GPUs goes wrong, and a training loop that they happen to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from faults import THRESHOLD, Told, die
from oracle import rank_data

#: Steps before the fault: past the change of plan.
GOOD_STEPS = 3
#: Steps tried after it. Whoever gets through all of them was told nothing.
MORE_STEPS = 40
#: In seconds, of the NCCL group.
GROUP_TIMEOUT = 20
WIDTH = 1024


class Net(nn.Module):
    """Six layers of 4 MiB, in several buckets; ``also`` runs in the middle of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: torch.Tensor, also: Callable[[], None] | None = None) -> torch.Tensor:
        x = self.layers[:3](x)
        if also is not None:
            x.register_hook(lambda grad: also())
        return self.layers[3:](x)


def join_with_short_timeout(rank: int, world_size: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    _join(rank, world_size, store)


def join_on_one_gpu(rank: int, world_size: int, store: str) -> None:
    torch.cuda.set_device(0)
    _join(rank, world_size, store)


def _join(rank: int, world_size: int, store: str) -> None:
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    dist.init_process_group(
        "nccl", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )


def step_of(model: nn.Module, also: Callable[[], None] | None = None) -> torch.Tensor:
    loss = model(rank_data(4, WIDTH).cuda(), also).square().mean()
    loss.backward()
    model.zero_grad(set_to_none=False)
    return loss


def killed_in_backward(model: nn.Module) -> None:
    step_of(model, also=die)


def device_assert(model: nn.Module) -> None:
    """A kernel of this rank reads out of bounds in the middle of backward."""

    def gather_out_of_bounds() -> None:
        torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]

    step_of(model, also=gather_out_of_bounds)


def out_of_memory(model: nn.Module) -> None:
    """What is left is enough for the gradient of one layer (4 MiB), but not for what the int8 hook sends (6 MiB)."""
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (32 << 20)) / whole)
    left = torch.empty(5 << 18, device="cuda")
    taken = []
    with contextlib.suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(5 << 16, device="cuda"))
    del left
    step_of(model)


def other_bucket_size(model: nn.Module) -> None:
    """Nothing wrong with this step: the rank was different from the start."""
    step_of(model)


def train(fault: Callable[[nn.Module], None], bad_rank: int, communicator: str, reads_loss: bool) -> Told:
    """Some good steps, the fault on ``bad_rank``, some more steps, which read the loss or never wait for the GPU."""
    bad = dist.get_rank() == bad_rank
    differs = fault is other_bucket_size
    torch.manual_seed(0)
    lacks_memory = fault is out_of_memory
    size = 100 if lacks_memory else 2 if differs and bad else 5
    model = lockstep.DistributedDataParallel(
        Net().cuda(), bucket_cap_mb=size, communicator=communicator, stall_threshold=THRESHOLD
    )
    began = time.monotonic()
    try:
        for _ in range(0 if differs else GOOD_STEPS):
            step_of(model)
        model.set_comm_hook("int8" if lacks_memory else "allreduce")
        torch.cuda.synchronize()
        dist.barrier()
        began = time.monotonic()
        (fault if bad else step_of)(model)
        for _ in range(MORE_STEPS):
            loss = step_of(model)
            if reads_loss:
                loss.item()
        torch.cuda.synchronize()
    except RuntimeError as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        return Told(text, time.monotonic() - began)
    return Told("", time.monotonic() - began)


def wraps(communicator: str) -> Told:
    """Constructing the wrapper is the first that needs the group."""
    began = time.monotonic()
    try:
        lockstep.DistributedDataParallel(nn.Linear(4, 4).cuda(), communicator=communicator)
    except RuntimeError as error:
        return Told(f"{type(error).__name__}: {error}", time.monotonic() - began)
    return Told("", time.monotonic() - began)
