"""``lockstep bench`` and ``tune``: planted faults are ranked first, shares add up, and bad input is one sentence."""

from __future__ import annotations

import collections

import click
import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

pytest.importorskip("sklearn", reason="the digits")

import bench_recipes
import lockstep
from lockstep.tools.align import RecipeError
from lockstep.tools.align.trace import each_tensor
from lockstep.tools.bench import tune
from lockstep.tools.bench.attribution import Facts, total
from lockstep.tools.bench.comm import Job as CommJob
from lockstep.tools.bench.scaling import Rounds, Scaling
from lockstep.tools.bench.statistics import Estimate, estimate, trimmed_mean
from lockstep.tools.bench.trainer import Trainer
from lockstep.tools.cli import commands

_kept: dict[str, Trainer] = {}


def _answer(make, steps: int, first: bool):
    """On a rank of a pool: train so many steps and answer as a process of the command does."""
    if first:
        _kept["trainer"] = Trainer(make, dist.get_rank(), dist.get_world_size(), "cpu")
        _kept["trainer"].wrap(record=True)
        _kept["trainer"].steps(2)
        return Facts.of(_kept["trainer"], "cpu")
    return _kept["trainer"].steps(steps)


def _done() -> None:
    _kept.pop("trainer").unwrap()


def scaled(pool, make, rounds: int = 2, steps: int = 2) -> Scaling:
    """Both runs in turns: that in one process here, the other on the ranks of ``pool``."""
    single = Trainer(make, 0, 1, "cpu")
    single.wrap()
    facts = pool.run(_answer, make, steps, True, timeout=120)[0]
    found = Rounds(pool.world_size)
    for _ in range(rounds):
        found.add(single.steps(steps), pool.run(_answer, make, steps, False, timeout=120))
    pool.run(_done)
    single.unwrap()
    return found.result(facts)


