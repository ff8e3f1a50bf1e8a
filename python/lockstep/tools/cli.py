"""The commands. Each has ``--json`` and an exit code: 0 good, 1 the answer is bad news, 2 the question was wrong."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console

from lockstep._version import __version__


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="lockstep")
def commands() -> None:
    """Is the machine ready for data-parallel training, and is the training on N ranks still the same?"""


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
