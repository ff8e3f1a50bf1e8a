"""The benchmarks of whole steps run from end to end, and count as they say; how fast anything is, is not tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("rich", reason="the benchmarks print with rich")

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SMOKE = ["--scale", "tiny", "--device", "cpu", "--models", "gpt-small", "--rounds", "2", "--steps", "2"]


@pytest.fixture
def benchmark_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def launch(script: str, *arguments: str, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(BENCHMARKS / script), *SMOKE, *arguments],
        capture_output=True, text=True, timeout=110, env=environment,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.benchmark_smoke
def test_step_tax_measures_every_contender_on_two_processes(tmp_path):
    result = tmp_path / "step_tax.json"

    ran = launch("step_tax.py", "--json", str(result))

    assert ran.returncode == 0, ran.stdout + ran.stderr
    (model,) = json.loads(result.read_text())["models"]
    rows = {row["contender"]: row for row in model["rows"]}
    assert list(rows) == [
        *("no reduction", "limit", "torch default", "torch tuned"),
        *("lockstep default", "lockstep views", "torch unused", "lockstep unused"),
    ]
    for name, row in rows.items():
        assert row["status"] == "ok"
        assert row["step_ms"] > 0 and len(row["step_ms_rounds"]) == 2
        assert (row["gradient_error"] is None) == (name in ("no reduction", "limit"))
    assert rows["no reduction"]["collectives"] == 0
    assert rows["limit"]["collectives"] == 1
    assert rows["lockstep default"]["collectives"] >= 1
    shown = subprocess.run(
        [sys.executable, str(BENCHMARKS / "step_tax.py"), "--markdown", str(result)],
        capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    assert "| torch tuned | " in shown


@pytest.mark.slow
@pytest.mark.benchmark_smoke
def test_a_contender_that_fails_does_not_stop_the_others(tmp_path):
    result = tmp_path / "hook_tax.json"

    ran = launch(
        "hook_tax.py", "--contenders", "torch fp16", "--sweep", "bucket_cap_mb='large',25",
        "--group-size", "1", "--no-profile", "--json", str(result),
    )  # fmt: skip

    assert ran.returncode != 0
    rows = [(row["contender"], row["status"]) for row in json.loads(result.read_text())["models"][0]["rows"]]
    assert rows == [
        ("torch fp16, bucket_cap_mb=large", "failed"),
        ("no reduction", "ok"),
        ("limit", "ok"),
        ("torch fp16, bucket_cap_mb=25", "ok"),
    ]


@pytest.mark.slow
@pytest.mark.benchmark_smoke
def test_timer_cost_measures_every_model_with_and_without_the_timer(tmp_path):
    result = tmp_path / "timer_cost.json"

    ran = launch("timer_cost.py", "--json", str(result))

    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(result.read_text())
    assert [model["model"] for model in found["models"]] == [
        *("MLP, 4 layers of 256", "MLP, 8 layers of 1024", "GPT-small, 2 x 32"),
    ]
    for model in found["models"]:
        assert len(model["with_ms"]) == len(model["without_ms"]) == 2
        assert min(*model["with_ms"], *model["without_ms"]) > 0


def test_an_excess_compares_equal_rounds(benchmark_modules):
    from _step_report import excess_pct

    # 50, 20 and 0 percent. The medians alone, 20 and 12, would say 67.
    assert excess_pct([15, 24, 20], [10, 20, 20]) == pytest.approx(20)


def gradient_error(weight: float, tolerance: float, local: float = 0.0) -> float:
    """Error of an engine that multiplies the mean by ``weight`` and adds ``local`` of this rank's gradient."""
    import torch.distributed as dist

    sys.path.insert(0, str(BENCHMARKS))
    from _contenders import Contender
    from _models import models
    from _step_timing import Runner, Subject

    def wrap(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
        def reduce(parameter: torch.Tensor) -> None:
            own = parameter.grad.clone()
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(weight / dist.get_world_size()).add_(own, alpha=local)

        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        return module

    subject = Subject.of(models("tiny")["gpt-small"], torch.device("cpu"))
    expected = subject.mean_gradients()
    return Runner(Contender("engine", wrap, tolerance=tolerance), subject).gradient_error(expected)


def test_gradients_are_checked_before_anything_is_timed(ranks):
    assert ranks.run(gradient_error, 1.0, 0.02) == pytest.approx([0, 0], abs=1e-6)
    assert ranks.run(gradient_error, 1.01, 0.02) == pytest.approx([0.01, 0.01], abs=1e-4)
    for wrong, says in (((2.0, 0.02), "from the mean"), ((0.999, 0.02, 1e-3), "differ between ranks")):
        for outcome in ranks.outcomes(gradient_error, *wrong):
            assert isinstance(outcome, AssertionError) and says in str(outcome)


def test_copies_share_memory_but_neither_gradients_nor_hooks(benchmark_modules):
    from _step_timing import Subject

    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    copy = Subject(module, (torch.ones(1), torch.ones(1)), torch.device("cpu")).copy()
    for mine, other in zip(module.parameters(), copy.parameters(), strict=True):
        assert mine is not other and mine.data_ptr() == other.data_ptr()
    copy(torch.randn(3, 2)).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert module[1].num_batches_tracked == 0


def test_device_work_is_counted_by_kind(benchmark_modules):
    from _step_timing import count_events

    events = [
        {"cat": "kernel", "name": "void pack_kernel<float>"},
        {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL"},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoD"},
        {"cat": "gpu_memset", "name": "Memset"},
        {"cat": "cuda_runtime", "name": "cudaStreamSynchronize"},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel"},
        {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize"},
        {"cat": "gpu_user_annotation", "name": "nccl:all_reduce"},
        {"cat": "user_annotation", "name": "gloo:all_reduce"},
        {"name": "process_name"},
    ]

    assert count_events(events, cuda=True) == {"kernels": 2, "copies": 2, "collectives": 1, "waits": 1}
    assert count_events(events[-2:], cuda=False) == {"collectives": 1}


def test_budget_shares_what_is_left(benchmark_modules, monkeypatch):
    import _step_run

    now = SimpleNamespace(monotonic=lambda: 0.0)
    monkeypatch.setattr(_step_run, "time", now)
    monkeypatch.setattr(_step_run.Budget, "_told", staticmethod(lambda value: value))
    budget = _step_run.Budget(200, counting=False)
    assert budget.rounds(12, round_seconds=10, share=0.5) == 10
    assert budget.rounds(12, round_seconds=1, share=0.5) == 12
    assert budget.rounds(12, round_seconds=1000, share=0.5) == 3
    assert budget.rounds(2, round_seconds=1000, share=0.5) == 2
