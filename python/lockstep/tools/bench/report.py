"""The measurements as tables."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.tools.bench.attribution import Cause, total
from lockstep.tools.bench.comm import Size
from lockstep.tools.bench.scaling import Scaling
from lockstep.tools.bench.statistics import Estimate
from lockstep.tools.bench.tune import Tuning


def show_scaling(found: Scaling, console: Console) -> None:
    """Step times, the efficiency with its interval, and where the lost time went."""
    ranks, kind = found.world_size, "weak scaling" if found.weak else "fixed global batch"
    console.print(f"{kind}, {len(found.rounds)} rounds in turns; medians [95 % interval]", highlight=False)
    console.print(f"step in one process  {_ms(found.one)}", highlight=False)
    console.print(f"step on {ranks} ranks      {_ms(found.many)}", highlight=False)
    formula = "T1 / Tn" if found.weak else f"T1 / ({ranks} Tn)"
    console.print(f"[bold]efficiency E = {formula}  {escape(str(found.efficiency))}[/bold]", highlight=False)
    ideal = "T1" if found.weak else f"T1 / {ranks}"
    console.print(f"lost in a step, Tn - {ideal}: {1e3 * found.lost:.2f} ms (trimmed means)", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("cause", "measured", "healthy", "remedy"):
        table.add_column(heading, overflow="fold")
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("of lost", justify="right", no_wrap=True)
    for cause in found.causes:
        share = f"{100 * cause.seconds / found.lost:.0f} %" if found.lost > 0 else ""
        table.add_row(*_cells(cause), f"{1e3 * cause.seconds:.2f}", share)
    for cause in found.notes:
        table.add_row(*_cells(cause), "", "")
    explained = total(found.causes)
    share = f"{100 * explained / found.lost:.0f} %" if found.lost > 0 else ""
    table.add_row("together", "", "", "", f"{1e3 * explained:.2f}", share, style="bold")
    console.print(table)


def show_comm(rows: list[Size], ranks: int, backend: str, console: Console) -> None:
    """One line a size: time and bus bandwidth of each contender."""
    table = Table(box=box.SIMPLE_HEAD, title=f"all-reduce of float32, {ranks} ranks, {backend}", title_justify="left")
    table.add_column("bytes", justify="right", no_wrap=True)
    for name in rows[0].seconds:
        for heading in (f"{name}, us [95 % interval]", "busbw, GB/s"):
            table.add_column(escape(heading), justify="right")
    for row in rows:
        cells = [f"{row.size:,}"]
        for name, seconds in row.seconds.items():
            time = f"{1e6 * seconds.median:.0f} [{1e6 * seconds.low:.0f}, {1e6 * seconds.high:.0f}]"
            cells += [escape(time), f"{row.bus_bandwidth(name, ranks):.3f}"]
        table.add_row(*cells)
    console.print(table)


def show_tuning(found: Tuning, console: Console) -> None:
    """Every contender in the order of the tournament, the winner, and its line of code."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("contender", "step, ms", "95 % interval", "against the best before", ""):
        table.add_column(heading, justify="left" if heading in ("contender", "") else "right")
    for trial in found.trials:
        against = "" if trial.ratio is None else f"{100 * (trial.ratio.median - 1):+.1f} %"
        step = trial.step
        interval = escape(f"[{1e3 * step.low:.2f}, {1e3 * step.high:.2f}]")
        style = "bold green" if trial.code == found.code else None
        table.add_row(trial.name, f"{1e3 * step.median:.2f}", interval, against, trial.verdict, style=style)
    console.print(table)
    console.print(f"[bold]Winner: {found.winner}[/bold]")
    console.print(found.code, highlight=False, markup=False, soft_wrap=True)


def _cells(cause: Cause) -> list[str]:
    return [escape(text) for text in (cause.name, cause.measured, cause.healthy, cause.remedy)]


def _ms(seconds: Estimate) -> str:
    return escape(f"{1e3 * seconds.median:.2f} ms [{1e3 * seconds.low:.2f}, {1e3 * seconds.high:.2f}]")
