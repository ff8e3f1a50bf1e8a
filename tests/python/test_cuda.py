"""The engine on GPUs and NCCL, against the plain oracle. Skipped where there is no GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from gpus import MODES, NEEDS_GPU, check, join_nccl, on_gpu, pair_on_gpu
from ranks import RankPool

pytestmark = NEEDS_GPU
COMMUNICATORS = ["auto", "nccl"]


@pytest.fixture(scope="module")
def _pool() -> Iterator[list[RankPool]]:
    held: list[RankPool] = []
    yield held
    for pool in held:
        pool.close()


@pytest.fixture
def gpu_ranks(_pool: list[RankPool]) -> RankPool:
    if not _pool or not _pool[-1].usable:
        _pool.append(RankPool(2, join_nccl))
    return _pool[-1]


class Net(nn.Module):
    """Convolution in channels-last order, batch norm, and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.extra = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, arguments: tuple[torch.Tensor, bool]) -> torch.Tensor:
        x, extra = arguments
        x = self.norm(self.conv(x.to(memory_format=torch.channels_last))).mean((2, 3))
        return self.head(x) + (self.extra(x) if extra else 0)


def _mode(options: dict[str, Any], communicator: str, dtype: torch.dtype) -> None:
    pair = pair_on_gpu(Net, dtype, communicator=communicator, **options)
    unused = options.get("find_unused_parameters", False)
    for step in range(5):
        # One rank leaves the branch out in every other step, both leave it out in the last.
        extra = not unused or (step < 4 and (step % 2 == 0 or dist.get_rank() == 0))
        pair.backward(lambda step=step, extra=extra: (on_gpu(4, 3, 8, 8, step=step, dtype=dtype), extra))
        check(pair)
        pair.zero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_mean_of_the_gradients(gpu_ranks, mode: str, communicator: str, dtype: torch.dtype):
    gpu_ranks.run(_mode, MODES[mode], communicator, dtype, timeout=90)


def _accumulates(communicator: str) -> None:
    pair = pair_on_gpu(lambda: nn.Linear(8, 8), communicator=communicator)
    for step in range(3):
        with pair.wrapped.no_sync():
            pair.backward(lambda step=step: on_gpu(3, 8, step=10 + step))
        pair.backward(lambda step=step: on_gpu(3, 8, step=step))
        check(pair)
        pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_gradients_accumulated_under_no_sync_are_reduced_with_the_next_step(gpu_ranks, communicator: str):
    gpu_ranks.run(_accumulates, communicator)


class Deep(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def _host_waits(communicator: str, options: dict[str, Any]) -> dict[str, int]:
    """Calls by which the host waits for the device, in two steps after the plan is final."""
    model = lockstep.DistributedDataParallel(
        Deep().cuda(), communicator=communicator, bucket_cap_mb=0.01, **options
    )
    inputs = on_gpu(4, 32)

    def step() -> None:
        model.zero_grad()
        model(inputs).sum().backward()

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function("steps"):
        step()
        step()
    waits: dict[str, int] = {}
    steps = next(event for event in profiler.events() if event.name == "steps")
    for event in profiler.events():
        inside = steps.time_range.start <= event.time_range.start <= steps.time_range.end
        if inside and ("Synchronize" in event.name or event.name in ("aten::item", "aten::_local_scalar_dense")):
            waits[event.name] = waits.get(event.name, 0) + 1
    return waits


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("mode", MODES)
def test_the_host_never_waits_for_the_device_within_a_step(gpu_ranks, mode: str, communicator: str):
    options = {key: value for key, value in MODES[mode].items() if key != "bucket_cap_mb"}
    assert gpu_ranks.run(_host_waits, communicator, options) == [{}, {}]


def _side_streams(communicator: str) -> None:
    pair = pair_on_gpu(Deep, communicator=communicator, bucket_cap_mb=0.01)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for step in range(6):
        torch.cuda.synchronize()
        side = streams[step % 2] if step < 4 else torch.cuda.current_stream()
        with torch.cuda.stream(side):
            data = on_gpu(4, 32, step=step)
            loss = pair.wrapped(data).square().sum()
        with torch.cuda.stream(side):
            loss.backward()
            copies = [p.grad.clone() for p in pair.wrapped.parameters()]  # safe on the current stream, without a wait
        side.synchronize()
        pair.plain(data).square().sum().backward()
        torch.cuda.synchronize()
        for early, parameter in zip(copies, pair.wrapped.parameters(), strict=True):
            torch.testing.assert_close(early, parameter.grad, rtol=0, atol=0)
        check(pair)
        pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_forward_and_backward_on_a_stream_of_the_users(gpu_ranks, communicator: str):
    gpu_ranks.run(_side_streams, communicator)


def _checkpointed(communicator: str, static: bool) -> None:
    pair = pair_on_gpu(lambda: Deep(checkpointed=True), communicator=communicator, static_graph=static)
    for step in range(3):
        pair.backward(lambda step=step: on_gpu(4, 32, step=step))
        check(pair)
        pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("static", [False, True])
def test_activation_checkpointing(gpu_ranks, communicator: str, static: bool):
    gpu_ranks.run(_checkpointed, communicator, static)


def _scaled() -> None:
    model = lockstep.DistributedDataParallel(Deep().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=100)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(on_gpu(4, 32, step=step)).square().mean()
        if step == 1 and dist.get_rank() == 1:  # only this rank overflows
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        after = [p.detach().clone() for p in model.parameters()]
        stood_still = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert stood_still == (step == 1), "every rank must skip the step of an overflow, and no other"
        before = after
    assert scaler.get_scale() == 2.0**9
    model.assert_in_sync()


def test_an_overflow_on_one_rank_makes_all_skip_the_step(gpu_ranks):
    gpu_ranks.run(_scaled)


class ComplexNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.weight).abs() + self.real


