"""One rank goes wrong: every living rank gets a named error soon, and none hangs.

LOCKSTEP_FAULT_ROUNDS=20 pytest -s tests/python/test_faults.py    # each fault 20 times; prints the longest times
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import faults
import own_processes
from faults import THRESHOLD, Told

ROUNDS = int(os.environ.get("LOCKSTEP_FAULT_ROUNDS", "1"))
RANKS = 3
#: In seconds: from the fault to the last error.
WITHIN = THRESHOLD + 5.0
#: In seconds: when the watchdog calls it a hang. Starting and joining take their time on a busy machine.
LIMIT = 40.0


@dataclass(frozen=True)
class Fault:
    """What the ranks must be told: each phrase, in one of its forms (divided by " | "), and the code."""

    happen: Callable[..., None]
    code: str
    phrases: tuple[str, ...]
    own: tuple[str, ...] = ()  #: instead of them, what the rank itself must be told
    bad_rank: int = 1
    dies: bool = False
    with_hook: str = ""  #: "waits" for its collectives, or is "asynchronous"
    options: dict[str, Any] = field(default_factory=dict)
    own_options: dict[str, Any] = field(default_factory=dict)
    join: Callable[[int, int, str], None] = faults.join_patiently


FAULTS = {
    "killed_in_forward": Fault(
        faults.killed_in_forward, "LS-021", ("rank 1 has not been heard of", "probably died"), dies=True
    ),
    "killed_in_backward": Fault(
        faults.killed_in_backward, "LS-021", ("rank 1 has not been heard of", "probably died"), dies=True
    ),
    "killed_in_hook": Fault(
        faults.killed_in_hook,
        "LS-021",
        ("rank 1 has not been heard of", "probably died"),
        dies=True,
        with_hook="asynchronous",
    ),
    "killed_in_hook_that_waits": Fault(
        faults.killed_in_hook,
        "LS-021",
        ("rank 1 has not been heard of", "probably died", "the comm hook 'Hook'"),
        dies=True,
        with_hook="waits",
    ),
    "host_of_the_store_killed": Fault(
        faults.killed_in_backward,
        "LS-021",
        ("store does not answer", "rank 0"),
        dies=True,
        bad_rank=0,
        join=faults.join_through_rank_zero,
    ),
    "skips_backward": Fault(
        faults.skips_backward, "LS-019", ("rank 1 has begun 2 forwards", "only 1", "skipped its backward")
    ),
    "other_graph": Fault(
        faults.other_graph,
        "LS-006",
        ("rank 1 has failed", "layers.4.weight"),
        own=("[rank 1]", "did not receive grad", "layers.4.weight, layers.4.bias"),
    ),
    "other_graph_static": Fault(
        faults.other_graph,
        "LS-006",
        ("rank 1 has failed", "static_graph", "layers.4.weight"),
        own=("[rank 1]", "training graph has changed", "layers.4.weight, layers.4.bias"),
        options={"static_graph": True},
    ),
    "other_hook": Fault(faults.other_hook, "LS-019", ("ranks 1 and 2 | ranks 2 and 1", "different comm hooks")),
    "no_sync": Fault(faults.no_sync, "LS-019", ("rank 1 has begun 2 forwards", "only 1", "no_sync()")),
    "other_mode": Fault(
        faults.step_of_bad_rank,
        "LS-019",
        ("ranks 1 and 2 | ranks 2 and 1", "different modes", "find_unused_parameters"),
        own_options={"find_unused_parameters": True},
    ),
    "swallowed_in_forward": Fault(
        faults.swallowed_in_forward, "LS-019", ("rank 1 has begun 2 forwards", "only 1", "exception")
    ),
    "swallowed_early_in_backward": Fault(
        faults.swallowed_early_in_backward, "LS-019", ("rank 1 swallowed an exception",)
    ),
    "swallowed_in_backward": Fault(faults.swallowed_in_backward, "LS-019", ("rank 1 swallowed an exception",)),
    "swallowed_in_hook": Fault(
        faults.swallowed_in_hook, "LS-019", ("rank 1 swallowed an exception",), with_hook="asynchronous"
    ),
}


@pytest.fixture(scope="module")
def longest() -> Iterator[dict[str, list[float]]]:
    """By fault, the longest time to an error in each round. Shown at the end when there are several."""
    times: dict[str, list[float]] = defaultdict(list)
    began = time.monotonic()
    yield times
    if ROUNDS > 1:
        print(f"\n{'fault':30} rounds  longest time to an error, s")
        for name, seconds in times.items():
            print(f"{name:30} {len(seconds):6}  {max(seconds):.1f}")
        print(f"in {time.monotonic() - began:.0f} s")


@pytest.mark.parametrize("round", range(ROUNDS))
@pytest.mark.parametrize("name", FAULTS)
def test_every_living_rank_is_told_who_did_what_and_none_hangs(longest, name: str, round: int) -> None:
    fault = FAULTS[name]
    answers = own_processes.run(
        faults.train,
        fault.happen,
        fault.bad_rank,
        fault.options,
        fault.own_options,
        fault.with_hook,
        ranks=RANKS,
        limit=LIMIT,
        lost=(fault.bad_rank,) if fault.dies else (),
        join=fault.join,
    )
    living = [rank for rank in range(RANKS) if not (fault.dies and rank == fault.bad_rank)]
    hung = [rank for rank in living if rank not in answers]
    assert not hung, f"ranks {hung} hang; the others: {answers}"
    for rank in living:
        told = answers[rank]
        if isinstance(told, BaseException):
            raise AssertionError(f"rank {rank}: {type(told).__name__} {told}") from told
        assert isinstance(told, Told) and told.text, f"rank {rank} was told nothing; the others: {answers}"
        phrases = fault.own if fault.own and rank == fault.bad_rank else fault.phrases
        missing = [phrase for phrase in phrases if not any(part in told.text for part in phrase.split(" | "))]
        assert not missing, f"rank {rank} was not told {missing}, but: {told.text}"
        assert f"[{fault.code}]" in told.text, told.text
        assert told.seconds < WITHIN, f"rank {rank} was told after {told.seconds:.1f} s: {told.text}"
    longest[name].append(max(answers[rank].seconds for rank in living))
