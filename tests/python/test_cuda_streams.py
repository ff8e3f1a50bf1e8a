"""What the host and the streams do on a GPU: no waiting, the user's streams, CUDA graphs, and late agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from gpus import COMMUNICATORS, MODES, NEEDS_GPU, Deep, check, on_gpu, pair_on_gpu

pytestmark = NEEDS_GPU


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


def _launches_for_buffers(layers: int) -> int:
    """Kernels and copies of the device in a step for the buffers of so many batch norms, on the rank that gets them."""
    inputs = on_gpu(4, 8)
    counts = []
    for buffers in (True, False):
        net = torch.nn.Sequential(*(torch.nn.BatchNorm1d(8) for _ in range(layers))).cuda()
        model = lockstep.DistributedDataParallel(net, broadcast_buffers=buffers)
        for _ in range(3):
            model(inputs).sum().backward()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            model(inputs).sum().backward()
            torch.cuda.synchronize()
        on_device = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
        counts.append(sum(1 for event in on_device if not event.is_user_annotation))
    return counts[0] - counts[1]


def test_buffers_of_all_layers_arrive_in_a_few_launches(gpu_ranks):
    few, many = (gpu_ranks.run(_launches_for_buffers, layers)[1] for layers in (4, 32))
    assert few > 0 and many < few + 8  # by a launch for each buffer it would be 84 more


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


def _disagrees() -> str:
    model = lockstep.DistributedDataParallel(Deep().cuda())
    data = on_gpu(4, 32)
    for _ in range(3):
        model(data).sum().backward()
    if dist.get_rank() == 1:  # one micro-batch more, which stays on this rank
        with model.no_sync():
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
