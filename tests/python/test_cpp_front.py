"""Programs in C++ with real processes, started by hand, by torchrun, and as mpirun would: no Python in any of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from cpp_programs import BUILD, DIGITS, GPT, HANG, ROOT, WORKER, by_mpirun, free_port, launch, report_of

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


def _weights_from_python(engine: str) -> bytes:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    wrapper = lockstep.DistributedDataParallel if engine == "lockstep" else nn.parallel.DistributedDataParallel
    model = wrapper(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        images = ((torch.arange(8 * 784) * 5 + 11 * dist.get_rank() + 3 * step) % 13 - 6).float().view(8, 784) / 8
        labels = (torch.arange(8) + dist.get_rank() + step) % 10
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for p in net.parameters())


def test_a_seed_gives_the_weights_that_it_gives_in_python(ranks, tmp_path):
    """https://github.com/pytorch/pytorch/issues/48959"""
    assert [status for status, _, _ in launch(WORKER, "weights", tmp_path / "out")] == [0, 0]
    first, second = (np.frombuffer((tmp_path / f"out.{rank}").read_bytes(), np.float32) for rank in (0, 1))
    assert np.array_equal(first, second)
    for engine in ("lockstep", "torch"):
        wanted = np.frombuffer(ranks.run(_weights_from_python, engine)[0], np.float32)
        np.testing.assert_allclose(first, wanted, rtol=0, atol=1e-7)


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


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")
def test_mpirun_starts_ranks_that_find_each_other(digits_file):
    own = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
    env = {name: value for name, value in os.environ.items() if name not in own}
    env |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}  # 29500, without it, may be another test's
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    command += [str(DIGITS), "--data", str(digits_file), "--epochs", "1"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["world_size"] == 2
    assert report["rank_difference"] == 0.0


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
    for status, _, errors in launch(WORKER, "train", "5"):
        assert status == 0, errors
        assert "leaves without" not in errors  # each rank has waited for the other one, and so ended well
    survivor, killed = launch(WORKER, "train", "1000", "1", "5")
    assert killed[0] == -9
    assert survivor[0] == 3, survivor
    assert "lockstep::Error" in survivor[2]
    assert "rank 1" in survivor[2]


def test_a_forked_child_leaves_the_group_alone():
    results = launch(WORKER, "fork")
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[0][1].splitlines() == ["trained 3 steps on 2 ranks"]


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
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)  # engine and program find torch by themselves
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
