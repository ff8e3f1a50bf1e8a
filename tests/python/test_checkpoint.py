"""Checkpoints: what they hold, who learns of failures, and runs that are killed while saving."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkpoint_run
import lockstep
from checkpoint_run import STEPS, WORLD
from lockstep.checkpoint import CheckpointError, WriterFailedError, load, save

#: In seconds: no run of the test lasts longer unless it hangs.
HANG = 60


class Launch:
    """The ranks of one run as processes. They fork from a server that has imported torch, so that starting is quick."""

    _context = multiprocessing.get_context("forkserver")

    def __init__(self, store: Path, path: Path | None, die: tuple[int, str] | None, timeout: float) -> None:
        self._context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "lockstep"])
        self.pipes, self.processes = [], []
        for rank in range(WORLD):
            ours, theirs = self._context.Pipe(duplex=False)
            arguments = (rank, str(store), str(path) if path else None, die, timeout, theirs)
            self.processes.append(self._context.Process(target=checkpoint_run.main, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.pipes.append(ours)

    def messages(self, rank: int) -> Iterator[tuple[str, Any]]:
        """What ``rank`` says, until it ends."""
        deadline = time.monotonic() + HANG
        while True:
            try:
                if not self.pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                    self.kill()
                    pytest.fail(f"rank {rank} said nothing for {HANG} s")
                yield self.pipes[rank].recv()
            except (EOFError, ConnectionError):
                return

    def until(self, rank: int, *message: Any) -> list[tuple[str, Any]]:
        said = []
        for one in self.messages(rank):
            said.append(one)
            if one == message:
                return said
        pytest.fail(f"rank {rank} never said {message}, but {said}")

    def kill(self) -> None:
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)
        self.join()

    def join(self) -> None:
        for process in self.processes:
            process.join(HANG)
            assert process.exitcode is not None, "a rank hangs"

    def finish(self) -> list[str]:
        """The bits of each rank at the end of the run."""
        said = [dict(self.messages(rank)) for rank in range(WORLD)]
        self.join()
        return [answer["bits"] for answer in said]


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Iterator[Callable[..., Launch]]:
    """Starts a run; what still lives at the end is killed."""
    folder, started = tmp_path_factory.mktemp("stores"), []

    def start(path: Path | None, die: tuple[int, str] | None = None, timeout: float = HANG) -> Launch:
        started.append(Launch(folder / f"store_{len(started)}", path, die, timeout))
        return started[-1]

    yield start
    for run in started:
        for process in run.processes:
            process.kill()


@pytest.fixture(scope="module")
def uninterrupted(launch) -> list[str]:
    """The bits that the run ends with when nobody kills it, and nobody keeps checkpoints."""
    return launch(None).finish()


def step_in(path: Path) -> int:
    return torch.load(path, weights_only=True)["extra"]


@pytest.mark.timeout(4 * HANG)
@pytest.mark.parametrize(
    ("moment", "survivor"),
    [
        ("before writing", 3),
        ("half written", 3),
        ("before the file's fsync", 3),
        ("after the file's fsync", 3),
        ("before the rename", 3),
        ("after the rename", 4),
    ],
)
def test_rank_0_killed_while_saving_leaves_a_whole_checkpoint_and_the_same_run(
    launch, tmp_path, uninterrupted, moment, survivor
):
    path = tmp_path / "run.pt"
    killed = launch(path, die=(4, moment), timeout=1)
    last = list(killed.messages(1))[-1]
    killed.join()

    assert killed.processes[0].exitcode == -signal.SIGKILL
    assert last[0] == "WriterFailedError" and "rank 0 did not write" in last[1], last
    assert step_in(path) == survivor

    resumed = launch(path)
    assert resumed.until(0, "resumed", survivor)
    assert resumed.finish() == uninterrupted


@pytest.mark.slow
@pytest.mark.timeout(20 * HANG)
def test_runs_killed_at_random_moments_end_with_the_bits_of_the_uninterrupted_one(launch, tmp_path, uninterrupted):
    path, dice, kills = tmp_path / "run.pt", random.Random(11), 0
    while kills < 20:
        path.unlink(missing_ok=True)
        done = 0
        while done < STEPS - 1 and kills < 20:
            run = launch(path)
            target = dice.randint(done + 1, min(done + 4, STEPS - 1))
            run.until(0, "saving", target)
            time.sleep(dice.uniform(0, 0.02))  # a save takes about 10 ms: before, within, or after it
            run.kill()
            kills += 1
            reached = [step for word, step in run.messages(0) if word == "saved"]
            done = step_in(path) if path.exists() else 0
            assert done >= max([target - 1, *reached]), "a complete checkpoint was lost"
        assert launch(path).finish() == uninterrupted


def _save_where_rank_0_cannot(folder: str) -> None:
    save(os.path.join(folder, "file", "run.pt"), model=nn.Linear(1, 1))


def test_the_other_ranks_learn_why_rank_0_failed(ranks, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    zero, one = ranks.outcomes(_save_where_rank_0_cannot, str(tmp_path))
    assert isinstance(zero, CheckpointError) and "LS-144" in str(zero) and "FileExistsError" in str(zero)
    assert isinstance(one, WriterFailedError) and "LS-145" in str(one) and "FileExistsError" in str(one)


class FailsOnRank1:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict:
        if dist.get_rank() == 1:
            raise ArithmeticError("out of numbers")
        return {}

    def load_state_dict(self, state: dict) -> None: ...


def _hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0] / 2)


def _save_with_failing_hook_state(path: str) -> None:
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(FailsOnRank1(model.module), _hook)
    save(path, model=model)


def test_a_state_that_fails_on_one_rank_fails_on_all_and_names_it(ranks, tmp_path):
    path = tmp_path / "run.pt"
    for error in ranks.outcomes(_save_with_failing_hook_state, str(path)):
        assert isinstance(error, CheckpointError) and "[rank 1] its state could not be taken" in str(error)
    assert not path.exists()


class Opaque: ...


def test_what_could_not_be_read_back_is_refused_when_saving(tmp_path):
    path, model = tmp_path / "run.pt", nn.Linear(1, 1)
    save(path, model=model, extra=1)
    with pytest.raises(CheckpointError, match=r"extra\['config'\]\[0\] is a test_checkpoint.Opaque"):
        save(path, model=model, extra={"config": [Opaque()]})
    assert load(path, model=model) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_names_carry_no_prefix_and_plain_torch_can_read_them(ranks, tmp_path):
    path = tmp_path / "run.pt"
    ranks.run(_save_wrapped, str(path))
    module = nn.Linear(2, 1)
    module.load_state_dict(torch.load(path, weights_only=True)["model"])
    with torch.no_grad():
        assert module(torch.ones(1, 2)).item() == 5.0
    other = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"written by 2 ranks, but now there are 1.*per_rank=False"):
        load(path, model=other)
    load(path, model=other, per_rank=False)
    assert torch.equal(other.weight, module.weight)


def _save_wrapped(path: str) -> None:
    model = lockstep.DistributedDataParallel(nn.Linear(2, 1))
    with torch.no_grad():
        model.module.weight.fill_(2)
        model.module.bias.fill_(1)
    save(path, model=model)


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    path = tmp_path / "run.pt"
    save(path, model=nn.Linear(2, 1))
    model = nn.Linear(3, 1)
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"'weight' is \(1, 2\) there and \(1, 3\) here"):
        load(path, model=model)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match="no state of optimizer; it holds only the model"):
        load(path, model=nn.Linear(2, 1), optimizer=optimizer)
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("damage", ["absent", "cut", "flipped", "foreign"])
def test_a_file_that_is_no_checkpoint_is_one_clear_error(tmp_path, damage):
    path, model = tmp_path / "run.pt", nn.Linear(64, 64)
    save(path, model=model)
    content = bytearray(path.read_bytes())
    if damage == "absent":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        content[len(content) // 2] ^= 1  # among the weights
        path.write_bytes(content)
    else:
        torch.save({"model": {}}, path)
    with pytest.raises(CheckpointError, match="LS-144"):
        load(path, model=model)


def test_random_streams_go_on_where_they_were(tmp_path):
    numpy = pytest.importorskip("numpy")

    def draw() -> tuple:
        return random.random(), torch.rand(3).tolist(), numpy.random.rand(), numpy.random.randn()

    path, model = tmp_path / "run.pt", nn.Linear(1, 1)
    numpy.random.randn()  # leaves half of a pair of normals in NumPy's state
    save(path, model=model)
    expected = draw()
    load(path, model=model)
    assert draw() == expected


def _warned_of_hook_state(path: str) -> list[str]:
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
    model.register_comm_hook(Opaque(), _hook)
    with pytest.warns(UserWarning) if dist.get_rank() == 0 else contextlib.nullcontext() as caught:
        save(path, model=model)
    return [str(warning.message) for warning in caught or []]


def test_a_hook_state_that_cannot_be_kept_is_warned_of(ranks, tmp_path):
    zero, one = ranks.run(_warned_of_hook_state, str(tmp_path / "run.pt"))
    assert len(zero) == 1 and "comm hook '_hook', a Opaque, has no state_dict" in zero[0] and one == []