FAULTS = {
    "data waiting": (bench_recipes.slow_loader, "num_workers=0", "num_workers=2"),
    "skew between ranks": (bench_recipes.slow_rank, "longer than the fastest in forward", "even out"),
    "small buckets": (bench_recipes.tiny_buckets, "404 buckets", "bucket_cap_mb"),
    "small buckets: 1 MB": (bench_recipes.one_megabyte_buckets, "buckets of 1 MiB", "bucket_cap_mb"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_is_ranked_first_and_the_shares_add_up(ranks, name):
    make, measured, remedy = FAULTS[name]
    found = scaled(ranks, make)
    worst = found.causes[0]
    assert worst.name == name.partition(":")[0], found.causes
    assert measured in worst.measured and remedy in worst.remedy
    # What was lost by the times that the efficiency is made of, which know nothing of causes.
    measured = found.many.median - found.one.median / 2
    assert measured > 0 and found.efficiency.median < 1
    assert total(found.causes) == pytest.approx(measured, rel=0.1)
    assert total(found.causes) == pytest.approx(found.lost, rel=0.1)
    assert [cause.seconds for cause in found.causes] == sorted((c.seconds for c in found.causes), reverse=True)


def _steps(**phases: float) -> dict[str, float]:
    usual = {"data": 1.0, "forward": 2.0, "backward": 4.0, "communication": 0.0, "optimizer": 1.0, "other": 0.0}
    full = usual | phases
    return full | {"step": sum(full.values()), "host": 1.0, "behind": 1.0}


def test_the_parts_are_those_of_a_calculation_by_hand():
    facts = Facts("cpu", 0, 1, 2, 2, False, 0, "TCP sockets (gloo)", [])
    found = Rounds(world_size=2)
    # One process: 8 s, so 4 s would be right. Each rank: half of data, forward and backward, all of the optimizer,
    # 3 s exposed; rank 1 has 1 s more forward, and rank 0 waits that long.
    fast = _steps(data=0.5, forward=1.0, backward=2.0, communication=4.0)
    slow = _steps(data=0.5, forward=2.0, backward=2.0, communication=3.0)
    for _ in range(3):
        found.add(([_steps()], None), [([fast], None), ([slow], None)])
    result = found.result(facts)
    assert result.lost == 4.5 and result.efficiency == Estimate(8 / 17, 8 / 17, 8 / 17)
    seconds = {cause.name: cause.seconds for cause in result.causes}
    assert seconds == {
        "exposed communication": 3.0,
        "skew between ranks": 1.0,
        "optimizer": 0.5,
        "data waiting": 0.0,
        "slower computing": 0.0,
        "other": 0.0,
    }
    weak = Rounds(world_size=2, weak=True)
    weak.add(([_steps()], None), [([_steps(communication=2.0)], None)] * 2)
    assert weak.result(facts).efficiency.median == 0.8


def test_settings_that_cost_are_noted():
    facts = Facts("cpu", 0, 1, 1, 2, True, 4096, "TCP sockets (gloo)", [])
    found = Rounds(world_size=2)
    found.add(([_steps()], None), [([_steps()], None)] * 2)
    assert [cause.name for cause in found.result(facts).notes] == [
        *("find_unused_parameters", "broadcast buffers", "cores"),
    ]


def test_the_host_is_named_where_the_gpu_waits_for_it():
    facts = Facts("cuda", 0, 1, 16, 2, False, 0, "P2P/CUMEM", ["GPU 0 PCIe: generation 5 of 5, 8 of 16 lanes"])
    names = {}
    for behind in (0.0, 1.0):
        found = Rounds(world_size=2)
        many = _steps() | {"behind": behind}
        found.add(([_steps()], None), [([many], None)] * 2)
        result = found.result(facts)
        assert [cause.name for cause in result.notes] == ["PCIe link"] and result.transport == "P2P/CUMEM"
        (names[behind],) = (c.name for c in result.causes if c.name in ("host-bound launches", "slower computing"))
    assert names == {0.0: "host-bound launches", 1.0: "slower computing"}


def test_batches_are_changed_tensor_by_tensor_whatever_holds_them():
    Pair = collections.namedtuple("Pair", ("left", "right"))
    batch = {"a": [torch.ones(1), 5], "b": Pair(torch.zeros(2), "text")}
    changed = each_tensor(batch, lambda tensor: tensor + 1)
    assert changed["a"][0].item() == 2 and changed["a"][1] == 5
    assert type(changed["b"]) is Pair and changed["b"].left.tolist() == [1, 1] and changed["b"].right == "text"


def test_the_interval_covers_the_median_and_shrinks_with_agreement():
    apart, alike = estimate([1.0, 2.0, 3.0, 4.0, 5.0]), estimate([3.0, 3.0, 3.0])
    assert apart.low < apart.median == 3.0 < apart.high and estimate([1.0, 2.0, 3.0, 4.0, 5.0]) == apart
    assert alike == Estimate(3.0, 3.0, 3.0)


def test_trimming_keeps_sums():
    rows = [{"a": float(i), "b": 2.0 * i, "step": 3.0 * i} for i in range(20)]
    mean = trimmed_mean(rows, "step")
    assert mean["a"] + mean["b"] == pytest.approx(mean["step"]) and mean["a"] == 9.5


def test_sizes_go_from_the_smallest_to_the_largest():
    assert CommJob(2, 1024, 100_000, 8).sizes() == [1024, 8192, 65536, 100_000]
    assert CommJob(2).sizes()[-1] == 1 << 30


def _tournament(seconds, rounds: int = 8, device: str = "cpu", lossy: bool = False):
    """With a made-up time for each setting; returns the result and how often each was measured."""
    asked: dict[str, int] = {}

    def step(setting: tune.Setting) -> float:
        asked[setting.name] = asked.get(setting.name, 0) + 1
        return seconds(setting, asked[setting.name])

    job = tune.Job("recipe:make", 2, rounds=rounds, device=device, lossy=lossy)
    return tune._tournament(job, step, lambda text: None, tune.Setting()), asked


def test_the_fastest_setting_wins_with_its_line_of_code():
    def seconds(setting: tune.Setting, _: int) -> float:
        faster = 0.2 * (setting.arguments.get("bucket_cap_mb") == 100)
        faster += 0.1 * bool(setting.arguments.get("gradient_as_bucket_view"))
        return 1.0 - faster - 0.3 * (setting.hook == "bf16")

    found, asked = _tournament(seconds, lossy=True)
    assert found.code == (
        "model = lockstep.DistributedDataParallel(model, bucket_cap_mb=100, gradient_as_bucket_view=True); "
        'model.set_comm_hook("bf16")'
    )
    verdicts = {trial.name: trial.verdict for trial in found.trials}
    assert verdicts["bucket_cap_mb=100"] == "faster" and verdicts["bucket_cap_mb=5"] == "no gain"
    assert asked["bucket_cap_mb=5"] == 3, "equal times are decided as early as possible"


def test_differences_within_noise_change_nothing():
    noise = [1.0, 1.06, 0.95, 1.03, 0.97, 1.05, 0.94, 1.01]

    def seconds(setting: tune.Setting, number: int) -> float:
        return noise[(number * (3 if setting.arguments else 5)) % len(noise)]

    found, _ = _tournament(seconds)
    assert found.winner == "defaults" and found.code == "model = lockstep.DistributedDataParallel(model)"
    # It ends before all rounds are run where the noise hides whatever there is.
    assert all(trial.rounds < 8 for trial in found.trials)


def _wrapped_in_turns(settings: list[tune.Setting]) -> list[int]:
    trainer = Trainer(bench_recipes.healthy, dist.get_rank(), dist.get_world_size(), "cpu")
    counts = []
    for setting in settings:
        trainer.wrap(setting.wrap)
        times, _ = trainer.steps(2)
        counts.append(len(times))
    trainer.model.assert_in_sync()
    trainer.wrap(lambda module: lockstep.DistributedDataParallel(module, find_unused_parameters=True))
    assert tune.needed(trainer.model) == {"find_unused_parameters": True}
    trainer.unwrap()
    assert tune.needed(trainer.model) == {}
    return counts


def test_every_setting_of_the_tournament_can_train_the_same_module(ranks):
    stages = [tune.challengers(tune.Setting(), stage, "cpu", True) for stage in range(4)]
    settings = [tune.Setting(), *(setting for stage in stages for setting in stage)]
    assert ranks.run(_wrapped_in_turns, settings, timeout=120) == [[2] * len(settings)] * 2


def test_lossy_hooks_are_tried_on_request_only():
    found, _ = _tournament(lambda setting, _: 0.5 if setting.hook else 1.0)
    assert not any("hook" in trial.name for trial in found.trials)


@pytest.mark.parametrize(
    ("make", "text"),
    [(bench_recipes.wrong_thing, "returned a int"), (bench_recipes.no_length, "no fixed length")],
)
def test_what_is_no_recipe_is_said_in_one_sentence(make, text):
    with pytest.raises(RecipeError, match=text):
        Trainer(make, 0, 1, "cpu")


def test_a_batch_that_cannot_be_filled_is_said_in_one_sentence():
    trainer = Trainer(lambda: bench_recipes.digits(batch_size=10_000), 0, 1, "cpu")
    trainer.wrap()
    with pytest.raises(RecipeError, match="hold no batch"):
        trainer.steps(1)


def run(*arguments: str):
    return CliRunner().invoke(commands, [*arguments])


@pytest.mark.parametrize("command", ["bench scaling recipes:right", "bench comm", "tune recipes:right"])
def test_too_few_gpus_are_said_before_anything_starts(command):
    result = run(*command.split(), "--device", "cuda", "--nproc", "99")
    assert result.exit_code == 2 and "99 ranks need as many GPUs" in result.stderr


def _leaves(command: click.Command) -> list[click.Command]:
    if not isinstance(command, click.Group):
        return [command]
    return [leaf for inner in command.commands.values() for leaf in _leaves(inner)]


@pytest.mark.parametrize("command", _leaves(commands), ids=lambda command: command.name)
def test_help_says_what_every_option_means_and_every_exit_code(command):
    options = [option for option in command.params if isinstance(option, click.Option)]
    assert options and all(option.help for option in options)
    assert "Exit code: 0" in command.help
    takes_a_recipe = any(parameter.name == "recipe" for parameter in command.params)
    assert not takes_a_recipe or "RECIPE is" in command.help


def test_sizes_that_make_no_sense_are_refused():
    assert "is no size in bytes" in run("bench", "comm", "--max", "many").stderr
    assert "is larger than" in run("bench", "comm", "--min", "2K", "--max", "1K").stderr