def _complex(communicator: str, views: bool) -> None:
    pair = pair_on_gpu(ComplexNet, None, communicator=communicator, gradient_as_bucket_view=views)
    for step in range(3):
        pair.backward(lambda step=step: on_gpu(4, 6, step=step))
        check(pair)
        pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("views", [False, True])
def test_complex_parameters(gpu_ranks, communicator: str, views: bool):
    gpu_ranks.run(_complex, communicator, views)


def _synchronised_norm() -> None:
    net = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)))
    model = lockstep.DistributedDataParallel(net.cuda())
    torch.manual_seed(1)
    data = torch.randn(8, 6, device="cuda")  # the same on both ranks
    half = data.chunk(2)[dist.get_rank()]
    alone = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).cuda()
    alone.load_state_dict(net.state_dict())
    model(half).square().mean().backward()
    alone(data).square().mean().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


def test_synchronised_batch_norm_equals_one_process_with_the_whole_batch(gpu_ranks):
    gpu_ranks.run(_synchronised_norm)


def _captured(communicator: str) -> None:
    static_input = on_gpu(4, 32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # wrapping too: the recipe of torch's documentation
        pair = pair_on_gpu(Deep, communicator=communicator, bucket_cap_mb=0.01)
        for _ in range(11):
            pair.wrapped.zero_grad(set_to_none=True)
            pair.wrapped(static_input).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    pair.wrapped.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        pair.wrapped(static_input).square().sum().backward()
    for step in range(3):
        static_input.copy_(on_gpu(4, 32, step=step))
        graph.replay()
        pair.plain.zero_grad()
        pair.plain(static_input).square().sum().backward()
        check(pair)
    torch.cuda.synchronize()
    pair.wrapped.zero_grad(set_to_none=True)  # and back to eager steps
    pair.wrapped(static_input).square().sum().backward()
    check(pair)


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_a_whole_step_can_be_captured_into_a_cuda_graph(gpu_ranks, communicator: str):
    gpu_ranks.run(_captured, communicator)


def _sparse(communicator: str) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)
            self.head = nn.Linear(4, 2)

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(index))

    pair = pair_on_gpu(Lookup, communicator=communicator)
    for _ in range(3):
        index = torch.tensor([1, 2 + dist.get_rank(), 2, 5][: 3 + dist.get_rank()], device="cuda")  # 2 and 4 rows
        pair.backward(lambda index=index: index)
        for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
            mean = theirs.grad.to_dense()
            dist.all_reduce(mean)
            torch.testing.assert_close(ours.grad.to_dense(), mean / 2)
        assert pair.wrapped.module.table.weight.grad.is_sparse
        pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_sparse_gradients(gpu_ranks, communicator: str):
    gpu_ranks.run(_sparse, communicator)


def _gloo_group() -> None:
    group = dist.new_group(backend="gloo")
    pair = pair_on_gpu(Net, process_group=group)
    for step in range(3):
        pair.backward(lambda step=step: (on_gpu(4, 3, 8, 8, step=step), True))
        check(pair)
        pair.zero()


def test_a_gloo_group_reduces_gradients_on_a_gpu(gpu_ranks):
    gpu_ranks.run(_gloo_group)


def _two_replicas(communicator: str) -> None:
    first = pair_on_gpu(Deep, communicator=communicator)
    second = pair_on_gpu(lambda: nn.Linear(32, 32), communicator=communicator)
    for step in range(3):
        data = on_gpu(4, 32, step=step)
        (first.wrapped(data).square().sum() + second.wrapped(data).square().sum()).backward()
        first.plain(data).square().sum().backward()
        second.plain(data).square().sum().backward()
        for pair in (first, second):
            check(pair)
            pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_two_models_in_one_backward(gpu_ranks, communicator: str):
    gpu_ranks.run(_two_replicas, communicator)


def _disagrees() -> str:
    model = lockstep.DistributedDataParallel(Deep().cuda())
    data = on_gpu(4, 32)
    for _ in range(3):
        model(data).sum().backward()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:  # one micro-batch more, which stays on this rank
            stack.enter_context(model.no_sync())
            model(data).sum().backward()
    model(data).sum().backward()
    try:
        model(data).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_in_different_modes_find_out_in_the_next_step(gpu_ranks):
    for text in gpu_ranks.run(_disagrees):
        assert "rank 1 has begun 2 forwards" in text and "backward before this one" in text, text
