"""Ranks that die or are stuck, and how a process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from field.kit import LATE, assert_contains, in_turns, refused, standard_error, store
from field.registry import Engine, case
from oracle import rank_data

#: In seconds: how soon a death must be known, with some time for a busy machine.
DEATH_KNOWN = 9.0


#: In seconds: from the last statement to the end of the process, on a busy machine.
LEAVING = 8.0


def _raise() -> None:
    try:
        raise ValueError("user code failed")
    finally:
        print("ValueError: user code failed", file=sys.stderr, flush=True)
        os._exit(1)  # as the interpreter would, after the traceback


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stuck() -> None:
    """For ever, as in a debugger."""
    os.read(os.pipe()[0], 1)


FATES = {"raises": _raise, "exits": lambda: os._exit(1), "killed": _kill, "stuck": _stuck}


class Fated(nn.Module):
    """Does something to its rank in forward or in the middle of backward, when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x: torch.Tensor, fate: str = "", where: str = "") -> torch.Tensor:
        if where == "forward":
            FATES[fate]()
        x = self.layers[:2](x)
        if where == "backward":
            x.register_hook(lambda grad: FATES[fate]())
        return self.layers[2:](x)


@case(
    85,
    "one rank dies or is stuck",
    variants={
        f"{fate}_{where}": {"fate": fate, "where": where}
        for fate, where in [
            ("raises", "forward"),
            ("exits", "between"),
            ("killed", "forward"),
            ("killed", "backward"),
            ("stuck", "forward"),
            ("stuck", "backward"),
        ]
    },
    lost=(1,),
)
def rank_lost(engine: Engine, fate: str, where: str) -> None:
    """https://github.com/pytorch/pytorch/issues/17113 https://github.com/Lightning-AI/pytorch-lightning/issues/8130
    https://github.com/pytorch/pytorch/pull/49305 https://github.com/GestaltCogTeam/BasicTS/issues/250

    Symptom: the job looks alive for half an hour or for ever; the real error is buried.
    Right: every other rank raises in time and says which rank did not come, in which step, for which bucket.
    """
    model = engine.wrap(Fated(), bucket_cap_mb=0.0003, **engine.where_offered(stall_threshold=2.0))
    for step in range(3):
        model(rank_data(3, 6, step=step)).sum().backward()
        model.zero_grad()
    dist.barrier()
    if dist.get_rank() == 1:
        store().set("fate", "1")
        if where == "between":
            FATES[fate]()
        model(rank_data(3, 6), fate, where).sum().backward()
        return
    store().wait(["fate"])
    within = LATE if fate == "stuck" else DEATH_KNOWN
    with standard_error() as stream, refused(engine, "rank 1", within=within) as caught:
        for step in range(2):
            model(rank_data(3, 6, step=step)).sum().backward()
    # The ranks agree on a pass before its first bucket; in the middle of backward a bucket is what one waits for.
    assert_contains(caught.text, *(["bucket", "layers."] if where == "backward" else ["step"]))
    assert "construct" not in caught.text, f"that rank has trained before: {caught.text}"
    if fate == "stuck" and engine.where_offered(stall_threshold=2.0):
        assert_contains(stream.text, "rank 0", "rank 1", f"is in {where}")


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
import lockstep
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from datetime import timedelta

rank, folder, engine, how = int(sys.argv[1]), *sys.argv[2:]
store = dist.FileStore(os.path.join(folder, "store_" + how), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
cls = lockstep.DistributedDataParallel if engine == "lockstep" else TorchDDP
module = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
keywords = {"stall_threshold": 2.0} if engine == "lockstep" and how == "one_raises" and OFFERED else {}
model = cls(module, **keywords)
for step in range(2):
    if how == "one_raises" and rank == 1 and step == 1:
        print("leaving", time.time(), flush=True)
        raise ValueError("user code failed")
    try:
        model(torch.ones(3, 512)).sum().backward()
    except RuntimeError as error:
        print("leaving", time.time(), flush=True)
        raise
if how == "left_pending":
    with model.no_sync():
        model(torch.ones(3, 512)).sum().backward()
    out = model(torch.ones(3, 512))
if how == "group_first":
    dist.destroy_process_group()
    del model
print("leaving", time.time(), flush=True)
"""


@case(
    95,
    "the end of a process",
    variants={how: {"how": how} for how in ("left_pending", "group_first", "one_raises")},
    limit=90,
)
def interpreter_exit(engine: Engine, how: str) -> None:
    """https://github.com/GestaltCogTeam/BasicTS/issues/250 https://github.com/pytorch/pytorch/pull/49305

    Symptom: a hang or an abort at the interpreter's exit, when one rank leaves early or something is pending.
    Right: every process ends within seconds of its last statement, without "terminate called".
    """
    folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
    folder = in_turns(lambda: folder)[0]
    offered = bool(engine.where_offered(stall_threshold=2.0))
    script = SCRIPT.replace("OFFERED", str(offered))
    path = [entry for entry in sys.path if (Path(entry) / "lockstep").is_dir()]
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(dist.get_rank()), folder, engine.name, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
    )
    try:
        out, errors = process.communicate(timeout=50)
    except subprocess.TimeoutExpired:
        raise AssertionError("the process did not end") from None
    finally:
        process.kill()
    ended = time.time()
    assert "leaving" in out, errors
    seconds = ended - float(out.split()[-1])
    assert seconds < LEAVING, f"it took {seconds:.1f} s to leave"
    assert "terminate called" not in errors, errors
    if how != "one_raises":
        assert process.returncode == 0, f"ended with {process.returncode}: {errors}"
        return
    assert process.returncode == 1, f"ended with {process.returncode}: {errors}"
    assert_contains(errors, "user code failed" if dist.get_rank() == 1 else "rank 1")
