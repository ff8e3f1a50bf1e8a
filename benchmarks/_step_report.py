"""What the step benchmarks found: figures by round, table, JSON, README table, picture."""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _contenders import LIMIT, NO_REDUCTION
from _report import console, print_table
from _step_timing import Runner
from rich.markup import escape

MIB = 2**20
ENOUGH_ROUNDS = 10
Row = dict[str, Any]


@dataclass
class Case:
    """One model. Rows are dictionaries as the JSON has them; ``order``: of contenders, by name."""

    model: str
    title: str
    order: list[str]
    parameters: int = 0
    gradients: int = 0
    all_reduce_ms: float | None = None
    error: str | None = None
    counting_error: str | None = None
    rows: list[Row] = field(default_factory=list)
    gradient_errors: dict[str, float | None] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_failure(self, contender: str, group: int, error: str) -> None:
        self._add([{"contender": contender, "group": group, "status": "failed", "error": error}])

    def add_group(self, group: int, runners: Sequence[Runner]) -> None:
        """Add a row for each of ``runners``, all of which ran in turns."""
        rows = {runner.contender.name: _row(runner, group) for runner in runners}
        bare, limit = (next((r for r in runners if r.contender.name == name), None) for name in (NO_REDUCTION, LIMIT))
        for runner in runners:
            row = rows[runner.contender.name]
            row["tax_pct"] = excess_pct(runner.block_ms, bare.block_ms) if bare else None
            row["over_limit_pct"] = excess_pct(runner.block_ms, limit.block_ms) if limit else None
            share = runner.contender.wire_share
            if limit and share is not None and runner.contender.reduces and self.all_reduce_ms is not None:
                floor = [max(ms, share * self.all_reduce_ms) for ms in limit.block_ms]
                row["over_floor_pct"] = excess_pct(runner.block_ms, floor)
            if bare and bare.peak_bytes is not None:
                row["peak_mib"] = (runner.peak_bytes - bare.peak_bytes) / MIB
                row["kept_mib"] = (runner.kept_bytes - bare.kept_bytes) / MIB
                row["other_mib"] = runner.other_bytes / MIB
        self._add(rows.values())

    def _add(self, rows: Iterable[Row]) -> None:
        self.rows = sorted([*self.rows, *rows], key=lambda row: (row["group"], self.order.index(row["contender"])))

    def succeeded(self) -> set[str]:
        return {row["contender"] for row in self.rows if row["status"] == "ok"}

    def failures(self) -> int:
        return bool(self.error) + sum(row["status"] == "failed" for row in self.rows)

    def content(self) -> dict[str, Any]:
        """For the JSON."""
        for row in self.rows:
            row["gradient_error"] = self.gradient_errors.get(row["contender"])
            row |= self.counts.get(row["contender"], {})
        names = ("model", "title", "parameters", "gradients", "all_reduce_ms", "error", "counting_error", "rows")
        return {name: getattr(self, name) for name in names} | {"gradient_mib": 4 * self.parameters / MIB}


def excess_pct(mine: Sequence[float], other: Sequence[float]) -> float:
    """Median over rounds of how much longer ``mine`` took than ``other`` in the same round, in percent."""
    return statistics.median(100 * (a / b - 1) for a, b in zip(mine, other, strict=True))


def _row(runner: Runner, group: int) -> Row:
    return {
        "contender": runner.contender.name,
        "group": group,
        "status": "ok",
        "rounds": len(runner.block_ms),
        "step_ms": statistics.median(runner.block_ms),
        "host_ms": statistics.median(runner.issue_ms),
        "step_ms_rounds": [round(ms, 4) for ms in runner.block_ms],
        "host_ms_rounds": [round(ms, 4) for ms in runner.issue_ms],
    }


def print_case(case: Case) -> None:
    """One model's table, and what failed below it."""
    content = case.content()
    rows = [row for row in case.rows if row["status"] == "ok"]
    figures = ("step_ms", "tax_pct", "over_limit_pct", "over_floor_pct", "peak_mib", "kept_mib", "other_mib", "host_ms")
    counts = ("kernels", "copies", "collectives", "waits")
    columns = ["contender", "step ms", "tax %", "over limit %", "over floor %", "peak MiB", "kept MiB", "other MiB"]
    columns += ["host ms", *counts, "group"]
    groups = [
        [[row["contender"], *map(row.get, (*figures, *counts, "group"))] for row in rows if row["group"] == number]
        for number in sorted({row["group"] for row in rows})
    ]
    rounds = min((row["rounds"] for row in rows), default=0)
    title = f"{case.title}: {content['gradient_mib']:,.0f} MiB in {case.gradients} gradients, {rounds} rounds"
    if case.all_reduce_ms is not None:
        title += f", one all-reduce of all of it: {case.all_reduce_ms:.2f} ms"
    print_table(title, columns, groups)
    if 0 < rounds < ENOUGH_ROUNDS:
        console.print(f"[yellow]only {rounds} rounds[/yellow]: a figure needs {ENOUGH_ROUNDS}", highlight=False)
    errors = [(row["contender"], row["error"]) for row in case.rows if row["status"] == "failed"]
    errors += [(what, text) for what, text in ((case.title, case.error), ("counting", case.counting_error)) if text]
    for what, text in errors:
        console.print(f"[red]failed[/red] {what}: {escape(text)}", highlight=False, soft_wrap=True)


