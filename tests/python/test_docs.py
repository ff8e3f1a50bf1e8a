"""The worked examples of docs/hooks.md run, and do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import lockstep
from models import Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data

ROOT = Path(__file__).parents[2]


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs/hooks.md").read_text(), re.M | re.S)


def _namespace() -> dict[str, Any]:
    (code,) = _blocks("python")
    names: dict[str, Any] = {}
    exec(compile(code, "docs/hooks.md", "exec"), names)
    return names


def _trains() -> None:
    names = _namespace()
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module, bucket_cap_mb=0.0003))
    state = names["TopKState"](ratio=0.5)
    pair.wrapped.register_comm_hook(state, names["top_k_hook"])
    sent = [torch.zeros_like(p) for p in pair.plain.parameters()]
    due = [torch.zeros_like(p) for p in pair.plain.parameters()]
    for step in range(5):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        grads = [p.grad for p in pair.wrapped.parameters()]
        assert_bit_equal_on_all_ranks(grads, "gradient")
        for total, grad in zip(sent, grads, strict=True):
            total += grad
        for total, theirs in zip(due, pair.plain.parameters(), strict=True):
            total += mean_over_ranks(theirs.grad)
        pair.update()
        pair.zero()
    # Nothing is lost: what was sent, and what the ranks still hold back, is the sum of all means.
    for p, total, expected in zip(pair.wrapped.parameters(), sent, due, strict=True):
        held_back = mean_over_ranks(state.errors[p]).view_as(p)
        torch.testing.assert_close(total + held_back, expected, rtol=1e-4, atol=1e-4)
    assert any(error.any() for error in state.errors.values())


def test_the_top_k_hook_in_python_loses_nothing(ranks):
    ranks.run(_trains)


def test_the_hook_in_cpp_is_the_one_that_is_tested():
    source = (ROOT / "tests/cpp/engine/top_k_hook.h").read_text()
    blocks = _blocks("cpp")
    assert len(blocks) == 2
    for block in blocks:
        assert block in source, "docs/hooks.md and tests/cpp/engine/top_k_hook.h differ"
