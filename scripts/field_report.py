#!/usr/bin/env python3
"""Run the field cases on torch's engine and on Lockstep's, each in fresh processes, and print what came of it.

scripts/field_report.py                              # all, some minutes
scripts/field_report.py --cases 1,24,41 --verbose    # three of them, with each variant
scripts/field_report.py --markdown README.md         # the table, between the markers of that file if it has them;
                                                     # with --cases only their rows are replaced
scripts/field_report.py --broken --cases 5,31        # which deliberate flaws of our engine each case notices
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT / "tests/python", ROOT / "python"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

from rich.console import Console  # noqa: E402
from rich.markup import escape  # noqa: E402
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

from field.registry import BROKEN, LOCKSTEP, TORCH, Case, Engine, all_variants  # noqa: E402
from field.runner import Outcome, run_in_own_processes  # noqa: E402

#: From the best to the worst; the worst variant speaks for its case.
KINDS = ["right", "not offered", "raises", "wrong", "hang", "crash"]
#: Where a file that holds more than the table says that it goes.
BEGIN, END = "<!-- field-report:begin -->", "<!-- field-report:end -->"
COLOURS = {"right": "green", "not offered": "cyan", "raises": "yellow", "wrong": "red", "hang": "red", "crash": "red"}


def main() -> int:
    options = _parse()
    console = Console(width=None if sys.stdout.isatty() else 160)
    _send_standard_error_to(options.log)  # what the ranks print on it is part of the cases
    cases = list({case.number: case for case, _ in all_variants()}.values())
    if options.cases:
        cases = [case for case in cases if case.number in options.cases]
    if options.broken:
        return _show_flaws(console, cases)
    engines = [engine for engine in (TORCH, LOCKSTEP) if engine.name in options.engines]
    rows = []
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    ) as progress:
        task = progress.add_task("")
        for case in cases:
            outcomes = {}
            for engine in engines:
                progress.update(task, description=f"case {case.number} on {engine.name}: {case.title}")
                outcomes[engine.name] = _run(engine, case)
                if options.verbose:
                    for name, outcome in outcomes[engine.name].items():
                        head = f"{case.number:>3} {engine.name:8} {name or '-':28} {outcome.seconds:5.1f} s"
                        progress.print(f"[{COLOURS[outcome.kind]}]{escape(f'{head}  {outcome}')}", soft_wrap=True)
            rows.append((case, outcomes))
    _print(console, rows, engines)
    if options.markdown:
        _write(options.markdown, _markdown(rows, engines))
        console.print(f"wrote {options.markdown}", highlight=False)
    return 0 if all(_worst(o["lockstep"])[1].kind == "right" for _, o in rows if "lockstep" in o) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", type=lambda text: [int(number) for number in text.split(",")], help="numbers, as in 1,24,41"
    )
    parser.add_argument(
        "--engines", type=lambda text: text.split(","), default=["torch", "lockstep"], help="one of torch,lockstep"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument("--broken", action="store_true", help="run deliberately broken engines instead")
    parser.add_argument("--verbose", action="store_true", help="print each variant with its whole error")
    parser.add_argument("--log", type=Path, metavar="FILE", help="file for the ranks' standard error")
    return parser.parse_args()


def _write(path: Path, table: str) -> None:
    """Put the rows between the markers of ``path`` where it has them; else the table becomes the whole file."""
    text = path.read_text() if path.exists() else ""
    if BEGIN in text and END in text:
        rows = {}
        for line in [*text[text.index(BEGIN) : text.index(END)].splitlines(), *table.splitlines()]:
            if (number := line.strip("| ").split(" ")[0]).isdigit():
                rows[int(number)] = line
        table = "\n".join([*table.splitlines()[:2], *(rows[number] for number in sorted(rows))]) + "\n"
        table = f"{text[: text.index(BEGIN)]}{BEGIN}\n\n{table}\n{text[text.index(END) :]}"
    path.write_text(table)


def _show_flaws(console: Console, cases: list[Case]) -> int:
    """For each case, the broken engines on which it is not right. A case that accepts all of them proves nothing."""
    blind = []
    for case in cases:
        noticed = []
        for engine in BROKEN:
            for name, variant in case.variants.items():
                outcome = run_in_own_processes(engine, case, variant)
                if outcome.kind not in ("right", "not offered"):
                    text = " ".join(outcome.text.split("\n")[0].split())[:100]
                    noticed.append(f"{engine.name}: {name or '-'}: {outcome.kind}: {text}")
                    break
        blind += [] if noticed else [case.number]
        console.print(f"{case.number:>3} {case.title}: {len(noticed)} of {len(BROKEN)} flaws noticed", highlight=False)
        for line in noticed:
            console.print(f"      {escape(line)}", soft_wrap=True, highlight=False)
    console.print(f"cases that notice no flaw: {', '.join(map(str, blind)) or 'none'}", highlight=False)
    return 1 if blind else 0


def _send_standard_error_to(path: Path | None) -> None:
    file = os.open(path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 2)
    os.close(file)


def _run(engine: Engine, case: Case) -> dict[str, Outcome]:
    return {name: run_in_own_processes(engine, case, variant) for name, variant in case.variants.items()}


def _worst(outcomes: dict[str, Outcome]) -> tuple[str, Outcome]:
    return max(outcomes.items(), key=lambda item: KINDS.index(item[1].kind))


def _words(outcomes: dict[str, Outcome], length: int = 90) -> str:
    """One cell: the verdict, how many variants are right, and the first words of the worst."""
    name, worst = _worst(outcomes)
    right = sum(outcome.kind == "right" for outcome in outcomes.values())
    if worst.kind == "right":
        return "right"
    share = f" ({right} of {len(outcomes)} right)" if len(outcomes) > 1 else ""
    text = " ".join(worst.text.split("\n")[0].split())
    text = re.sub(r"\[[WE]\d{4} [\d:.]+ (\S+)\]", r"[\1]", text)  # when it was printed
    text = text if len(text) <= length else text[: length - 1].rstrip() + "…"
    variant = f"{name}: " if len(outcomes) > 1 else ""
    return f"{worst.kind}{share}: {variant}{text}" if text else f"{worst.kind}{share}"


def _seconds(outcomes: dict[str, Outcome]) -> str:
    return f"{sum(outcome.seconds for outcome in outcomes.values()):.1f}"


def _print(console: Console, rows: list[tuple[Case, dict[str, dict[str, Outcome]]]], engines: list[Engine]) -> None:
    table = Table("case", "title", *(engine.name for engine in engines), "seconds")
    table.columns[0].justify = table.columns[-1].justify = "right"
    for case, outcomes in rows:
        cells = [
            f"[{COLOURS[_worst(outcomes[engine.name])[1].kind]}]{escape(_words(outcomes[engine.name]))}"
            for engine in engines
        ]
        table.add_row(str(case.number), case.title, *cells, _seconds(outcomes[engines[-1].name]))
    console.print(table)
    for engine in engines:
        kinds = [_worst(outcomes[engine.name])[1].kind for _, outcomes in rows]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in KINDS if kind in kinds)
        console.print(f"{engine.name}: {counts}", highlight=False)


def _markdown(rows: list[tuple[Case, dict[str, dict[str, Outcome]]]], engines: list[Engine]) -> str:
    names = [engine.name for engine in engines]
    heads = [f"what {name} does" for name in names]
    lines = [f"| case | title | {' | '.join(heads)} | seconds |", f"| ---: | --- | {'--- | ' * len(heads)}---: |"]
    for case, outcomes in rows:
        cells = [_words(outcomes[name]).replace("|", "\\|") for name in names]
        lines.append(f"| {case.number} | {case.title} | {' | '.join(cells)} | {_seconds(outcomes[names[-1]])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
