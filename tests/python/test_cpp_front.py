"""Programs in C++ with real processes, started by hand, by torchrun, and as mpirun would: no Python in any of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build" / "release"))
WORKER = BUILD / "front" / "front_worker"
DIGITS, GPT = BUILD / "examples" / "digits", BUILD / "examples" / "gpt"

#: In seconds. Everything here takes a few on an idle machine.
HANG = 100

Result = tuple[int, str, str]


def by_hand(rank: int, world_size: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size)} | where


def by_mpirun(rank: int, world_size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_SIZE": world_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}


def launch(
    *command: object,
    ranks: tuple[int, ...] = (0, 1),
    world_size: int = 2,
    how: Callable[[int, int, int], dict[str, str]] = by_hand,
) -> list[Result]:
    """Run ``command`` as each of ``ranks``; return exit status, stdout and stderr of each. None outlives the call."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | how(rank, world_size, port),
        )
        for rank in ranks
    ]
    try:
        deadline = time.monotonic() + HANG
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def report_of(results: list[Result]) -> dict[str, Any]:
    """The JSON object that rank 0 printed last."""
    assert [status for status, _, _ in results] == [0] * len(results), results
    return json.loads(results[0][1].splitlines()[-1])


# ---- the same gradients as from Python ----


def _net() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 5))
    with torch.no_grad():
        for salt, parameter in enumerate(net.parameters()):
            values = (torch.arange(parameter.numel()) * 7 + 3 * salt) % 17 - 8
            parameter.copy_(values.float().view(parameter.shape) / 64)
    return net


def _batch(step: int) -> torch.Tensor:
    return ((torch.arange(3 * 36) * 5 + 11 * dist.get_rank() + 3 * step) % 13 - 6).float().view(3, 1, 6, 6) / 8


MODES: list[tuple[dict[str, Any], str, dict[str, Any], bool]] = [
    ({}, "allreduce", {}, False),
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002}, "allreduce", {}, True),
    ({"find_unused_parameters": True}, "fp16", {}, False),
    ({"static_graph": True}, "power_sgd", {"rank": 2, "start_iteration": 1}, False),
]


