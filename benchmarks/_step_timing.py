"""A model under one engine: its step timed in blocks, its memory, its gradients checked, its device work counted.

Every function here is collective: all ranks call it together.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _contenders import Contender
from _models import Batch, Model, loss
from torch import nn
from torch.profiler import ProfilerActivity, profile

WARMUP_STEPS = 4  # torch builds its buckets anew before the second step and PowerSGD starts with the third
ALL_REDUCES = 5  # timed, of all gradient bytes at once
# Calls of the host that wait; not cudaDeviceSynchronize, which ends the trace.
WAITS = {
    *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuEventSynchronize", "cuMemcpy"),
}


class Timer:
    """Milliseconds between two points of the current stream, by CUDA events; on the CPU, of the wall."""

    def __init__(self, device: torch.device) -> None:
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device.type == "cuda" else None

    def start(self) -> None:
        self.began = time.perf_counter()
        if self.events:
            self.events[0].record()

    def stop(self) -> float:
        """Wait for the device, all its streams, and return the time."""
        if not self.events:
            return 1e3 * (time.perf_counter() - self.began)
        self.events[1].record()
        torch.cuda.synchronize()
        return self.events[0].elapsed_time(self.events[1])


def join_group(device_type: str, timeout: timedelta) -> torch.device:
    """Become one of torchrun's ranks, and return its device.

    Ranks that share a GPU pretend to be hosts of their own, else NCCL refuses them: they talk over sockets, and the GPU
    gives them its time in slices.
    """
    local, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device_type != "cuda":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sys.exit("no GPU here; the smoke test runs with --device cpu --scale tiny")
    device = torch.device("cuda", local % torch.cuda.device_count())
    if ranks > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timeout, device_id=device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait for all streams of ``device``."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def align(device: torch.device) -> None:
    """Return on all ranks at about the same time, each with an idle device."""
    synchronize(device)
    dist.all_reduce(torch.ones(1, device=device))
    synchronize(device)


def agreed(function: Callable[[], object]) -> str | None:
    """Run ``function``; return the first error of any rank as text, the same on all ranks, or None.

    An error that leaves the other ranks waiting in a collective is not caught here but by the group's timeout.
    """
    error = None
    try:
        function()
    except Exception as raised:
        text = " ".join(str(raised).split()) or "no message"
        error = f"rank {dist.get_rank()}: {type(raised).__name__}: {text[:600]}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((text for text in errors if text), None)


def release(device: torch.device) -> None:
    """Free what nobody holds, engines in reference cycles too, and hand the memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Subject:
    """One model and this rank's batch on a device. Contenders get copies that share the parameters' memory."""

    module: nn.Module
    batch: Batch
    device: torch.device

    @classmethod
    def of(cls, model: Model, device: torch.device) -> Subject:
        torch.manual_seed(0)
        with device:
            module = model.build()
        torch.manual_seed(1 + dist.get_rank())
        with device:
            batch = model.batch()
        return cls(module, batch, device)

    def copy(self) -> nn.Module:
        """A module with hooks and gradients of its own on the memory of these parameters, which nobody changes."""
        shared = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in self.module.parameters()}
        return copy.deepcopy(self.module, memo=shared)

    def elements(self) -> int:
        """Elements of all gradients."""
        return sum(p.numel() for p in self.module.parameters() if p.requires_grad)

    def mean_gradients(self) -> list[torch.Tensor]:
        """What every engine has to produce, by one all-reduce for each parameter of a module without an engine."""
        module = self.copy()
        backward(module, self.batch, self.device)
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        return gradients


def backward(model: nn.Module, batch: Batch, device: torch.device) -> None:
    """One forward in bf16 autocast and its backward."""
    inputs, targets = batch
    with torch.autocast(device.type, dtype=torch.bfloat16):
        value = loss(model(inputs), targets)
    value.backward()