def hardware(device: torch.device) -> dict[str, Any]:
    """Date, GPU, driver, NCCL, and the environment that changes what NCCL does."""
    found: dict[str, Any] = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "gpu": None}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
        found["gpus"] = torch.cuda.device_count()
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
            found["driver"] = answer.split("\n", 1)[0].strip()
    found["nccl_environment"] = {k: v for k, v in sorted(os.environ.items()) if k.startswith(("NCCL_", "TORCH_NCCL_"))}
    with contextlib.suppress(ImportError, AttributeError):
        found["lockstep"] = importlib.import_module("lockstep").build_info()
    return found


def write(path: Path | None, content: dict[str, Any], says_so: bool) -> None:
    """Write everything to ``path``, whole or not at all, so that a run that is cut off leaves the last model's file."""
    if path is None:
        return
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)
    if says_so:
        console.print(f"wrote {path}", highlight=False)


def print_markdown(path: Path, picture: Path | None) -> None:
    """Print the README's table of a result, to stderr what failed, and draw it if asked."""
    result = json.loads(path.read_text())
    print("\n".join(markdown(result)))
    for model in result["models"]:
        failed = [(row["contender"], row["error"]) for row in model["rows"] if row["status"] == "failed"]
        failed += [("all", model["error"])] if model["error"] else []
        for contender, error in failed:
            print(f"failed: {model['title']}, {contender}: {error}", file=sys.stderr)
    if picture:
        draw(result, picture)


def markdown(result: dict[str, Any]) -> Iterable[str]:
    """Lines of a table: a row for each contender, "tax / over limit" in percent for each model."""
    machine, models = result["hardware"], result["models"]
    yield (
        f"{result['world_size']} x {machine['gpu'] or 'CPU processes'}, torch {result['environment']['torch']}, "
        f"NCCL {machine.get('nccl', '-')}, driver {machine.get('driver', '-')}, {machine['date']}; "
        f"wire: {result['settings']['wire']}."
    )
    yield ""
    yield "| tax / over limit, % | " + " | ".join(model["title"] for model in models) + " |"
    yield "| --- |" + " --- |" * len(models)
    names = dict.fromkeys(row["contender"] for model in models for row in model["rows"])
    for name in names:
        yield f"| {name} | " + " | ".join(_markdown_cell(model, name) for model in models) + " |"


def ok_rows(model: dict[str, Any]) -> list[Row]:
    """Rows of one model of a result that did not fail."""
    return [row for row in model["rows"] if row["status"] == "ok"]


def _row_of(model: dict[str, Any], contender: str) -> Row | None:
    return next((row for row in model["rows"] if row["contender"] == contender), None)


def _markdown_cell(model: dict[str, Any], contender: str) -> str:
    row = _row_of(model, contender)
    if row is None:
        return "-"
    if row["status"] != "ok":
        return "failed"
    if contender == NO_REDUCTION:
        return f"{row['step_ms']:.1f} ms"
    tax, over_limit = (
        "-" if row[name] is None else f"{row[name]:.1f}" for name in ("tax_pct", "over_limit_pct")
    )  # None: a baseline failed
    return tax if contender == LIMIT else f"{tax} / {over_limit}"


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw percent over limit: a panel for each model, a bar for each contender, a line from quartile to quartile."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        console.print(f"[yellow]no picture[/yellow]: {error}", highlight=False)
        return
    matplotlib.use("Agg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    models = [model for model in result["models"] if ok_rows(model)]
    found = dict.fromkeys(row["contender"] for model in models for row in model["rows"])
    names = [name for name in found if name not in (NO_REDUCTION, LIMIT)]
    if not models or not names:
        console.print("[yellow]no picture[/yellow]: nothing was measured", highlight=False)
        return
    size = (3 + 2.2 * len(models), 1.6 + 0.25 * len(names))
    figure, panels = pyplot.subplots(1, len(models), sharey=True, squeeze=False, figsize=size, layout="constrained")
    for panel, model in zip(panels[0], models, strict=True):
        limits = {row["group"]: row["step_ms_rounds"] for row in ok_rows(model) if row["contender"] == LIMIT}
        for place, name in enumerate(names):
            row = _row_of(model, name)
            if row is None or row["status"] != "ok" or row["group"] not in limits:
                panel.text(0, place, " failed" if row else " -", va="center", fontsize=8)
                continue
            over = [100 * (a / b - 1) for a, b in zip(row["step_ms_rounds"], limits[row["group"]], strict=True)]
            color = "tab:orange" if name.startswith("lockstep") else "tab:gray"
            panel.barh(place, row["over_limit_pct"], color=color)
            if len(over) > 1:
                low, _, high = statistics.quantiles(over, n=4, method="inclusive")
                panel.plot([low, high], [place, place], color="black", linewidth=1)
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_title(model["title"], fontsize=9)
        panel.tick_params(labelsize=8)
        panel.set_xlabel("percent over limit", fontsize=8)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.4, -0.6)  # the first contender on top
    machine = result["hardware"]
    title = f"{result['world_size']} x {machine['gpu'] or 'CPU processes'}, torch {result['environment']['torch']}"
    figure.suptitle(
        f"Step time above the limit, which only waits for the other ranks\n{title}, {machine['date']}", fontsize=9
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    console.print(f"wrote {path}", highlight=False)
