"""``lockstep align``: right recipes reach their level without a cause, and each fault is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import recipes
from lockstep.examples import align_digits
from lockstep.tools.align import Comparison, RecipeError, compare
from lockstep.tools.align.probe import probe
from lockstep.tools.align.recipe import build, find
from lockstep.tools.align.report import draw
from lockstep.tools.align.trace import trace
from lockstep.tools.cli import commands

STEPS = 8


def _traced(make, steps: int) -> list:
    return list(trace(make, dist.get_rank(), dist.get_world_size(), steps))


def aligned(pool, make, steps: int = STEPS) -> Comparison:
    """Both runs: that in one process here, the other on the ranks of ``pool``."""
    return compare(trace(make, 0, 1, steps), pool.run(_traced, make, steps))


@pytest.mark.parametrize("make", recipes.RIGHT, ids=lambda make: make.__name__)
def test_a_right_recipe_reaches_level_2_and_no_cause_is_named(two_or_three_ranks, make):
    comparison = aligned(two_or_three_ranks, make, steps=20)
    assert (comparison.level >= 2, comparison.parts_at, comparison.causes) == (True, None, [])
    assert [row.step for row in comparison.rows] == list(range(20))
    assert comparison.rows[-1].loss_one < comparison.rows[0].loss_one
    assert all(row.loss_one == pytest.approx(row.loss_many, rel=1e-4) for row in comparison.rows)


@pytest.mark.slow
def test_the_handwritten_digits_reach_level_2(two_or_three_ranks):
    pytest.importorskip("sklearn")
    comparison = aligned(two_or_three_ranks, align_digits.make, steps=50)
    assert (comparison.level >= 2, comparison.causes) == (True, [])


def test_unequal_parts_that_are_weighed_reach_level_2(ranks):
    assert aligned(ranks, recipes.right_unequal_samples).level >= 2


@pytest.mark.parametrize("key", recipes.FAULTS)
def test_each_fault_is_named_first_and_alone(ranks, key):
    comparison = aligned(ranks, recipes.FAULTS[key])
    # A buffer that differs is found when forward begins for the second time; the loss differs one step later or so.
    assert comparison.parts_at is not None and comparison.level < 2
    assert comparison.parts_at == 0 or key == "buffers"
    assert [cause.key for cause in comparison.causes] == [key], comparison.causes


def test_an_optimizer_that_enlarges_rounding_is_told_from_a_fault(ranks):
    # The keys' bias in attention has a gradient of zero but for rounding; Adam steps by the full rate all the same.
    comparison = aligned(ranks, recipes.language_model_with_adam, steps=20)
    assert comparison.level == 1
    assert [cause.key for cause in comparison.causes] == ["amplified rounding"]


def test_different_numbers_of_workers_are_named(ranks):
    (cause,) = aligned(ranks, recipes.worker_counts, steps=2).causes
    assert cause.key == "augmentation" and "different numbers of workers (0, 1)" in cause.found


def test_a_run_on_one_rank_equals_the_run_in_one_process_bit_for_bit(pool_of):
    comparison = aligned(pool_of(1), recipes.right)
    assert (comparison.level, comparison.causes) == (3, [])


def _loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch).square().mean()


def test_the_probe_leaves_model_and_random_stream_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.get_rng_state()
    found = probe(model, _loss_of, torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), 8)
    assert (found.loss, found.batch_statistics, found.random, found.dropout) == ("mean", ("1",), True, ("2",))
    assert torch.equal(torch.get_rng_state(), stream) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (recipes.wrong_thing, "returned a int"),
        (recipes.no_length, "no fixed length"),
        (lambda: (1, 2, 3, 4), "model must be a Module"),
        (lambda: (1, 2, 3, 4, {"speed": 5}), "settings do not fit"),
        (lambda: recipes.recipe(batch_size=9, accumulate=2), "multiple of accumulate"),
    ],
)
def test_what_is_no_recipe_is_said_in_one_sentence(make, text):
    with pytest.raises(RecipeError, match=text):
        build(make, 0, 1)


def test_a_loss_that_is_no_number_is_said_in_one_sentence():
    with pytest.raises(RecipeError, match="must return one number"):
        next(trace(recipes.vector_loss, 0, 1, 1))


@pytest.mark.parametrize(
    ("name", "text"),
    [("recipes", "not of the form"), ("recipes:absent", "no function"), ("absent_module:make", "cannot be imported")],
)
def test_a_recipe_that_cannot_be_found_is_named(name, text):
    with pytest.raises(RecipeError, match=text):
        find(name)


def test_the_picture_has_both_curves(ranks, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "curves.svg"
    draw(aligned(ranks, recipes.optimizer_settings), path)
    assert "<svg" in path.read_text()
    with pytest.raises(RecipeError, match="could not be written"):
        draw(aligned(ranks, recipes.right), tmp_path / "curves.unknown")


HERE = str(Path(recipes.__file__))


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestCommand:
    def run(self, name: str, *options: str):
        return CliRunner().invoke(commands, ["align", f"{HERE}:{name}", "--device", "cpu", *options])

    def test_a_right_recipe_exits_with_0(self):
        result = self.run("right", "--steps", "5", "--json")
        assert result.exit_code == 0, result.stderr
        report = json.loads(result.stdout)
        assert report["level"] >= 2 and report["causes"] == [] and len(report["rows"]) == 5

    def test_a_fault_exits_with_1_and_is_named(self):
        result = self.run("optimizer_settings", "--steps", "5")
        assert result.exit_code == 1, result.stderr
        assert "The runs part at step 0." in result.stdout and "Cause: optimizer settings." in result.stdout

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("fails_on_rank_1", "rank 1 failed: FileNotFoundError: no data on this disk (recipes.py, line"),
            ("fails_late_on_rank_1", "rank 1 failed: MemoryError: no room for step 2"),
            ("dies_on_rank_1", "rank 1 was killed by signal 9; out of memory?"),
        ],
    )
    def test_a_rank_that_fails_is_one_clear_message_and_exits_with_2(self, name, text):
        result = self.run(name)
        assert result.exit_code == 2 and text in result.stderr and "Traceback" not in result.stderr

    def test_too_few_gpus_are_said_before_anything_starts(self):
        result = CliRunner().invoke(commands, ["align", "recipes:right", "--device", "cuda", "--nproc", "99"])
        assert result.exit_code == 2 and "99 ranks need as many GPUs" in result.stderr
