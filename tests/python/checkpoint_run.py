"""A small training run that keeps checkpoints, for processes that get killed."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import random
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.data import OrderPreservingSampler, seed_everything, seed_rank_streams
from ranks import join_group

EPOCHS, BATCH, SAMPLES = 2, 4, 22
STEPS = EPOCHS * 6
WORLD = 2


class ErrorFeedback:
    """A comm hook that rounds to bf16 and keeps what that loses for the next step: a state of each rank."""

    def __init__(self, module: nn.Module) -> None:
        self._index = {parameter: number for number, parameter in enumerate(module.parameters())}
        self.lost = [torch.zeros_like(parameter) for parameter in module.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"lost": self.lost}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.lost = state["lost"]


def rounded(state: ErrorFeedback, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        lost = state.lost[state._index[parameter]]
        wanted = gradient + lost
        gradient.copy_(wanted.bfloat16())
        lost.copy_(wanted - gradient)
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0] / WORLD)


class Run:
    """Everything that a checkpoint holds."""

    def __init__(self) -> None:
        seed_everything(3)
        module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))
        self.model = lockstep.DistributedDataParallel(module)
        self.model.register_comm_hook(ErrorFeedback(module), rounded)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(SAMPLES, 6, generator=generator)
        self.data = TensorDataset(inputs, inputs[:, :3].sin())
        self.sampler = OrderPreservingSampler(self.data, BATCH, seed=5)
        seed_rank_streams(3)

    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "sampler")
        return {name: getattr(self, name) for name in names}

    def train(self, after_step) -> None:
        loader = DataLoader(self.data, batch_sampler=self.sampler)
        for epoch in range(self.sampler.epoch, EPOCHS):
            self.sampler.set_epoch(epoch)
            for inputs, targets in self.sampler.track(loader):
                noise = random.gauss(0, 0.1)  # Python's stream counts, too
                self.optimizer.zero_grad()
                loss = (self.model(inputs + noise) - targets).square().mean() * self.sampler.loss_scale()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                after_step(epoch * len(self.sampler) + self.sampler.position)

    def bits(self) -> str:
        buffer = io.BytesIO()
        hook = self.model._comm_hooks[0][1]
        tensors = [*self.model.module.state_dict().values(), *hook.lost, torch.get_rng_state()]
        tensors += [value for state in self.optimizer.state.values() for value in state.values()]
        for tensor in tensors:
            buffer.write(tensor.detach().numpy().tobytes())
        buffer.write(repr((random.random(), self.scheduler.state_dict())).encode())
        return hashlib.sha256(buffer.getvalue()).hexdigest()


def main(
    rank: int, store: str, path: str | None, die: tuple[int, str] | None, timeout: float, pipe: Connection
) -> None:
    """Train to the end, from the checkpoint if there is one. Tells the pipe of each save, and the final bits.

    ``die``: in which step and at which moment of its save rank 0 kills itself.
    """
    join_group(rank, WORLD, store)
    try:
        run = Run()
        if path is not None and Path(path).exists():
            step = lockstep.checkpoint.load(path, **run.parts())
            pipe.send(("resumed", step))

        def keep(step: int) -> None:
            if path is None:
                return
            if die is not None and rank == 0 and step == die[0]:
                die_at(die[1])
            pipe.send(("saving", step))
            lockstep.checkpoint.save(path, **run.parts(), extra=step, timeout=timeout)
            pipe.send(("saved", step))

        run.train(keep)
        pipe.send(("bits", run.bits()))
    except lockstep.checkpoint.CheckpointError as error:
        pipe.send((type(error).__name__, str(error)))


def die_at(moment: str) -> None:
    """Arrange that this process kills itself at ``moment`` of the coming save."""

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    torch_save, replace, fsync = torch.save, os.replace, os.fsync

    def write_a_part(share: float, content: Any, file: Any, **options: Any) -> None:
        if isinstance(file, io.BytesIO):  # pickling a tensor for another rank comes here, too
            return torch_save(content, file, **options)
        buffer = io.BytesIO()
        torch_save(content, buffer)
        file.write(buffer.getvalue()[: int(share * buffer.tell())])
        file.flush()
        return kill()

    def after_replace(*args: Any) -> None:
        replace(*args)
        kill()

    def after_fsync(descriptor: int) -> None:
        fsync(descriptor)
        kill()

    patches = {
        "before writing": (torch, "save", functools.partial(write_a_part, 0)),
        "half written": (torch, "save", functools.partial(write_a_part, 0.5)),
        "before the file's fsync": (os, "fsync", kill),
        "after the file's fsync": (os, "fsync", after_fsync),
        "before the rename": (os, "replace", kill),
        "after the rename": (os, "replace", after_replace),
    }
    setattr(*patches[moment])
