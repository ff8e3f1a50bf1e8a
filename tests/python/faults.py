"""Ways in which one rank of a job goes wrong, and a training loop that they happen to."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from oracle import rank_data
from ranks import join_group

#: In seconds: ``stall_threshold`` of the models.
THRESHOLD = 2.0
#: Steps before the fault: past the change of plan.
GOOD_STEPS = 3
#: Steps tried after it. Whoever gets through all of them was told nothing.
MORE_STEPS = 4
#: In seconds. Longer than any test waits, so that no error comes from it.
GROUP_TIMEOUT = 60


@dataclass(frozen=True)
class Told:
    """How the steps after the fault ended on one rank. No error: no text."""

    text: str
    seconds: float  #: from the fault to the error


class Net(nn.Module):
    """Six layers, each in a bucket of its own; ``also`` runs in the middle, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))

    def forward(
        self, x: torch.Tensor, also: Callable[[], None] | None = None, where: str = "forward", short: bool = False
    ) -> torch.Tensor:
        x = self.layers[:2](x)
        if also is not None and where == "forward":
            also()
        if also is not None and where == "backward":
            x.register_hook(lambda grad: also())
        x = self.layers[2:4](x)
        return x if short else self.layers[4:](x)


class Hook:
    """The default hook, until it is asked to do something else in the middle of a step."""

    def __init__(self, waits: bool) -> None:
        self.also: Callable[[], None] | None = None
        self.waits = waits  #: for its collective, before it returns

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.also is not None and bucket.index() == 2:
            self.also()
        data = bucket.buffer().div_(dist.get_world_size())
        if self.waits:
            dist.all_reduce(data)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(data)
            return future
        return dist.all_reduce(data, async_op=True).get_future().then(lambda future: future.value()[0])


def sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Another hook than the default one."""
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("user code failed")


def step_of(model: nn.Module, **keywords: Any) -> None:
    model(rank_data(3, 6), **keywords).square().sum().backward()
    model.zero_grad()


@contextmanager
def swallowing() -> Iterator[None]:
    """As in a training loop that goes on with the next batch. Errors of ours are no user's."""
    try:
        yield
    except ValueError as error:
        assert str(error) == "user code failed"


def step_of_bad_rank(model: nn.Module, hook: Hook) -> None:
    """Nothing wrong with this step: the rank was different from the start."""
    step_of(model)


def killed_in_forward(model: nn.Module, hook: Hook) -> None:
    step_of(model, also=die)


def killed_in_backward(model: nn.Module, hook: Hook) -> None:
    step_of(model, also=die, where="backward")


def killed_in_hook(model: nn.Module, hook: Hook) -> None:
    hook.also = die
    step_of(model)


def skips_backward(model: nn.Module, hook: Hook) -> None:
    model(rank_data(3, 6))


def other_graph(model: nn.Module, hook: Hook) -> None:
    step_of(model, short=True)


def other_hook(model: nn.Module, hook: Hook) -> None:
    model.register_comm_hook(None, sum_hook)
    step_of(model)


def no_sync(model: nn.Module, hook: Hook) -> None:
    with model.no_sync():
        step_of(model)


def swallowed_in_forward(model: nn.Module, hook: Hook) -> None:
    with swallowing():
        step_of(model, also=fail)


def swallowed_in_backward(model: nn.Module, hook: Hook) -> None:
    with swallowing():
        step_of(model, also=fail, where="backward")


def swallowed_early_in_backward(model: nn.Module, hook: Hook) -> None:
    """Before the first bucket has left."""
    with swallowing():
        out = model(rank_data(3, 6))
        out.register_hook(lambda grad: fail())
        out.square().sum().backward()


def swallowed_in_hook(model: nn.Module, hook: Hook) -> None:
    hook.also = fail
    try:
        with swallowing():
            step_of(model)
    finally:
        hook.also = None


def train(
    fault: Callable[[nn.Module, Hook], None],
    bad_rank: int,
    options: dict[str, Any],
    own_options: dict[str, Any],
    with_hook: str,
) -> Told:
    """Some good steps, the fault on ``bad_rank``, some more steps. ``own_options`` are those of ``bad_rank`` alone."""
    bad = dist.get_rank() == bad_rank
    torch.manual_seed(0)
    hook = Hook(waits=with_hook == "waits")
    try:
        model = lockstep.DistributedDataParallel(
            Net(), bucket_cap_mb=0.0002, stall_threshold=THRESHOLD, **options, **(own_options if bad else {})
        )
        if with_hook:
            model.register_comm_hook(None, hook)
        for _ in range(0 if own_options else GOOD_STEPS):
            step_of(model)
    except RuntimeError as error:
        raise AssertionError(f"before the fault: {error}") from error
    dist.barrier()
    began = time.monotonic()
    try:
        if bad:
            fault(model, hook)
        else:
            step_of(model)
        for _ in range(MORE_STEPS):
            step_of(model)
    except RuntimeError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        return Told(text, time.monotonic() - began)
    return Told("", time.monotonic() - began)


def join_patiently(rank: int, ranks: int, store: str) -> None:
    join_group(rank, ranks, store, timeout=GROUP_TIMEOUT)


def join_through_rank_zero(rank: int, ranks: int, store: str) -> None:
    """The store lives in the process of rank 0, and dies with it."""
    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        with open(store + ".port", "w") as file:
            file.write(str(server.port))
        os.rename(store + ".port", store)
        connection = server
    else:
        deadline = time.monotonic() + 30
        while not os.path.exists(store):
            assert time.monotonic() < deadline, "rank 0 opened no store"
            time.sleep(0.01)
        with open(store) as file:
            connection = dist.TCPStore("127.0.0.1", int(file.read()), ranks, is_master=False)
    dist.init_process_group("gloo", store=connection, rank=rank, world_size=ranks, timeout=timeout)
