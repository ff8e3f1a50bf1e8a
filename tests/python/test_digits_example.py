"""The example program, started as a user starts it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep
from lockstep.examples import _checkpoint, _data, digits

PROGRAM = ["-m", "lockstep.examples.digits"]

#: In seconds. A run takes 10 to 20 on two idle cores, most of it imports; this is for very busy ones.
HANG = 300


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """Start Python with ``command``, one thread a process, and with the ``lockstep`` that this test imports."""
    package_folder = str(Path(lockstep.__file__).parents[1])
    path = os.pathsep.join(filter(None, [package_folder, os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return stdout and stderr; fail if the process does not end within ``HANG`` seconds, and leave none behind."""
    try:
        return process.communicate(timeout=HANG)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun passes this on to its workers; a kill would orphan them
        stdout, stderr = process.communicate(timeout=60)
        pytest.fail(f"{process.args} did not end within {HANG} s\n{stdout}\n{stderr}")
    finally:
        if process.poll() is None:
            process.terminate()


def torchrun(*options: object, ranks: int = 2) -> dict[str, Any]:
    """Run the program with torchrun; return the report, which must be the last line of stdout."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    process = start([*launcher, *PROGRAM, *map(str, options)])
    stdout, stderr = finish(process)
    assert process.returncode == 0, stderr
    report = json.loads(stdout.splitlines()[-1])
    assert report["world_size"] == ranks
    assert report["rank_difference"] == 0.0
    return report


def model_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return torch.load(checkpoint, weights_only=True)["model"]


def bits(state: Any) -> Any:
    """Return a state dict with tensors replaced by their bytes, for comparisons with ``==``."""
    if isinstance(state, torch.Tensor):
        return state.numpy().tobytes()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return state


@pytest.mark.slow
@pytest.mark.timeout(4 * HANG)
class TestTraining:
    def test_defaults_learn_the_digits_and_equal_a_single_process(self) -> None:
        report = torchrun("--against-single")

        assert report["engine"] == "lockstep"
        assert report["accuracy"] >= 0.97
        assert report["single_difference"] <= 1e-4
        assert report["seconds"] > 0

    def test_accumulated_micro_batches_of_three_ranks_equal_a_single_process(self) -> None:
        report = torchrun("--epochs", 2, "--batch-size", 10, "--accumulate", 3, "--views", "--against-single", ranks=3)

        assert report["accumulate"] == 3
        assert report["single_difference"] <= 1e-4

    def test_one_process_needs_no_torchrun(self) -> None:
        process = start([*PROGRAM, "--epochs", "2"])
        stdout, stderr = finish(process)

        assert process.returncode == 0, stderr
        assert json.loads(stdout.splitlines()[-1])["world_size"] == 1

    def test_a_hook_that_rounds_gradients_stays_near_a_single_process(self) -> None:
        report = torchrun("--epochs", 2, "--hook", "fp16", "--against-single")

        assert report["hook"] == "fp16"
        assert 0 < report["single_difference"] <= 1e-2


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Return a function that gives the checkpoint of an engine after some epochs on two ranks, trained once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(engine: str, epochs: int) -> Path:
        path = folder / f"{engine}_{epochs}.pt"
        if not path.exists():
            torchrun("--engine", engine, "--epochs", epochs, "--checkpoint", path)
        return path

    return get


@pytest.mark.slow
@pytest.mark.timeout(4 * HANG)
@pytest.mark.xdist_group("checkpoints")  # which they share
class TestResume:
    def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
        self, checkpoint_of: Callable[[str, int], Path], tmp_path: Path
    ) -> None:
        resumed = tmp_path / "resumed.pt"
        resumed.write_bytes(checkpoint_of("lockstep", 1).read_bytes())

        report = torchrun("--epochs", 3, "--checkpoint", resumed, "--resume", "--against-single")

        uninterrupted = torch.load(checkpoint_of("lockstep", 3), weights_only=True)
        assert bits(torch.load(resumed, weights_only=True)) == bits(uninterrupted)
        assert report["first_epoch"] == 1
        assert report["single_difference"] <= 1e-4

    def test_lockstep_continues_the_checkpoint_of_torch(
        self, checkpoint_of: Callable[[str, int], Path], tmp_path: Path
    ) -> None:
        resumed = tmp_path / "resumed.pt"
        resumed.write_bytes(checkpoint_of("torch", 1).read_bytes())

        torchrun("--engine", "lockstep", "--epochs", 3, "--checkpoint", resumed, "--resume")

        uninterrupted = model_of(checkpoint_of("lockstep", 3))
        torch.testing.assert_close(model_of(resumed), uninterrupted, rtol=0, atol=1e-5)

    def test_a_plain_net_loads_the_checkpoint(self, checkpoint_of: Callable[[str, int], Path]) -> None:
        digits.DigitNet().load_state_dict(model_of(checkpoint_of("lockstep", 1)))  # strict: no "module." prefix


def ranks_without_launcher(*options: object) -> list[tuple[int, str]]:
    """Run two ranks by hand; return exit status and stderr of each.

    torchrun would end the second rank as soon as the first has failed, perhaps before it said why.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes = [
        start([*PROGRAM, *map(str, options)], RANK=str(rank), LOCAL_RANK=str(rank), **variables) for rank in range(2)
    ]
    errors = [finish(process)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``digits.main`` run in this process, as a world of one on CPU."""
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--epochs", "-1"], "argument --epochs: must be a whole number from 0"),
            (["--epochs", "many"], "argument --epochs: must be a whole number from 0"),
            (["--accumulate", "0"], "argument --accumulate: must be a whole number from 1"),
            (["--batch-size", "0"], "argument --batch-size: must be a whole number from 1"),
            (["--seed", "-1"], "argument --seed: must be a whole number from 0"),
            (["--seed", str(2**64)], "argument --seed: must be a whole number from 0"),
            (["--lr", "0"], "argument --lr: must be a number above 0"),
            (["--lr", "nan"], "argument --lr: must be a number above 0"),
            (["--engine", "horse"], "argument --engine: invalid choice"),
            (["--hook", "zip"], "argument --hook: invalid choice"),
            (["--resume"], "argument --resume: needs --checkpoint PATH"),
            (["--checkpoint", "."], "argument --checkpoint: . is a folder"),
        ],
    )
    def test_an_option_out_of_range_is_a_usage_error(
        self, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as leaving:
            digits.main(options)

        assert leaving.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"seed": 1}, "was written with seed 1, but this run has seed 0"),
            ({"world_size": 2}, "was written with world_size 2, but this run has world_size 1"),
            ({"module": torch.nn.Linear(1, 1)}, "holds another model: 'bias' is (1,) there and absent here"),
            ({"epoch": 9}, "has 9 epochs behind it, but --epochs is 2"),
        ],
    )
    def test_the_checkpoint_of_another_run_is_refused(
        self, changes: dict[str, Any], message: str, alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        settings = {"world_size": 1, "seed": 0, "batch_size": 32, "accumulate": 1, "lr": 0.05, "hook": "none"}
        settings |= {name: value for name, value in changes.items() if name in settings}
        module = changes.get("module", digits.DigitNet())
        path = tmp_path / "other.pt"
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        _checkpoint.save(path, changes.get("epoch", 1), settings, module, optimizer)

        with pytest.raises(SystemExit) as leaving:
            digits.main(["--epochs", "2", "--resume", "--checkpoint", str(path)])

        assert leaving.value.code == 2
        assert f"argument --resume: {path} {message}" in capsys.readouterr().err
        assert not torch.distributed.is_initialized()

    @pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 cut off"])
    def test_a_damaged_checkpoint_is_refused(
        self, content: bytes, alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "damaged.pt"
        path.write_bytes(content)

        with pytest.raises(SystemExit) as leaving:
            digits.main(["--resume", "--checkpoint", str(path)])

        assert leaving.value.code == 2
        assert f"{path} cannot be read as a checkpoint" in capsys.readouterr().err

    def test_a_training_that_diverges_says_so(self, alone: None) -> None:
        with pytest.raises(SystemExit, match=r"\[rank 0\] test loss is nan after epoch 1: try a smaller --lr"):
            digits.main(["--engine", "torch", "--epochs", "2", "--lr", "1e30"])

    @pytest.mark.slow
    @pytest.mark.timeout(4 * HANG)
    def test_every_rank_refuses_a_checkpoint_that_does_not_exist(self, tmp_path: Path) -> None:
        path = tmp_path / "absent.pt"

        outcomes = ranks_without_launcher("--checkpoint", path, "--resume")

        for status, error in outcomes:
            assert status == 2, error
            assert f"error: argument --resume: {path} does not exist" in error


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = digits.DigitNet()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    path = tmp_path / "state.pt"
    _checkpoint.save(path, 1, {}, module, optimizer)

    def disk_is_full(content: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", disk_is_full)
    with pytest.raises(OSError, match="no space left"):
        _checkpoint.save(path, 2, {}, module, optimizer)

    assert torch.load(path, weights_only=True)["epoch"] == 1


def test_train_and_test_images_are_a_split_of_all() -> None:
    train_set, test_set = _data.load_data()

    assert (len(train_set), len(test_set)) == (1437, 360)
    torch.testing.assert_close(_data.load_data()[1].tensors, test_set.tensors, rtol=0, atol=0)
    assert torch.bincount(test_set.tensors[1]).min() >= 34  # each digit is tested about equally often
