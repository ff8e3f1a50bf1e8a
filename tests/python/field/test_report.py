"""README's table of cases is the one that scripts/field_report.py writes."""

from __future__ import annotations

import re
from pathlib import Path

from field.registry import CASES, all_variants

README = Path(__file__).parents[3] / "README.md"
BEGIN, END = "<!-- field-report:begin -->", "<!-- field-report:end -->"


def rows_of_the_readme() -> dict[int, list[str]]:
    """By case: title, what torch does, what we do, seconds."""
    text = README.read_text()
    table = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.strip().splitlines()[2:]]
    assert all(len(row) == 5 for row in rows), "case, title, torch, lockstep, seconds"
    listed = [int(row[0]) for row in rows]
    assert len(set(listed)) == len(listed), "a case has two rows"
    return {int(row[0]): [cell.strip() for cell in row[1:]] for row in rows}


def test_the_readme_has_one_row_for_each_registered_case():
    list(all_variants())  # registers them
    titles = {number: cells[0] for number, cells in rows_of_the_readme().items()}
    assert titles == {number: case.title for number, case in CASES.items()}


def test_the_readme_shows_every_case_right_on_our_engine():
    assert {number for number, cells in rows_of_the_readme().items() if cells[2] != "right"} == set()
