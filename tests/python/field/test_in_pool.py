"""The cases that leave their group as good as it was."""

from __future__ import annotations

import pytest

from field.registry import LOCKSTEP, Case, Variant, all_variants
from field.runner import run_on_this_rank

SHARED = [(case, variant) for case, variant in all_variants() if not variant.own_processes]
IDS = [f"{case.number:03}-{case.run.__name__}-{variant.name}" for case, variant in SHARED]


#: Faults of hooks that torch ships, which our engine runs as they are; torch's engine shows them too.
TORCHS_HOOKS = {
    "049-sparse_with_hooks-fp16_compress_hook": "torch cannot halve sparse gradients on the CPU",
    "049-sparse_with_hooks-powersgd": "torch's PowerSGD hook takes a sparse bucket for a dense one",
    "081-powersgd_after_infinity-compressed_step": "torch's PowerSGD hook keeps infinity in its error memory",
}


@pytest.mark.parametrize(
    ("case", "variant"),
    [
        pytest.param(*item, id=name, marks=pytest.mark.xfail(reason=TORCHS_HOOKS[name]))
        if name in TORCHS_HOOKS
        else pytest.param(*item, id=name)
        for item, name in zip(SHARED, IDS, strict=True)
    ],
)
def test_case(pool_of, case: Case, variant: Variant) -> None:
    pool_of(variant.ranks).run(run_on_this_rank, LOCKSTEP.name, case.number, variant.name, timeout=case.limit)
