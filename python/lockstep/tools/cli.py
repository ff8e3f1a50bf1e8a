"""The commands. Each has ``--json`` and an exit code: 0 good, 1 the answer is bad news, 2 the question was wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from rich.console import Console

from lockstep._version import __version__
from lockstep.tools.bench.cli import bench, tune


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="lockstep")
def commands() -> None:
    """Is the machine ready for data-parallel training, is it still the same training on N ranks, and how fast is it?"""


@commands.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option("--strict", is_flag=True, help="Warnings make the exit code 1, too.")
@click.option("--skip-all-reduce", is_flag=True, help="Do not start the two processes.")
@click.option("--timeout", default=60.0, show_default=True, help="Seconds that the two processes may take.")
def doctor(as_json: bool, strict: bool, skip_all_reduce: bool, timeout: float) -> None:
    """Look at this machine: versions, variables, GPUs and links, interfaces, limits, and an all-reduce that runs.

    Exit code: 0 without problems, 1 with one (--strict: or a warning). What cannot be checked, for want of a GPU say,
    is listed and no problem.
    """
    from lockstep.tools.doctor import Status, examine
    from lockstep.tools.doctor.report import table

    with Console(stderr=True).status("Looking at the machine"):
        findings = examine(timeout=None if skip_all_reduce else timeout)
    bad = {Status.PROBLEM, Status.WARNING} if strict else {Status.PROBLEM}
    healthy = not any(finding.status in bad for finding in findings)
    if as_json:
        click.echo(json.dumps({"healthy": healthy, "findings": [finding.as_dict() for finding in findings]}, indent=1))
    else:
        Console().print(table(findings))
    sys.exit(0 if healthy else 1)


@commands.command()
@click.argument("recipe")
@click.option("--nproc", default=2, show_default=True, type=click.IntRange(2), help="Ranks to compare with one.")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(1), help="Optimizer steps.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1), help="Of weights and streams.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU for every rank, if there are as many.",
)
@click.option("--level", default=2, show_default=True, type=click.IntRange(0, 3), help="Level that exit code 0 needs.")
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw both curves: PNG, SVG or PDF.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for a start, or for a step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with every step.")
def align(
    recipe: str,
    nproc: int,
    steps: int,
    seed: int,
    device: str,
    level: int,
    picture: Path | None,
    timeout: float,
    as_json: bool,
) -> None:
    """Train RECIPE in one process and on N ranks with the same global batch, and compare step by step.

    RECIPE is module:function or file.py:function. The function, of (rank, world_size) or of nothing, returns a
    lockstep.tools.align.Recipe, or (model, dataset, loss, optimizer, settings).

    Levels: 3 equal bit for bit; 2 equal within rounding, 1e-5 on weights; 1 converges alike; 0 does not. Where the runs
    part, the first step and the causes that checks confirm are named.

    \b
    lockstep align lockstep.examples.align_digits:make --nproc 3 --picture digits.png
    lockstep align train.py:make --steps 20 --json

    Exit code: 0 if --level is reached, 1 if not, 2 if the recipe cannot be run.
    """
    import torch

    from lockstep.tools.align.launch import Job, RecipeError
    from lockstep.tools.align.launch import align as run
    from lockstep.tools.align.report import draw, show

    if device == "auto":
        device = "cuda" if torch.cuda.device_count() >= nproc else "cpu"
    try:
        with Console(stderr=True).status(f"Training {recipe} in 1 and in {nproc} processes on {device}"):
            comparison = run(Job(recipe, nproc, steps, seed, device, timeout))
        if picture is not None:
            draw(comparison, picture)
    except RecipeError as error:
        click.echo(f"lockstep align: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps(comparison.as_dict(), indent=1))
    else:
        show(comparison, Console())
    sys.exit(0 if comparison.level >= level else 1)


commands.add_command(bench)
commands.add_command(tune)
