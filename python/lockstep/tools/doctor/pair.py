"""An all-reduce by two processes that really runs, and the transport it took.

As a program, ``python -m lockstep.tools.doctor.pair BACKEND RANK STORE``, it is one of the two processes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.tools.doctor.finding import Finding, Status

#: Elements of float32: 4 MiB.
_NUMEL = 1 << 20
_ROUNDS = 5


def check(timeout: float) -> Iterator[Finding]:
    """Run it with gloo, and with NCCL where there are two GPUs; each may take ``timeout`` seconds."""
    yield run("gloo", timeout)
    if torch.cuda.device_count() >= 2:
        yield run("nccl", timeout)
    else:
        value, detail = f"{torch.cuda.device_count()} GPUs", "NCCL needs two GPUs to show its way."
        yield Finding("all-reduce", "two processes, nccl", Status.UNCHECKED, value, detail)


def run(backend: str, timeout: float) -> Finding:
    """Start two processes, wait for them, and leave none behind."""
    name = f"two processes, {backend}"
    with tempfile.TemporaryDirectory(prefix="lockstep_doctor_") as folder:
        log = Path(folder) / "nccl"
        variables = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{log}.%p", "OMP_NUM_THREADS": "1"}
        for launcher in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            variables.pop(launcher, None)  # of a program that this one runs in
        command = [sys.executable, "-m", "lockstep.tools.doctor.pair", backend]
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(Path(folder) / "store"), str(timeout)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + timeout
        try:
            outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            detail = "Two processes of this host could not finish one all-reduce: look at the interfaces and variables."
            return Finding("all-reduce", name, Status.PROBLEM, f"no answer within {timeout:g} s", detail)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        for rank, (process, (_, errors)) in enumerate(zip(processes, outputs, strict=True)):
            if process.returncode != 0:
                last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
                return Finding("all-reduce", name, Status.PROBLEM, f"rank {rank} failed", last)
        report = json.loads(outputs[0][0].splitlines()[-1])
        texts = "".join(path.read_text(errors="replace") for path in Path(folder).glob("nccl.*"))
    way = transport(texts) if backend == "nccl" else "TCP sockets"
    bandwidth = 4 * _NUMEL / report["seconds"] / 1e9
    value = f"right; 4 MiB in {1e3 * report['seconds']:.2f} ms ({bandwidth:.2f} GB/s) through {way}"
    return Finding("all-reduce", name, Status.OK, value)


def transport(log: str) -> str:
    """The ways that NCCL's log names for its connections, such as "P2P/CUMEM"; "unknown" if it names none."""
    return ", ".join(sorted(set(re.findall(r" via (\S+)", log)))) or "unknown"


def _be_a_rank(backend: str, rank: int, store: str, timeout: float) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=limit)
    try:
        values = torch.empty(_NUMEL, device=device)
        seconds = []
        for _ in range(_ROUNDS):
            values.fill_(rank + 1)
            start = time.perf_counter()
            dist.all_reduce(values)
            if not bool((values == 3).all()):  # waits for the device, too
                sys.exit("1 + 2 was not 3 everywhere: data were damaged on the way")
            seconds.append(time.perf_counter() - start)
        print(json.dumps({"seconds": min(seconds)}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _be_a_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