class Runner:
    """A contender with its own copy of the module, warmed up, and what it holds and needs."""

    def __init__(self, contender: Contender, subject: Subject) -> None:
        self.contender, self.subject, self.device = contender, subject, subject.device
        self.cuda = self.device.type == "cuda"
        self.timer = Timer(self.device)
        self.one = torch.ones(1, device=self.device)
        self.block_ms: list[float] = []  # of one step, mean over each block
        self.issue_ms: list[float] = []  # host time of the first step of each block
        self.kept_bytes = self.peak_bytes = self.other_bytes = None
        gc.collect()
        synchronize(self.device)
        before = self._memory()
        module = subject.copy()
        self.model = contender.wrap(module, dist.group.WORLD)
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for _ in range(WARMUP_STEPS):
            self.step()
        if self.cuda:
            gc.collect()
            torch.cuda.synchronize(self.device)
            kept, outside = (now - then for now, then in zip(self._memory(), before, strict=True))
            torch.cuda.reset_peak_memory_stats(self.device)
            start = torch.cuda.memory_allocated(self.device)
            self.step()
            torch.cuda.synchronize(self.device)
            self.kept_bytes, self.other_bytes = kept, outside
            self.peak_bytes = kept + torch.cuda.max_memory_allocated(self.device) - start

    def _memory(self) -> tuple[int, int]:
        """Bytes of tensors, and bytes of the device that torch's allocator knows nothing of."""
        if not self.cuda:
            return 0, 0
        free, total = torch.cuda.mem_get_info(self.device)
        return torch.cuda.memory_allocated(self.device), total - free - torch.cuda.memory_reserved(self.device)

    def step(self) -> None:
        """Forward, backward, this contender's reduction; gradients are None before and after."""
        backward(self.model, self.subject.batch, self.device)
        if self.contender.waits_for_all:
            dist.all_reduce(self.one)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def block(self, steps: int) -> None:
        """Time ``steps`` steps, from all ranks' start on an idle device to the end of the last step's device work."""
        align(self.device)
        self.timer.start()
        self.step()
        issued = time.perf_counter() - self.timer.began
        for _ in range(steps - 1):
            self.step()
        self.block_ms.append(self.timer.stop() / steps)
        self.issue_ms.append(1e3 * issued)

    def gradient_error(self, expected: Sequence[torch.Tensor]) -> float:
        """Distance of this contender's gradients from ``expected``, over the length of ``expected``.

        Raises:
            AssertionError: further than the contender's tolerance, or not bit-equal on all ranks.
        """
        backward(self.model, self.subject.batch, self.device)
        gradients = [parameter.grad for parameter in self.parameters]
        absent = sum(gradient is None for gradient in gradients)
        if absent or len(gradients) != len(expected):
            raise AssertionError(f"{absent} of {len(gradients)} gradients are missing; {len(expected)} are expected")
        norm = torch.stack([torch.linalg.vector_norm(mean) for mean in expected]).norm()
        away = [torch.linalg.vector_norm(mine - mean) for mine, mean in zip(gradients, expected, strict=True)]
        error = (torch.stack(away).norm() / norm).item()
        sums = torch.stack([gradient.sum(dtype=torch.float64) for gradient in gradients])
        lowest, highest = sums.clone(), sums.clone()
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        self.drop_gradients()
        tolerance = self.contender.tolerance
        if tolerance is not None and not error <= tolerance:  # NaN is an error, too
            raise AssertionError(f"gradients are {error:.3g} of their length from the mean over ranks (<= {tolerance})")
        if different := int((lowest != highest).sum()):
            raise AssertionError(f"{different} of {len(gradients)} gradients differ between ranks")
        return error


def compare(runners: Sequence[Runner], rounds: int, steps: int) -> None:
    """Time all runners in turns, another one first in each round. Afterwards each has the slowest rank's times."""
    for runner in runners:
        runner.block_ms.clear()
        runner.issue_ms.clear()
    gc.collect()
    gc.disable()
    try:
        for first in range(rounds):
            for place in range(len(runners)):
                runners[(first + place) % len(runners)].block(steps)
    finally:
        gc.enable()
    device = runners[0].device
    slowest = torch.tensor([[r.block_ms, r.issue_ms] for r in runners], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    for runner, (block_ms, issue_ms) in zip(runners, slowest.tolist(), strict=True):
        runner.block_ms, runner.issue_ms = block_ms, issue_ms


def all_reduce_ms(elements: int, device: torch.device) -> float:
    """Time of one all-reduce of ``elements`` fp32 numbers and nothing else: median, each from the slowest rank."""
    data = torch.rand(elements, device=device)
    timer, times = Timer(device), []
    for _ in range(1 + ALL_REDUCES):
        align(device)
        timer.start()
        dist.all_reduce(data)
        times.append(timer.stop())
    slowest = torch.tensor(times[1:], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def device_work(runner: Runner) -> dict[str, int]:
    """What one step gives to the device and the wire, from the profiler's trace of this rank.

    ``kernels`` (NCCL's included), ``copies`` (and fills), ``collectives`` (NCCL kernels; on the CPU gloo's operations),
    ``waits`` (the host for a stream or an event).
    """
    activity = ProfilerActivity.CUDA if runner.cuda else ProfilerActivity.CPU
    align(runner.device)
    with profile(activities=[activity]) as profiler:
        runner.step()
        synchronize(runner.device)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    return count_events(events, runner.cuda)


def count_events(events: Iterable[dict[str, Any]], cuda: bool) -> dict[str, int]:
    """``device_work`` of the events of a trace in Chrome's format."""
    kinds = Counter()
    for event in events:
        category, name = event.get("cat"), str(event.get("name"))
        if category == "kernel":
            kinds["kernels"] += 1
            kinds["collectives"] += name.startswith("nccl")
        elif category in ("gpu_memcpy", "gpu_memset"):
            kinds["copies"] += 1
        elif category == "user_annotation" and not cuda:
            kinds["collectives"] += name.startswith("gloo:")
        elif category in ("cuda_runtime", "cuda_driver"):
            kinds["waits"] += name in WAITS
    names = ("kernels", "copies", "collectives", "waits") if cuda else ("collectives",)
    return {name: kinds[name] for name in names}
