"""The engine on GPUs and NCCL, against the plain oracle. Skipped where there is no GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from gpus import COMMUNICATORS, MODES, NEEDS_GPU, Deep, check, checked_steps, on_gpu, pair_on_gpu

pytestmark = NEEDS_GPU


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


def _mode(options: dict[str, Any], communicator: str | lockstep.Nccl, dtype: torch.dtype) -> None:
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


def test_our_communicator_takes_settings_of_nccl(gpu_ranks):
    settings = lockstep.Nccl(max_ctas=2, net_name="Socket", split_share=True)
    gpu_ranks.run(_mode, MODES["default"], settings, torch.float32, timeout=90)


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


class Large(nn.Module):
    """Gradients from 256 KiB to 16 MiB, in two memory orders, small ones between, and a branch that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)  # 288 KiB in fp32
        self.wide = nn.Linear(128, 2**15)  # 16 MiB
        self.extra = nn.Linear(128, 2**15)
        self.head = nn.Linear(2**15, 3)

    def forward(self, arguments: tuple[torch.Tensor, bool]) -> torch.Tensor:
        x, extra = arguments
        x = self.conv(x.to(memory_format=torch.channels_last)).mean((2, 3))
        return self.head(self.wide(x) + (self.extra(x) if extra else 0))


def _in_place(options: dict[str, Any], communicator: str) -> None:
    pair = pair_on_gpu(Large, communicator=communicator, **options)
    unused = options.get("find_unused_parameters", False)
    for step in range(6):
        # From all ranks to one, to none and back: late gradients, and one that stays None.
        extra = not unused or step % 3 == 0 or (step % 3 == 1 and dist.get_rank() == 0)
        if step == 2:
            with pair.wrapped.no_sync():
                pair.backward(lambda extra=extra: (on_gpu(2, 64, 6, 6, step=20), extra))
        pair.backward(lambda step=step, extra=extra: (on_gpu(2, 64, 6, 6, step=step), extra))
        check(pair)
        pair.zero()


@pytest.mark.parametrize("communicator", COMMUNICATORS)
@pytest.mark.parametrize("mode", MODES)
def test_large_gradients_are_reduced_where_they_lie(gpu_ranks, mode: str, communicator: str):
    gpu_ranks.run(_in_place, MODES[mode], communicator, timeout=90)


def _memory_of_buckets(options: dict[str, Any], layers: int = 4, width: int = 2048) -> int:
    """Bytes that wrapping a model with 64 MiB of large gradients and a step leave behind, gradients dropped."""
    net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = lockstep.DistributedDataParallel(net, **options)
    for _ in range(3):
        model(on_gpu(2, width)).sum().backward()
        model.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def test_large_gradients_need_no_bucket_memory(gpu_ranks):
    for communicator in COMMUNICATORS:
        assert max(gpu_ranks.run(_memory_of_buckets, {"communicator": communicator})) < 2**20
    assert min(gpu_ranks.run(_memory_of_buckets, {"gradient_as_bucket_view": True})) >= 2**26


def test_what_our_communicator_averages_in_place_depends_on_the_way_to_the_other_ranks(gpu_ranks):
    def needs_buckets(communicator: Any) -> bool:
        left = gpu_ranks.run(_memory_of_buckets, {"communicator": communicator}, 16, 1024)  # 4 MiB each
        assert all(size < 2**20 for size in left) or all(size >= 2**26 for size in left), left
        return left[0] >= 2**26

    one_host = torch.cuda.device_count() >= 2  # ranks that share a GPU pretend to be on two
    assert needs_buckets("nccl") is not one_host
    assert not needs_buckets(lockstep.Nccl(in_place_mb=4))
    assert needs_buckets(lockstep.Nccl(in_place_mb=float("inf")))


def _wraps_with_a_size_of_its_own() -> str:
    with pytest.raises(RuntimeError, match=r"different in_place_mb .*on rank 0 0;.*LS-019") as raised:
        lockstep.DistributedDataParallel(
            nn.Linear(2, 2).cuda(), communicator=lockstep.Nccl(in_place_mb=float(dist.get_rank()))
        )
    return str(raised.value)


def test_a_size_that_differs_between_ranks_is_said_on_all_of_them(gpu_ranks):
    for rank, text in enumerate(gpu_ranks.run(_wraps_with_a_size_of_its_own)):
        assert f"[rank {rank}]" in text


def _checkpointed(communicator: str, static: bool) -> None:
    pair = pair_on_gpu(lambda: Deep(checkpointed=True), communicator=communicator, static_graph=static)
    checked_steps(pair, lambda step: on_gpu(4, 32, step=step))


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
    pair = pair_on_gpu(ComplexNet, communicator=communicator, gradient_as_bucket_view=views)
    checked_steps(pair, lambda step: on_gpu(4, 6, step=step))


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
    checked_steps(pair, lambda step: (on_gpu(4, 3, 8, 8, step=step), True))


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
