"""Cases that torch's engine passes too: each is shown to fail on an engine of ours with a deliberate flaw."""

from __future__ import annotations

import pytest

from field.flaws import FLAWS
from field.registry import CASES, Engine, all_variants
from field.runner import run_in_own_processes
from field.test_report import rows_of_the_readme

#: By case: the flaw (see flaws.py), the variant that notices it, and words of its complaint.
PROOFS: dict[int, tuple[str, str, str]] = {
    2: ("alarmist", "disjoint", "a false alarm"),
    4: ("filler", "none", "step 1"),
    5: ("half", "default", "gradient 1 of rank 0 differs"),
    27: ("forgetful", "default", "trunk.weight: Tensor-likes are not close"),
    31: ("careless", "", "gradients have left their buckets"),
    35: ("half", "default", "gradient 1 of rank 0 differs"),
    51: ("ownbuffers", "", "buffer at the beginning of forward"),
    63: ("meddler", "find", "Tensor-likes are not close"),
    64: ("meddler", "find", "a constant came back with requires_grad"),
    70: ("alone", "inside", "gradient 0 of rank 0 differs"),
    75: ("undivided", "sum_only", "Tensor-likes are not close"),
    80: ("noisy", "", "took another path"),
    92: ("undivided", "sum", "sum: Tensor-likes are not close"),
    93: ("noisy", "two_ranks", "two runs differ"),
    99: ("forgetful", "views", "layers.0.weight: Tensor-likes are not close"),
}


@pytest.mark.parametrize("number", PROOFS)
def test_the_case_notices_the_flaw(number: int) -> None:
    flaw, variant, words = PROOFS[number]
    list(all_variants())  # registers the cases
    outcome = run_in_own_processes(Engine(flaw), CASES[number], CASES[number].variants[variant])
    assert outcome.kind not in ("right", "not offered", "hang"), f"case {number} accepts an engine that is {flaw}"
    assert words in outcome.text, f"case {number} fails for another reason: {outcome}"


def test_every_case_that_is_right_on_torchs_engine_has_its_proof():
    assert set(PROOFS) == {number for number, cells in rows_of_the_readme().items() if cells[1] == "right"}


def test_every_flaw_is_needed():
    assert {flaw for flaw, _, _ in PROOFS.values()} == set(FLAWS)
