"""The measuring tools and weighted gradients on GPUs: what CPU tests show of them, with streams and events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import lockstep
import recipes
from gpus import COMMUNICATORS, NEEDS_GPU, Deep, on_gpu
from lockstep.timing import PHASES
from lockstep.tools.bench.trainer import Trainer
from lockstep.tools.cli import commands
from oracle import rank_data
from test_step_weight import WEIGHTS

pytestmark = NEEDS_GPU

#: Skips where the tools cannot give each rank a GPU of its own.
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def _samples(device: str, rank: int, micro: int, step: int) -> torch.Tensor:
    """As many as the weight of this micro-batch says."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(int(2 * WEIGHTS[rank][micro]), 32, generator=generator).to(device)


def _weighted(device: str, communicator: str, views: bool) -> None:
    torch.manual_seed(0)
    net = Deep().to(device)
    torch.manual_seed(0)
    alone = Deep().to(device)
    model = lockstep.DistributedDataParallel(
        net, communicator=communicator, gradient_as_bucket_view=views, bucket_cap_mb=0.01
    )
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(2):
            own = _samples(device, dist.get_rank(), micro, step)
            model.set_step_weight(len(own))
            if micro == 0:
                with model.no_sync():
                    model(own).square().sum(1).mean().backward()
            else:
                model(own).square().sum(1).mean().backward()
        ranks = range(dist.get_world_size())
        everything = [_samples(device, rank, micro, step) for rank in ranks for micro in range(2)]
        alone.zero_grad()
        alone(torch.cat(everything)).square().sum(1).mean().backward()  # one process that has seen them all
        for (name, ours), theirs in zip(net.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(
                ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_unequal_weights_equal_one_process_that_has_seen_everything(gpu_ranks, communicator: str, views: bool):
    gpu_ranks.run(_weighted, "cuda", communicator, views)


#: In seconds: two streams wait for the same end of a collective, and each notes it when its turn comes.
_STREAMS_APART = 1e-3


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _recorded(device: str, communicator: str) -> dict[str, Any]:
    model = lockstep.DistributedDataParallel(Deep().to(device), communicator=communicator, bucket_cap_mb=0.01)
    model.record_comm()
    for step in range(5):
        model(rank_data(4, 32, step=step).to(device)).sum().backward()
    _synchronize(device)  # so that the last pass counts
    report = model.comm_report()
    for one in report.ranks[dist.get_rank()]:
        assert 0 < one.forward_start <= one.backward_start <= one.backward_end <= one.end < one.forward_start + 60
        for bucket in one.buckets:
            assert one.backward_start <= bucket.ready <= bucket.started <= bucket.sent <= one.end
            assert bucket.wait_start <= bucket.wait_end <= one.end and bucket.ended <= one.end + _STREAMS_APART
            (collective,) = bucket.collectives
            assert collective.exact and bucket.started <= collective.issued <= collective.begun <= collective.ended
    last = report.ranks[dist.get_rank()][-1]
    assert len(last.buckets) > 2 and all(bucket.names and bucket.bandwidth(2) > 0 for bucket in last.buckets)
    return json.loads(json.dumps(report.as_dict()))


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_every_bucket_is_ready_then_sent_then_there(gpu_ranks, communicator: str):
    first, second = gpu_ranks.run(_recorded, "cuda", communicator)
    assert first == second and first["passes"] == 5


def _recorded_under_capture(communicator: str) -> int:
    static_input = on_gpu(4, 32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model = lockstep.DistributedDataParallel(Deep().cuda(), communicator=communicator, bucket_cap_mb=0.01)
        model.record_comm()
        for _ in range(11):
            model.zero_grad(set_to_none=True)
            model(static_input).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    assert len(model.reducer.take_recorded()) == 11
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        model(static_input).square().sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    replayed = [parameter.grad.clone() for parameter in model.parameters()]
    assert model.reducer.take_recorded() == [], "what is captured is not recorded"
    model.zero_grad(set_to_none=True)  # and back to eager steps
    model(static_input).square().sum().backward()
    torch.cuda.synchronize()
    for early, parameter in zip(replayed, model.parameters(), strict=True):
        torch.testing.assert_close(early, parameter.grad)
    return len(model.reducer.take_recorded())


@pytest.mark.parametrize("communicator", COMMUNICATORS)
def test_recording_leaves_out_what_is_captured_into_a_graph(gpu_ranks, communicator: str):
    assert gpu_ranks.run(_recorded_under_capture, communicator) == [1, 1]


class Heavy(nn.Module):
    """Some milliseconds of work for a GPU, for few launches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def _timed(device: str, net: type[nn.Module], width: int, rows: int) -> list[dict[str, float]]:
    model = lockstep.DistributedDataParallel(net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)
    timer = lockstep.StepTimer(model, optimizer)
    for batch in timer.batches(rank_data(rows, width).to(device) for _ in range(11)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    timer.close()
    return timer.steps()


def test_the_parts_of_a_step_add_up_on_a_gpu_and_the_gpu_is_behind_when_it_has_much_to_do(gpu_ranks):
    for steps in gpu_ranks.run(_timed, "cuda", Heavy, 4096, 8192, timeout=60):
        assert len(steps) == 8
        for step in steps:
            assert sum(step[phase] for phase in PHASES) == pytest.approx(step["step"], rel=0.01, abs=2e-5)
            assert min(step.values()) >= 0 and step["backward"] > step["optimizer"] > 0
        assert sum(step["behind"] for step in steps) > len(steps) / 2


def _waits_of_timed_steps() -> dict[str, int]:
    """Calls by which the host waits for the device, in two timed steps with recorded buckets."""
    model = lockstep.DistributedDataParallel(Deep().cuda(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, foreach=True)
    model.record_comm()
    timer = lockstep.StepTimer(model, optimizer)
    inputs = on_gpu(4, 32)

    def steps(count: int) -> None:
        for batch in timer.batches([inputs] * count):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    steps(5)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler, torch.profiler.record_function("steps"):
        steps(2)
    whole = next(event for event in profiler.events() if event.name == "steps").time_range
    waits: dict[str, int] = {}
    for event in profiler.events():
        waiting = "Synchronize" in event.name or event.name in ("aten::item", "aten::_local_scalar_dense")
        if waiting and whole.start <= event.time_range.start <= whole.end:
            waits[event.name] = waits.get(event.name, 0) + 1
    return waits


def test_measuring_never_makes_the_host_wait_within_a_step(gpu_ranks):
    assert gpu_ranks.run(_waits_of_timed_steps) == [{}, {}]


def _batch_from(kind: str) -> tuple[str, int]:
    made = recipes.right()
    if kind == "on the GPU":
        made.dataset.inputs, made.dataset.labels = made.dataset.inputs.cuda(), made.dataset.labels.cuda()
    trainer = Trainer(lambda: made, dist.get_rank(), dist.get_world_size(), "cuda")
    trainer.wrap(record=True)
    times, _ = trainer.steps(3)
    trainer.model.assert_in_sync()
    trainer.unwrap()
    return str(next(made.model.parameters()).device.type), len(times)


@pytest.mark.parametrize("kind", ["in memory", "on the GPU"])
def test_a_recipe_is_trained_on_the_gpu_wherever_its_samples_lie(gpu_ranks, kind: str):
    assert gpu_ranks.run(_batch_from, kind) == [("cuda", 3)] * 2


RECIPES = Path(recipes.__file__)


def _answer(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(commands, [*arguments, "--device", "cuda", "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@NEEDS_TWO
@pytest.mark.slow
@pytest.mark.timeout(300)
class TestCommand:
    @pytest.mark.parametrize("name", ["right", "right_language_model"])
    def test_align_reaches_level_2(self, name: str):
        found = _answer("align", f"{RECIPES}:{name}", "--steps", "20")
        assert found["level"] >= 2 and found["causes"] == []

    def test_scaling_names_the_transport_and_the_gpu(self):
        found = _answer("bench", "scaling", f"{RECIPES}:right", "--rounds", "2", "--steps", "4")
        assert found["transport"] != "unknown" and found["environment"]["gpu"] and found["environment"]["nccl"]
        assert sum(cause["seconds"] for cause in found["causes"]) == pytest.approx(found["lost"], rel=0.1)

    def test_tune_tries_the_direct_communicator(self):
        found = _answer("tune", f"{RECIPES}:right", "--rounds", "3", "--steps", "4")
        assert any("communicator='nccl'" in trial["name"] for trial in found["trials"])

    def test_comm_measures_group_and_both_communicators(self):
        (row,) = _answer("bench", "comm", "--min", "1M", "--max", "1M")["sizes"]
        assert row["seconds"].keys() == {"group", "lockstep auto", "lockstep nccl"}
