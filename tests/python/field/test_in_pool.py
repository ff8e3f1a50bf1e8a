"""The cases that leave their group as good as it was."""

from __future__ import annotations

import pytest

from field.registry import LOCKSTEP, Case, Variant, all_variants
from field.runner import run_on_this_rank

SHARED = [(case, variant) for case, variant in all_variants() if not variant.own_processes]
IDS = [f"{case.number:03}-{case.run.__name__}-{variant.name}" for case, variant in SHARED]


@pytest.mark.parametrize(("case", "variant"), SHARED, ids=IDS)
def test_case(pool_of, case: Case, variant: Variant) -> None:
    pool_of(variant.ranks).run(run_on_this_rank, LOCKSTEP.name, case.number, variant.name, timeout=case.limit)
