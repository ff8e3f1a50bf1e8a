"""The commands ``lockstep bench scaling``, ``lockstep bench comm`` and ``lockstep tune``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import click
from rich.console import Console

from lockstep._codes import Code, tagged

_DEVICE = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU for every rank, if there are as many.",
)
_NPROC = click.option("--nproc", default=2, show_default=True, type=click.IntRange(2), help="Ranks.")
_TIMEOUT = click.option("--timeout", default=300.0, show_default=True, help="Seconds for a start, or for a round.")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def bench() -> None:
    """Did further devices help, and where did the rest of the time go?"""


@bench.command()
@click.argument("recipe")
@_NPROC
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(2), help="Of both runs, in turns.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(2), help="Of each run in a round.")
@click.option("--weak", is_flag=True, help="Let the global batch grow with the ranks; E = T1 / Tn.")
@_DEVICE
@_TIMEOUT
@_JSON
def scaling(
    recipe: str, nproc: int, rounds: int, steps: int, weak: bool, device: str, timeout: float, as_json: bool
) -> None:
    """Train RECIPE in one process and on N ranks in turns: E = T1 / (n Tn), and what the lost time went into.

    RECIPE is module:function or file.py:function, as for lockstep align; both runs have its settings and the same
    global batch. Medians come with their 95 % interval. The table names causes, the one that cost most first: what was
    measured, what would be healthy, what to do, and its share of the time that a step of N ranks takes beyond T1 / n.

    \b
    lockstep bench scaling lockstep.examples.align_digits:make --nproc 2
    lockstep bench scaling train.py:make --nproc 4 --weak --json

    Exit code: 0, or 2 if the recipe cannot be run.
    """
    from lockstep.tools.bench import scaling as tool
    from lockstep.tools.bench.report import show_scaling

    device = _chosen(device, nproc)
    job = tool.Job(recipe, nproc, rounds, steps, weak, device, timeout)
    found = _run("bench scaling", f"Training {recipe} in 1 and in {nproc} processes on {device}", tool.measure, job)
    _put({"recipe": recipe} | found.as_dict(), device, as_json, lambda: show_scaling(found, Console()))


@bench.command()
@_NPROC
@click.option("--min", "smallest", default="1K", show_default=True, help="Bytes of the smallest, such as 4, 1K, 64M.")
@click.option("--max", "largest", default="1G", show_default=True, help="Bytes of the largest.")
@click.option("--factor", default=4, show_default=True, type=click.IntRange(2), help="From one size to the next.")
@_DEVICE
@_TIMEOUT
@_JSON
def comm(nproc: int, smallest: str, largest: str, factor: int, device: str, timeout: float, as_json: bool) -> None:
    """All-reduce on N ranks, over the process group and over lockstep's connections: time, and bandwidth.

    By the convention of nccl-tests: algbw is size / time, busbw is 2 (n - 1) / n times that. All-reduces follow each
    other back to back, and the slowest rank counts.

    \b
    lockstep bench comm --nproc 2 --min 1M --max 64M

    Exit code: 0, or 2 if a process failed.
    """
    from lockstep.tools.bench import comm as tool
    from lockstep.tools.bench.report import show_comm

    device = _chosen(device, nproc)
    job = tool.Job(nproc, _bytes(smallest), _bytes(largest), factor, device, timeout)
    if job.smallest > job.largest:
        raise click.UsageError(tagged(Code.BAD_OPTION, f"--min {smallest} is larger than --max {largest}."))
    rows = _run("bench comm", f"Reducing on {nproc} ranks on {device}", tool.measure, job)
    backend = "nccl" if device == "cuda" else "gloo"
    content = {"ranks": nproc, "backend": backend, "sizes": [row.as_dict(nproc) for row in rows]}
    _put(content, device, as_json, lambda: show_comm(rows, nproc, backend, Console()))


@click.command()
@click.argument("recipe")
@_NPROC
@click.option("--rounds", default=8, show_default=True, type=click.IntRange(3), help="At most, of each contender.")
@click.option("--steps", default=10, show_default=True, type=click.IntRange(2), help="Of each run in a round.")
@click.option("--lossy", is_flag=True, help="Try comm hooks that round or compress, too: gradients change.")
@_DEVICE
@_TIMEOUT
@_JSON
def tune(
    recipe: str, nproc: int, rounds: int, steps: int, lossy: bool, device: str, timeout: float, as_json: bool
) -> None:
    """Find the bucket size, views, communicator and hook that are fastest for RECIPE on N ranks.

    A tournament: each setting against the best before it, in turns, until the 95 % interval of their ratio decides or
    the difference is within noise. Prints the table, the winner and its line of code. Settings that cost exactness are
    tried with --lossy only.

    \b
    lockstep tune train.py:make --nproc 2 --lossy

    RECIPE is as for lockstep align. Exit code: 0, or 2 if the recipe cannot be run.
    """
    from lockstep.tools.bench import tune as tool
    from lockstep.tools.bench.report import show_tuning

    device = _chosen(device, nproc)
    job = tool.Job(recipe, nproc, rounds, steps, lossy, device, timeout)
    found = _run("tune", f"Trying settings for {recipe} on {nproc} ranks on {device}", tool.tune, job)
    content = {"recipe": recipe, "ranks": nproc} | found.as_dict()
    _put(content, device, as_json, lambda: show_tuning(found, Console()))


def _run(command: str, what: str, measure: Callable[..., Any], job: Any) -> Any:
    from lockstep.tools.align.recipe import RecipeError

    try:
        with Console(stderr=True).status(what):
            return measure(job)
    except RecipeError as error:
        click.echo(f"lockstep {command}: {error}", err=True)
        sys.exit(2)


def _put(content: dict[str, Any], device: str, as_json: bool, show: Callable[[], None]) -> None:
    from lockstep.tools.bench.environment import environment

    if as_json:
        click.echo(json.dumps({"environment": environment(device)} | content, indent=1))
    else:
        show()


def _chosen(device: str, ranks: int) -> str:
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.device_count() >= ranks else "cpu"


def _bytes(text: str) -> int:
    factors = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number, factor = (text[:-1], factors[text[-1].upper()]) if text[-1:].upper() in factors else (text, 1)
    if not number.isdigit() or int(number) == 0:
        wrong = f"'{text}' is no size in bytes: write 4096, 4K, 64M or 1G."
        raise click.UsageError(tagged(Code.BAD_OPTION, wrong))
    return int(number) * factor
