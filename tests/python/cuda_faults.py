"""Ways in which one rank of a job on GPUs goes wrong, and a training loop that they happen to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from faults import THRESHOLD, Told, die
from gpus import join_nccl
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
    join_nccl(rank, world_size, store, timeout=GROUP_TIMEOUT)


def join_on_one_gpu(rank: int, world_size: int, store: str) -> None:
    """As the script of somebody who forgot to choose a device."""
    join_nccl(rank, world_size, store, timeout=GROUP_TIMEOUT)
    os.environ.pop("NCCL_HOSTID", None)  # NCCL reads it with the first collective
    torch.cuda.set_device(0)


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


@dataclass(frozen=True)
class Fault:
    """What one step of the bad rank is, and the settings of its model."""

    step: Callable[[nn.Module], object]
    bucket_cap_mb: float = 5
    comm_hook: str = "allreduce"
    good_steps: int = GOOD_STEPS
    cap_of_bad_rank: float | None = None  #: where it differs


FAULTS = {
    "killed_in_backward": Fault(killed_in_backward),
    "device_assert": Fault(device_assert),
    "out_of_memory": Fault(out_of_memory, bucket_cap_mb=100, comm_hook="int8"),
    "other_bucket_size": Fault(step_of, good_steps=0, cap_of_bad_rank=2),
}


def train(name: str, bad_rank: int, communicator: str, reads_loss: bool) -> Told:
    """Good steps, the fault on ``bad_rank``, and more steps, which read the loss or never wait for the GPU."""
    fault, bad = FAULTS[name], dist.get_rank() == bad_rank
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(
        Net().cuda(),
        bucket_cap_mb=(bad and fault.cap_of_bad_rank) or fault.bucket_cap_mb,
        communicator=communicator,
        stall_threshold=THRESHOLD,
    )
    began = time.monotonic()
    try:
        for _ in range(fault.good_steps):
            step_of(model)
        model.set_comm_hook(fault.comm_hook)
        torch.cuda.synchronize()
        dist.barrier()
        began = time.monotonic()
        (fault.step if bad else step_of)(model)
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
