"""The cases after which a group is of no use, or in which ranks are lost."""

from __future__ import annotations

import pytest

from field.registry import LOCKSTEP, Case, Variant, all_variants
from field.runner import run_in_own_processes

OWN = [(case, variant) for case, variant in all_variants() if variant.own_processes]
IDS = [f"{case.number:03}-{case.run.__name__}-{variant.name}" for case, variant in OWN]


@pytest.mark.parametrize(("case", "variant"), OWN, ids=IDS)
def test_case(case: Case, variant: Variant) -> None:
    outcome = run_in_own_processes(LOCKSTEP, case, variant)
    assert outcome.kind == "right", str(outcome)
