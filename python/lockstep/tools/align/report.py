"""The comparison as text and as a picture."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.tools.align.compare import LEVELS, WEIGHTS_EQUAL, Comparison
from lockstep.tools.align.recipe import RecipeError


def show(comparison: Comparison, console: Console) -> None:
    """Print the steps (at most some 12 of them), the level, and where the runs part and why."""
    rows = comparison.rows
    every = max(1, len(rows) // 10)
    table = Table(box=box.SIMPLE_HEAD)
    losses = "loss, one process", f"loss, {comparison.world_size} ranks"
    for heading in ("step", *losses, "weights differ by", "gradients by"):
        table.add_column(heading, justify="right")
    for row in rows:
        if row.step % every == 0 or row.step in (comparison.parts_at, rows[-1].step):
            style = "red" if row.step == comparison.parts_at else None
            cells = f"{row.step}", f"{row.loss_one:.6f}", f"{row.loss_many:.6f}", f"{row.weight_difference:.2e}"
            table.add_row(*cells, f"{row.gradient_difference:.1e}", style=style)
    console.print(table)
    colour = {0: "bold red", 1: "yellow"}.get(comparison.level, "green")
    console.print(f"[{colour}]Level {comparison.level}: {LEVELS[comparison.level]}.[/{colour}]")
    if comparison.parts_at is not None:
        console.print(f"The runs part at step {comparison.parts_at}.")
        if not comparison.causes:
            console.print("No check found a cause. Rounding grows in long runs; a first step that differs is a fault.")
    for number, cause in enumerate(comparison.causes, start=1):
        likely = " (the likeliest)" if number == 1 and len(comparison.causes) > 1 else ""
        console.print(f"[bold]Cause{likely}: {escape(cause.key)}.[/bold] {escape(cause.found)}")
        console.print(f"  Remedy: {escape(cause.remedy)}")


def draw(comparison: Comparison, path: Path) -> None:
    """Write both loss curves, and below them the largest difference of a weight, to ``path`` (PNG, SVG or PDF).

    Raises:
        RecipeError: matplotlib is not installed, or cannot write such a file.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError as error:
        text = "--picture needs matplotlib: pip install 'torch-lockstep[tools]'."
        raise RecipeError(text) from error
    steps = [row.step for row in comparison.rows]
    figure = Figure(figsize=(7, 5.5), layout="constrained")
    losses, weights = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    losses.plot(steps, [row.loss_one for row in comparison.rows], linewidth=3, alpha=0.45, label="one process")
    losses.plot(
        steps, [row.loss_many for row in comparison.rows], "--", color="black", label=f"{comparison.world_size} ranks"
    )
    losses.set_ylabel("loss")
    losses.set_title(f"Level {comparison.level}: {LEVELS[comparison.level]}")
    weights.axhline(WEIGHTS_EQUAL, color="gray", linestyle=":", label="level 2")
    apart = [row.weight_difference for row in comparison.rows]
    weights.plot(steps, apart, color="tab:red")
    weights.set_yscale("symlog", linthresh=1e-9)
    weights.set_ylim(bottom=0)
    weights.set_ylabel("largest difference\nof a weight")
    weights.set_xlabel("optimizer step")
    weights.xaxis.set_major_locator(MaxNLocator(integer=True))
    if comparison.parts_at is not None:
        for axes in (losses, weights):
            label = f"they part (step {comparison.parts_at})" if axes is weights else None
            axes.axvline(comparison.parts_at, color="tab:blue", linestyle="-.", linewidth=1, label=label)
    losses.legend()
    weights.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise RecipeError(f"the picture could not be written: {error}.") from error
