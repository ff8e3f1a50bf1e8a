"""Starting the programs on the C++ front as the ranks of a world, and reading what they printed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build" / "release"))
WORKER = BUILD / "front" / "front_worker"
DIGITS, GPT = BUILD / "examples" / "digits", BUILD / "examples" / "gpt"

#: In seconds. Everything here takes a few on an idle machine.
HANG = 100

Result = tuple[int, str, str]


def by_hand(rank: int, world_size: int, port: int) -> dict[str, str]:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(world_size)} | where


def by_mpirun(rank: int, world_size: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_SIZE": world_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()} | {"MASTER_PORT": str(port)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(
    *command: object,
    ranks: tuple[int, ...] = (0, 1),
    world_size: int = 2,
    how: Callable[[int, int, int], dict[str, str]] = by_hand,
    under: dict[int, list[str]] | None = None,
    hang: float = HANG,
) -> list[Result]:
    """Run ``command`` as each of ``ranks``; return exit status, stdout and stderr of each. None outlives the call.

    Args:
        how: the environment of ``how(rank, world_size, port)`` tells a process which rank it is.
        under: by rank, a command that runs ``command``, such as a debugger.

    Raises:
        subprocess.TimeoutExpired: they have not ended within ``hang`` seconds.
    """
    port = free_port()
    processes = [
        subprocess.Popen(
            [*(under or {}).get(rank, []), *map(str, command)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | how(rank, world_size, port),
        )
        for rank in ranks
    ]
    try:
        deadline = time.monotonic() + hang
        outputs = [process.communicate(timeout=max(1.0, deadline - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def report_of(results: list[Result]) -> dict[str, Any]:
    """The JSON object that rank 0 printed last."""
    assert [status for status, _, _ in results] == [0] * len(results), results
    return json.loads(results[0][1].splitlines()[-1])