def _gradients_from_python() -> bytes:
    content = b""
    for options, hook, arguments, accumulate in MODES:
        model = lockstep.DistributedDataParallel(_net(), **options)
        model.set_comm_hook(hook, **arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            if accumulate:
                with model.no_sync():
                    model(_batch(step + 50)).square().mean().backward()
            model(_batch(step)).square().mean().backward()
            content += b"".join(p.grad.contiguous().numpy().tobytes() for p in model.parameters())
            optimizer.step()
    return content


def test_gradients_are_those_of_the_python_front_bit_for_bit(ranks, tmp_path):
    assert [status for status, _, _ in launch(WORKER, "gradients", tmp_path / "out")] == [0, 0]
    from_python = ranks.run(_gradients_from_python)
    for rank, wanted in enumerate(from_python):
        got = (tmp_path / f"out.{rank}").read_bytes()
        assert len(got) == len(wanted)
        assert got == wanted, f"rank {rank} differs"


# ---- the example programs ----


@pytest.fixture(scope="module")
def digits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("digits") / "digits.bin"
    subprocess.run([sys.executable, ROOT / "csrc/examples/export_digits.py", path], check=True, timeout=HANG)
    return path


def test_digits_learn_and_a_resumed_run_is_the_uninterrupted_one(digits_file, tmp_path):
    options = ["--data", digits_file, "--accumulate", "2", "--batch-size", "16"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    whole = subprocess.run(
        [*torchrun, DIGITS, *options, "--epochs", "4"], check=True, timeout=HANG, capture_output=True, text=True
    )
    expected = json.loads(whole.stdout.splitlines()[-1])
    assert expected["world_size"] == 2
    assert expected["rank_difference"] == 0.0
    assert expected["accuracy"] > 0.8

    checkpoint = ["--checkpoint", tmp_path / "state.pt"]
    assert report_of(launch(DIGITS, *options, *checkpoint, "--epochs", "2"))["first_epoch"] == 0
    resumed = report_of(launch(DIGITS, *options, *checkpoint, "--epochs", "4", "--resume", "--views", how=by_mpirun))
    assert resumed["first_epoch"] == 2
    for name in ("loss", "test_loss", "accuracy"):
        assert resumed[name] == expected[name]
    refused = launch(DIGITS, *options[:2], *checkpoint, "--resume")  # with another batch size
    assert [status for status, _, _ in refused] == [2, 2]
    assert "was written with" in refused[0][2]


def test_gpt_learns_a_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the same line again and again, so that even ten steps teach something\n" * 40)
    model = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "4"]
    results = launch(GPT, "--text", text, *model, "--steps", "30", "--lr", "0.01", "--log-every", "10")
    report = report_of(results)
    losses = [float(loss) for loss in re.findall(r"loss ([0-9.]+), \d+ tokens/s", results[0][2])]
    assert len(losses) == 3
    assert report["loss"] < losses[0] < 5.6
    assert report["tokens_per_second"] > 0


@pytest.fixture
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces, 10.77.0.1 and 10.77.0.2, joined by a cable."""
    names = (f"ls{os.getpid()}a", f"ls{os.getpid()}b")
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add v0 netns {names[0]} type veth peer name v0 netns {names[1]}")
    for number, name in enumerate(names, start=1):
        commands += [f"-n {name} addr add 10.77.0.{number}/24 dev v0"]
        commands += [f"-n {name} link set {device} up" for device in ("lo", "v0")]
    try:
        try:
            for command in commands:
                subprocess.run(["ip", *command.split()], check=True, capture_output=True, timeout=HANG)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("network namespaces need root, the right to make them, and iproute2")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=HANG)


def test_two_hosts_under_torchrun(two_hosts):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--no-python"]
    where = ["--master-addr", "10.77.0.1", "--master-port", "29500"]
    nodes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *torchrun, *where, "--node-rank", str(node), str(WORKER), "train", "3"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node, name in enumerate(two_hosts)
    ]
    try:
        outputs = [node.communicate(timeout=HANG) for node in nodes]
    finally:
        for node in nodes:
            node.terminate()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert outputs[0][0].splitlines() == ["trained 3 steps on 2 ranks"] * 2


# ---- what goes wrong ----


def test_two_worlds_after_each_other_and_a_rank_that_is_killed():
    assert [status for status, _, _ in launch(WORKER, "train", "5")] == [0, 0]
    survivor, killed = launch(WORKER, "train", "1000", "1", "5")
    assert killed[0] == -9
    assert survivor[0] == 3, survivor
    assert "lockstep::Error" in survivor[2]
    assert "rank 1" in survivor[2]


def test_says_which_variable_or_rank_is_missing():
    (alone,) = launch(WORKER, "join", "300", ranks=(0,), how=lambda *_: {})
    assert alone[0] == 3
    assert "the environment variable WORLD_SIZE" in alone[2]
    assert "torchrun --standalone" in alone[2]
    first, second = launch(WORKER, "join", "1500", world_size=3)
    assert first[0] == second[0] == 3
    assert "missing 2" in first[2]
    # On a busy machine the second one comes so late that the first has given up.
    assert "missing 2" in second[2] or "the store does not answer" in second[2]
    (without_first,) = launch(WORKER, "join", "1500", ranks=(1,))
    assert without_first[0] == 3
    assert "missing 0" in without_first[2]


# ---- the package ----


def test_the_library_knows_nothing_of_python():
    library = BUILD / "liblockstep.so"
    symbols = subprocess.run(["nm", "-D", library], check=True, capture_output=True, text=True).stdout
    assert "lockstep" in symbols
    assert re.findall(r" _?Py[A-Z_]\w*", symbols) == []
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert "libtorch_cpu" in needed
    assert re.findall(r"NEEDED.*python", needed) == []


def test_the_template_project_builds_against_the_package(tmp_path, monkeypatch):
    # A package that was installed in place (pip install -e) has no torch beside it, where the engine looks for it.
    monkeypatch.setenv("LD_LIBRARY_PATH", str(Path(torch.__file__).parent / "lib"))
    asked = [sys.executable, "-m", "lockstep", "--cmake-prefix-path"]
    prefix = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=HANG).stdout.strip()
    paths = f"-DCMAKE_PREFIX_PATH={prefix};{torch.utils.cmake_prefix_path}"
    for command in (
        ["cmake", "-G", "Ninja", "-S", ROOT / "docs/cpp/template", "-B", tmp_path, paths],
        ["cmake", "--build", tmp_path],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=3 * HANG)
        assert done.returncode == 0, done.stdout + done.stderr
    results = launch(tmp_path / "template")
    assert re.fullmatch(r"2 ranks, loss \d\.\d{4}\n", results[0][1]), results
