"""``model.comm_report()``: what became of each bucket, in the order of things, on all ranks and one clock."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.timing import clocks
from lockstep.timing.bandwidth import bus_bandwidth
from lockstep.timing.comm_report import CommReport, Pass
from models import Reversed
from oracle import rank_data

STEPS = 4


def _recorded(hook: str | None = None, steps: int = STEPS, python_hook=None) -> tuple[nn.Module, CommReport]:
    model = lockstep.DistributedDataParallel(Reversed(), bucket_cap_mb=0.0002)
    if hook:
        model.set_comm_hook(hook)
    if python_hook:
        model.register_comm_hook(None, python_hook, native=False)
    model.record_comm()
    for step in range(steps):
        model.zero_grad()
        model(rank_data(3, 6, step=step)).sum().backward()
    return model, model.comm_report()



def _check_order(one: Pass) -> None:
    assert one.forward_start <= one.backward_start <= one.backward_end <= one.end
    for bucket in one.buckets:
        assert one.backward_start <= bucket.ready <= bucket.started <= bucket.sent
        assert bucket.sent <= bucket.wait_start <= bucket.wait_end <= one.end
        for collective in bucket.collectives:
            assert collective.issued <= collective.begun <= collective.ended <= one.end
            assert bucket.started <= collective.issued


def _report_of_a_model() -> dict:
    model, report = _recorded()
    for passes in report.ranks:
        assert [one.number for one in passes] == list(range(STEPS))
        for one in passes:
            _check_order(one)
            assert [bucket.number for bucket in one.buckets] == list(range(len(one.buckets)))
        assert len(passes[0].buckets) == 1, "the first plan has one bucket"
    members = [[model.reducer.param_names[i] for i in bucket] for bucket in model.reducer.bucket_params()]
    last = report.ranks[dist.get_rank()][-1]
    assert len(last.buckets) > 2
    assert [bucket.names for bucket in last.buckets] == members
    assert [bucket.size for bucket in last.buckets] == model.reducer.bucket_payload_bytes()
    for bucket in last.buckets:
        (collective,) = bucket.collectives
        assert collective.kind == "all_reduce" and collective.exact and collective.size >= bucket.size
        assert bucket.bandwidth(2) > 0
    return json.loads(json.dumps(report.as_dict()))


def test_every_bucket_is_ready_then_sent_then_there(ranks):
    first, second = ranks.run(_report_of_a_model)
    assert first == second, "all ranks get the same report"
    assert first["passes"] == STEPS and len(first["ranks"]) == 2
    assert all(rank["exposed_ms"] >= 0 for rank in first["ranks"])


def _kinds_of(hook: str) -> list[tuple[str, int]]:
    _, report = _recorded(hook)
    return [(one.kind, one.size) for one in report.ranks[0][-1].buckets[0].collectives]


def test_collectives_of_a_hook_in_two_rounds_belong_to_their_bucket(ranks):
    assert [kind for kind, _ in ranks.run(_kinds_of, "int8")[0]] == ["all_to_all", "all_gather"]
    half, full = ranks.run(_kinds_of, "bf16")[0], ranks.run(_kinds_of, "allreduce")[0]
    assert 2 * half[0][1] == full[0][1], "bytes on the wire"


def _python_hook() -> tuple[int, bool]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    _, report = _recorded(python_hook=allreduce_hook)
    bucket = report.ranks[0][-1].buckets[0]
    _check_order(report.ranks[0][-1])
    return len(bucket.collectives), bucket.ended == bucket.wait_end


def test_a_hook_in_python_is_timed_by_its_waits(ranks):
    assert ranks.run(_python_hook)[0] == (0, True)


def _switched() -> None:
    model, _ = _recorded()
    with pytest.raises(RuntimeError, match="LS-148"):
        model.comm_report()  # all have been reported
    model.record_comm(False)
    model(rank_data(3, 6)).sum().backward()
    assert model.reducer.take_recorded() == []
    model.record_comm()
    for step in range(70):
        model(rank_data(3, 6, step=step)).sum().backward()
    assert len(model.reducer.take_recorded()) == 64, "the newest are kept"
    model(rank_data(3, 6)).sum().backward()  # the ranks are still in step


def test_recording_is_switched_and_bounded(ranks):
    ranks.run(_switched)


def _only_the_reduced() -> list[int]:
    model, _ = _recorded()
    with model.no_sync():
        model(rank_data(3, 6)).sum().backward()
    model(rank_data(3, 6)).sum().backward()
    with model.no_sync():
        model(rank_data(3, 6)).sum().backward()
    model.sync_gradients()
    report = model.comm_report()
    for one in report.ranks[0]:
        assert 0 < one.forward_start <= one.backward_start <= one.backward_end <= one.end
    return [one.number for one in report.ranks[0]]


def test_passes_that_stay_local_are_none(ranks):
    assert ranks.run(_only_the_reduced) == [[STEPS, STEPS + 1]] * 2


def _files(folder: str) -> None:
    _, report = _recorded()
    report.print()
    report.write_trace(f"{folder}/trace.json")
    report.draw(f"{folder}/overlap.png")
    report.draw(f"{folder}/overlap.svg", rank=1)


def test_the_timeline_has_all_ranks_and_the_picture_its_labels(ranks, tmp_path):
    pytest.importorskip("matplotlib")
    ranks.run(_files, str(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1} and all(event["dur"] >= 0 for event in slices)
    assert min(event["ts"] for event in slices) == 0
    # Slices of one track must not overlap, or Perfetto nests them.
    tracks: dict = {}
    for event in sorted(slices, key=lambda event: event["ts"]):
        key = event["pid"], event["tid"]
        assert tracks.get(key, 0) <= event["ts"] + 1e-3
        tracks[key] = event["ts"] + event["dur"]
    assert any("layers.0.weight" in str(event["args"].get("parameters")) for event in slices)
    width, height = struct.unpack(">II", (tmp_path / "overlap.png").read_bytes()[16:24])
    assert width > 1000 and height > 300
    assert "<svg" in (tmp_path / "overlap.svg").read_text()


def _offsets(monkeyed: bool) -> list[float]:
    if monkeyed and dist.get_rank() == 1:
        real_boot, real_time = clocks._boot, clocks.time

        class Ahead:
            @staticmethod
            def monotonic() -> float:
                return real_time.monotonic() + 1000.0

        clocks._boot, clocks.time = (lambda: "another host"), Ahead
        try:
            return clocks.offsets()
        finally:
            clocks._boot, clocks.time = real_boot, real_time
    return clocks.offsets()


def test_the_clock_of_another_host_is_brought_to_that_of_rank_0(ranks):
    assert ranks.run(_offsets, False) == [[0.0, 0.0]] * 2
    for zero, offset in ranks.run(_offsets, True):
        assert zero == 0.0 and offset == pytest.approx(-1000, abs=5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(kind, expected):
    assert bus_bandwidth(kind, 1_000_000_000, 1.0, ranks=4) == expected


def test_a_report_without_a_common_pass_says_what_to_do():
    with pytest.raises(RuntimeError, match="record_comm"):
        CommReport([[], []])


def _times_off() -> int:
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    return len(model.reducer.take_recorded())


def test_nothing_is_recorded_unless_asked_for(ranks):
    assert ranks.run(_times_off) == [0, 0]
