"""Tables on the terminal and JSON files, the same for every benchmark."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

Cell = str | int | float | None

console = Console()
if not console.is_terminal:
    console = Console(width=180)  # a log file has no width of its own; 80 columns would break every row


def environment() -> dict[str, Cell]:
    """What a reader must know to compare two JSON files."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
    }


def print_table(title: str, columns: Sequence[str], groups: Iterable[Iterable[Sequence[Cell]]]) -> None:
    """Print `groups` of rows with a line between groups. Floats get three decimals, None a dash."""
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column == "contender" else "right", no_wrap=True)
    for group in groups:
        for row in group:
            table.add_row(*(_text(cell) for cell in row))
        table.add_section()
    console.print(f"[bold]{title}[/bold]", highlight=False)
    console.print(table)


def print_missing(missing: dict[str, str]) -> None:
    """One line for each contender that could not take part."""
    for name, reason in missing.items():
        console.print(f"[yellow]skipped[/yellow] {name}: {reason}", highlight=False, soft_wrap=True)


def write_json(path: Path | None, benchmark: str, content: dict[str, object]) -> None:
    """Write `content` with the benchmark's name and the environment in front; nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({"benchmark": benchmark, "environment": environment(), **content}, indent=1) + "\n")
        console.print(f"wrote {path}", highlight=False)


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    return f"{cell:,.3f}" if isinstance(cell, float) else str(cell)
