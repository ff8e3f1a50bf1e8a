"""Twenty steps on the C++ front, one rank under valgrind: no invalid access of ours, and nothing that we leak."""

from __future__ import annotations

import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cpp_programs import ROOT, WORKER, by_hand, launch

#: In seconds. It takes a minute of processor time, half of that to load torch; a busy machine needs many.
HANG = 3600


def _patiently(rank: int, world_size: int, port: int) -> dict[str, str]:
    return by_hand(rank, world_size, port) | {"FRONT_WORKER_PATIENCE": "600", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def _errors_of_ours(report: Path) -> list[str]:
    """Each error and leak with a function of ours on one of its stacks, as text."""
    texts = []
    for error in ElementTree.parse(report).getroot().iter("error"):
        stacks = [[frame.findtext("fn", "?") for frame in stack.iter("frame")] for stack in error.iter("stack")]
        if any("lockstep::" in function for stack in stacks for function in stack):
            what = error.findtext("what") or error.findtext("xwhat/text") or ""
            lines = ["\n  ".join(stack) for stack in stacks]
            texts.append(f"{error.findtext('kind')}: {what}\n  " + "\n from\n  ".join(lines))
    return texts


@pytest.mark.slow
@pytest.mark.timeout(HANG + 60)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_twenty_steps_read_and_write_what_is_ours_and_leak_nothing(tmp_path):
    valgrind = ["valgrind", "--quiet", "--num-callers=40", "--leak-check=full", "--show-leak-kinds=definite"]
    valgrind += [f"--suppressions={ROOT / 'tests/cpp/front/valgrind.supp'}"]
    valgrind += ["--xml=yes", f"--xml-file={tmp_path / '%p.xml'}"]
    results = launch(WORKER, "train", "20", how=_patiently, under={0: valgrind}, hang=HANG)
    assert [status for status, _, _ in results] == [0, 0], results
    assert results[0][1].splitlines() == ["trained 20 steps on 2 ranks"] * 2
    (report,) = tmp_path.glob("*.xml")
    assert _errors_of_ours(report) == []
