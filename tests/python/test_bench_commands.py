"""``lockstep bench`` and ``tune`` from end to end: processes, tables, JSON, and what is left behind by a failure."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

pytest.importorskip("sklearn", reason="the digits")

import bench_recipes
import recipes
from lockstep.tools.cli import commands

HERE = Path(bench_recipes.__file__)
SMALL = Path(recipes.__file__)  # without the digits, whose library takes its time to import
ROOT = HERE.parents[2]
SCALING_RECIPES = ROOT / "benchmarks" / "scaling_recipes.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(commands, [*arguments])


def answer(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def check_scaling(found: dict[str, Any], share: int) -> None:
    """``share``: what a step on the ranks should take is that of one process divided by it."""
    assert found["efficiency"]["low"] <= found["efficiency"]["median"] <= found["efficiency"]["high"]
    ratios = sorted(one / (share * many) for one, many in found["rounds"])
    assert ratios[0] <= found["efficiency"]["median"] <= ratios[-1]
    assert sum(cause["seconds"] for cause in found["causes"]) == pytest.approx(found["lost"], rel=0.1, abs=1e-6)
    assert found["transport"] == "TCP sockets (gloo)"
    assert {"date", "torch", "lockstep", "cores"} <= found["environment"].keys()


def test_scaling_says_efficiency_and_causes():
    found = answer("bench", "scaling", f"{HERE}:healthy", "--rounds", "2", "--steps", "2")
    check_scaling(found, share=2)
    assert not found["weak"] and found["recipe"] == f"{HERE}:healthy"


def test_weak_scaling_gives_every_rank_the_whole_batch():
    recipe = f"{SMALL}:whole_batch_on_each_rank"
    found = answer("bench", "scaling", recipe, "--nproc", "2", "--weak", "--rounds", "2", "--steps", "2")
    check_scaling(found, share=1)
    assert found["weak"]


def test_a_fixed_global_batch_is_shared_by_the_ranks():
    result = run("bench", "scaling", f"{SMALL}:whole_batch_on_each_rank", "--device", "cpu")
    assert result.exit_code == 2 and f"the batch has {recipes.BATCH // 2} samples, not" in result.stderr


def test_tune_prints_the_table_the_winner_and_its_line_of_code():
    command = [sys.executable, "-m", "lockstep", "tune", f"{SMALL}:right", "--nproc", "2", "--device", "cpu"]
    result = subprocess.run(
        [*command, "--rounds", "3", "--steps", "2"],
        capture_output=True, text=True, timeout=280, env=os.environ | {"COLUMNS": "120"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    contenders = ["bucket_cap_mb=5", "bucket_cap_mb=400", "gradient_as_bucket_view=True", "communicator='group'"]
    for name in ["defaults", *contenders]:
        assert name in result.stdout
    assert "against the best before" in result.stdout and "Winner: " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("model = lockstep.DistributedDataParallel(model")


def test_tune_in_json_decides_by_intervals_and_stops_early():
    rounds = 6
    found = answer("tune", f"{SMALL}:right", "--nproc", "2", "--rounds", str(rounds), "--steps", "2")
    first, *others = found["trials"]
    assert (first["name"], first["ratio"], first["verdict"]) == ("defaults", None, "")
    best = first
    for trial in others:
        ratio, verdict = trial["ratio"], trial["verdict"]
        assert 3 <= trial["rounds"] <= rounds and ratio["low"] <= ratio["median"] <= ratio["high"]
        if verdict == "within noise":  # from five rounds on that is the end, unless something may still be found
            hopeless = abs(ratio["median"] - 1) < (ratio["high"] - ratio["low"]) / 4
            assert trial["rounds"] == rounds or (trial["rounds"] >= 5 and hopeless)
            assert ratio["low"] <= 0.99 <= ratio["high"]
        else:
            expected = {"faster": ratio["high"] < 0.99, "slower": ratio["low"] > 1, "no gain": ratio["low"] > 0.99}
            assert expected[verdict]
        best = trial if verdict == "faster" else best
    assert (found["winner"], found["code"]) == (best["name"], best["code"])
    assert found["ranks"] == 2 and found["recipe"] == f"{SMALL}:right"


def test_comm_reports_both_contenders():
    sizes = answer("bench", "comm", "--min", "1K", "--max", "4K")["sizes"]
    assert [row["size"] for row in sizes] == [1024, 4096]
    for row in sizes:
        assert row["seconds"].keys() == {"group", "lockstep auto"}
        # Two ranks: 2 (n - 1) / n is 1.
        assert row["busbw_gb_s"] == row["algbw_gb_s"]


@pytest.mark.parametrize(
    ("command", "name", "text"),
    [
        ("bench scaling", "fails_on_rank_1", "rank 1 failed: FileNotFoundError: no data on this disk (bench_recipes"),
        ("tune", "out_of_memory_on_rank_1", "rank 1 failed: OutOfMemoryError: tried to allocate 1000.00 GiB"),
        ("bench scaling", "wrong_thing", "the recipe returned a int"),
        ("tune", "no_length", "no fixed length"),
    ],
)
def test_a_failure_is_one_clear_message_and_leaves_nothing_behind(command, name, text, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    others = set(multiprocessing.active_children())  # ranks that earlier tests keep
    result = run(*command.split(), f"{HERE}:{name}", "--device", "cpu")
    assert result.exit_code == 2 and text in result.stderr
    assert "Traceback" not in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert set(multiprocessing.active_children()) <= others and list(tmp_path.iterdir()) == []


def test_the_recipes_of_the_benchmarked_models_scale_and_make_a_table(tmp_path):
    files = []
    for name in ("tiny_gpt", "tiny_resnet50"):
        if name == "tiny_resnet50":
            try:
                import torchvision  # noqa: F401
            except ModuleNotFoundError:
                continue
        found = answer("bench", "scaling", f"{SCALING_RECIPES}:{name}", "--rounds", "2", "--steps", "2")
        check_scaling(found, share=2)
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(found))
    table = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "scaling_table.py"), *map(str, files)],
        capture_output=True, text=True, timeout=60,
    ).stdout.splitlines()  # fmt: skip
    heading, rule, *rows = table[: 2 + len(files)]
    assert {line.count("|") for line in (heading, rule, *rows)} == {14}
    assert rows[0].startswith("| tiny_gpt | ") and (rows[0].endswith("| 100 % |") or rows[0].endswith("| - |"))
    assert "fixed global batch, E = T1 / (2 Tn); 2 rounds in turns" in table[-1]
