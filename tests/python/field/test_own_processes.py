"""The cases after which a group is of no use, or in which ranks are lost."""

from __future__ import annotations

import pytest

from field.registry import LOCKSTEP, Case, Variant, all_variants
from field.runner import run_in_own_processes

OWN = [(case, variant) for case, variant in all_variants() if variant.own_processes]
IDS = [f"{case.number:03}-{case.run.__name__}-{variant.name}" for case, variant in OWN]


#: Collectives of different sizes meet in gloo, which ends the process before anybody can say why.
MEET_IN_GLOO = {
    "017-other_collectives-other_order": "the user's collective and ours are in the same group",
    "074-waiting_callback-many_buckets": "hooks that communicate in callbacks do so in another order on each rank",
}


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(*item, id=name, marks=pytest.mark.xfail(reason=MEET_IN_GLOO[name]) if name in MEET_IN_GLOO else ())
        for item, name in zip(OWN, IDS, strict=True)
    ],
)
def test_case(case: Case, variant: Variant) -> None:
    outcome = run_in_own_processes(LOCKSTEP, case, variant)
    assert outcome.kind == "right", str(outcome)
