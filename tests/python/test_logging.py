"""The logging data of torch's class, field by field, and what the debug levels print."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from models import Branches
from oracle import rank_data
from ranks import RankPool

CONSTRUCTION = [
    "module_name", "backend_name", "device_ids", "dtypes", "bucket_sizes", "master_addr", "master_port",
    "torch_distributed_debug", "cuda_visible_devices", "gloo_socket_ifname", "gloo_device_transport",
    "world_size", "rank", "iteration", "is_multi_device_module", "num_parameter_tensors",
    "total_parameter_size_bytes", "output_device", "broadcast_buffers", "has_sync_bn", "bucket_cap_bytes",
    "find_unused_parameters", "gradient_as_bucket_view", "gloo_num_threads",
]

SPANS = ["forward_compute_time", "backward_compute_time", "backward_comm_time", "backward_compute_comm_overlap_time"]
SAMPLED = [
    *["rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"],
    *["num_buckets_reduced", "unused_parameter_size", "has_rebuilt_buckets"],
    *SPANS,
    *(f"avg_{name}" for name in SPANS),
    *["forward_compute_time_start", "backward_compute_time_start", "backward_compute_time_end"],
    *["backward_comm_time_start", "backward_comm_time_end"],
]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Linear(4, 4)
        self.double = nn.Linear(4, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.double(self.single(x).double())


def _at_construction(cls: type, options: dict) -> dict:
    model = cls(Mixed(), **options)
    return model._get_ddp_logging_data()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1.5},
        {"static_graph": True, "broadcast_buffers": False},
    ],
    ids=["default", "find_unused", "static"],
)
def test_construction_data_is_that_of_torch(ranks, options):
    ours = ranks.run(_at_construction, lockstep.DistributedDataParallel, options)
    theirs = ranks.run(_at_construction, TorchDDP, options)
    for rank in range(2):
        for name in CONSTRUCTION:
            if name in theirs[rank] or name != "gloo_socket_ifname":  # torch leaves that one out when it is unset
                assert ours[rank][name] == theirs[rank][name], name
        assert ours[rank]["rank"] == rank
        assert set(ours[rank]) == set(theirs[rank])


def _sampled(cls: type) -> tuple[dict, dict]:
    torch.manual_seed(1)
    model = cls(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), bucket_cap_mb=1e-6)
    for step in range(4):
        model(rank_data(3, 4, step=step)).sum().backward()
    model(rank_data(3, 4))  # samples the fourth
    first = model._get_ddp_logging_data()
    return first, {name: first[name] for name in SPANS}


def test_sampled_fields_are_all_there_and_mean_what_they_say(ranks):
    ours, theirs = (ranks.run(_sampled, cls) for cls in (lockstep.DistributedDataParallel, TorchDDP))
    for (data, spans), (of_torch, _) in zip(ours, theirs, strict=True):
        assert [name for name in SAMPLED if name not in data] == []
        equal = ["num_buckets_reduced", "unused_parameter_size", "has_rebuilt_buckets", "rebuilt_bucket_sizes"]
        equal += ["rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"]
        for name in equal:
            assert data[name] == of_torch[name], name
        assert data["forward_compute_time_start"] < data["backward_compute_time_start"]
        assert data["backward_compute_time_start"] < data["backward_comm_time_start"] <= data["backward_comm_time_end"]
        assert spans["forward_compute_time"] == (
            data["backward_compute_time_start"] - data["forward_compute_time_start"]
        )
        assert spans["backward_compute_time"] == (
            data["backward_compute_time_end"] - data["backward_compute_time_start"]
        )


def _sampling() -> list[int]:
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
    model._set_ddp_runtime_logging_sample_rate(4)
    seen = []
    for _ in range(18):
        model(torch.ones(1, 1)).sum().backward()
        seen.append(model._get_ddp_logging_data()["iteration"])
    return seen


def test_the_first_ten_steps_are_sampled_and_then_every_so_many(ranks):
    # Each forward samples the step before it, whose number it reports.
    sampled = [0, *range(1, 11), 10, 12, 12, 12, 12, 16, 16]
    assert ranks.run(_sampling) == [sampled] * 2


def _set_later() -> dict:
    model = lockstep.DistributedDataParallel(Branches())
    assert not {"comm_hook", "join_uneven_inputs", "has_error", "error"} & set(model._get_ddp_logging_data())
    model.register_comm_hook(None, allreduce_hook)
    with model.join():
        model((rank_data(3, 4), "ab")).sum().backward()
    for _ in range(2):
        try:
            model((rank_data(3, 4), "a")).sum().backward()
        except RuntimeError:
            return model._get_ddp_logging_data()
    raise AssertionError("the step was not refused")


def test_hook_join_and_error_are_logged_when_they_happen(ranks):
    for rank, data in enumerate(ranks.run(_set_later)):
        assert data["comm_hook"] == "allreduce_hook" and data["join_uneven_inputs"] and data["has_error"]
        assert "Expected to have finished reduction" in data["error"] and f"rank {rank}" in data["error"]


# ---- has the graph been static? ----


def _graph(options: dict, *branches: str) -> list[tuple[bool, int | None]]:
    model = lockstep.DistributedDataParallel(Branches(), **options)
    seen = []
    for step, of_ranks in enumerate(branches):
        mine = of_ranks.split("|")[dist.get_rank()] if "|" in of_ranks else of_ranks
        model((rank_data(3, 4, step=step), mine)).sum().backward()
        static = model.reducer._ddp_graph_static()
        seen.append((static, model._get_ddp_logging_data().get("can_set_static_graph")))
    return seen


def test_a_set_of_unused_parameters_that_changes_is_noticed(ranks):
    steps = [(True, None), (True, 1), (True, 1)]
    assert ranks.run(_graph, {"find_unused_parameters": True}, "a", "a", "a") == [steps] * 2
    steps = [(True, None), (False, 0), (False, 0), (False, 0)]
    assert ranks.run(_graph, {"find_unused_parameters": True}, "a", "ab", "ab", "ab") == [steps] * 2


def test_each_rank_speaks_of_its_own_graph(ranks):
    constant, changing = ranks.run(_graph, {"find_unused_parameters": True}, "a|a", "a|b", "a|a")
    assert constant == [(True, None), (True, 1), (True, 1)]
    assert changing == [(True, None), (False, 0), (False, 0)]


def test_other_modes_demand_a_static_graph_and_so_have_one(ranks):
    for options in ({}, {"static_graph": True}):
        assert ranks.run(_graph, options, "ab", "ab", "ab") == [[(True, None)] * 3] * 2


# ---- debug levels ----


def _unfinished() -> tuple[str, str, str]:
    model = lockstep.DistributedDataParallel(Branches())
    text = ""
    for _ in range(2):
        try:
            model((rank_data(3, 4), "a")).sum().backward()
        except RuntimeError as error:
            text = str(error)
    return text, dist.get_debug_level().name, model._get_ddp_logging_data()["torch_distributed_debug"]


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_training_works_and_errors_name_parameters_at_every_debug_level(monkeypatch, level):
    # DETAIL puts a group around the group that compares shapes and order of all collectives.
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    pool = RankPool(2)
    try:
        assert pool.run(_graph, {}, "ab", "ab", "ab") == [[(True, None)] * 3] * 2
        for rank, (text, in_effect, logged) in enumerate(pool.run(_unfinished)):
            assert (in_effect, logged) == (level, level)
            assert f"did not receive grad for rank {rank}: b.weight, b.bias" in text
    finally:
        pool.close()


def _output(**environment: str) -> str:
    script = """
        import torch, torch.distributed as dist, lockstep
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
        model = lockstep.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
        model.module.append(torch.nn.Linear(4, 4))
        try:
            model(torch.ones(1, 4))
        except RuntimeError as error:
            print("refused", error)
        unused = lockstep.DistributedDataParallel(model.module)
        unused.module.forward = model.module[0].forward
        unused(torch.ones(1, 4)).sum().backward()
        try:
            unused(torch.ones(1, 4))
        except RuntimeError as error:
            print("unfinished", error)
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "TORCH_CPP_LOG_LEVEL": "INFO", **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout + run.stderr


def test_info_prints_what_was_built_and_detail_how_long_steps_take():
    off, info, detail = (_output(TORCH_DISTRIBUTED_DEBUG=level) for level in ("OFF", "INFO", "DETAIL"))
    assert "DDP Initialized with" not in off
    for text in (info, detail):
        assert text.count("DDP Initialized with") == 2, "once for each wrapper; nothing about the logger's own scalar"
        assert "num_parameter_tensors: 4\n" in text and "total_parameter_size_bytes: 160\n" in text
        assert "num_parameter_tensors: 1\n" not in text
    assert "Avg forward compute time" not in info
    assert detail.count("Avg forward compute time") >= 2


def test_errors_of_the_engine_read_the_same_when_torch_is_to_show_cpp_stacks():
    text = _output(TORCH_SHOW_CPP_STACKTRACES="1")
    assert "refused [rank 0] 2 trainable parameters were added" in text
    assert "unfinished [rank 0] Expected to have finished reduction" in text
