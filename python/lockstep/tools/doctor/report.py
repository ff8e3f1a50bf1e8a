"""The findings as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.markup import escape
from rich.table import Table

from lockstep.tools.doctor.finding import Finding, Status

_STYLE = {
    Status.OK: "green",
    Status.INFO: "cyan",
    Status.WARNING: "yellow",
    Status.PROBLEM: "bold red",
    Status.UNCHECKED: "dim",
}


def table(findings: Iterable[Finding]) -> Table:
    """One row a finding, in the order of the checks: what, how it is meant, the value, and below it what to do."""
    result = Table(box=box.SIMPLE_HEAD)
    for heading in ("area", "what", "", "value"):
        result.add_column(heading, overflow="fold", no_wrap=heading == "area")
    area = ""
    for finding in findings:
        shown = "" if finding.area == area else finding.area
        area = finding.area
        style = _STYLE[finding.status]
        status = f"[{style}]{finding.status.value}[/{style}]"
        value = escape(finding.value) + (f"\n[dim]{escape(finding.detail)}[/dim]" if finding.detail else "")
        result.add_row(shown, escape(finding.name), status, value)
    return result
