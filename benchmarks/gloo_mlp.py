"""Step time of a 25-million-parameter MLP on two gloo processes: torch tuned against lockstep, and comm hooks.

All engines run in turns within each round and are compared round by round; a block of steps starts at a barrier, and
the slowest rank counts. Started plainly it spawns its processes; under torchrun it joins those of torchrun. On a slow
wire, between two network namespaces (as root): two_hosts.sh 1gbit benchmarks/gloo_mlp.py --hooks fp16 power_sgd:rank=2
"""

from __future__ import annotations

import argparse
import ast
import itertools
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from _contenders import LOCKSTEP_DEFAULT, LOCKSTEP_VIEWS, TORCH_TUNED, Contender, engines, lockstep_engine, with_options
from _report import console, print_missing, print_table, write_json
from torch import nn

WIDTHS = (1024, 2048, 2048, 2048, 2048, 2048, 2048, 1024)  # 25.2 million parameters
WARMUP_STEPS = 3  # torch builds its buckets anew before the second
TIMEOUT = timedelta(seconds=120)  # of every collective: a rank that fails must not leave the others waiting


class Runner:
    """The MLP under one engine with its optimizer and this rank's batch, warmed up."""

    def __init__(self, contender: Contender, batch: int) -> None:
        torch.manual_seed(0)
        layers = [layer for sizes in itertools.pairwise(WIDTHS) for layer in (nn.Linear(*sizes), nn.ReLU())]
        self.name = contender.name
        self.model = contender.wrap(nn.Sequential(*layers[:-1]), dist.group.WORLD)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        torch.manual_seed(1 + dist.get_rank())
        self.inputs, self.targets = torch.randn(batch, WIDTHS[0]), torch.randn(batch, WIDTHS[-1])
        self.steps(WARMUP_STEPS)

    def steps(self, count: int) -> float:
        """Run `count` whole training steps from a barrier on; return this rank's mean seconds per step."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(self.inputs), self.targets).backward()
            self.optimizer.step()
        return (time.perf_counter() - start) / count


def hooked(text: str) -> Contender:
    """Our engine with the comm hook ``name:key=value:key=value``, compressing from the first step on."""
    name, *pairs = text.split(":")
    arguments = {key: ast.literal_eval(value) for key, value in (pair.split("=") for pair in pairs)}
    if name.endswith("power_sgd"):
        arguments.setdefault("start_iteration", 0)

    def wrap(module: nn.Module, group: dist.ProcessGroup, **options: object) -> nn.Module:
        model = with_options(lockstep_engine())(module, group, **options)
        model.set_comm_hook(name, **arguments)
        return model

    return Contender(f"lockstep {text}", wrap)


def measure(options: argparse.Namespace) -> None:
    """Run one rank, whose process group exists; rank 0 prints and writes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    found, missing = engines()
    wanted = (TORCH_TUNED, LOCKSTEP_DEFAULT) if options.hooks else (TORCH_TUNED, LOCKSTEP_DEFAULT, LOCKSTEP_VIEWS)
    compared = [contender for contender in found if contender.name in wanted] + [hooked(text) for text in options.hooks]
    runners = [Runner(contender, options.batch) for contender in compared]
    seconds = torch.zeros(options.rounds, len(runners), dtype=torch.float64)
    for first in range(options.rounds):
        for place in range(len(runners)):
            turn = (first + place) % len(runners)
            seconds[first, turn] = runners[turn].steps(options.steps)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        report(options, [runner.name for runner in runners], seconds, missing)


def report(options: argparse.Namespace, names: list[str], seconds: torch.Tensor, missing: dict[str, str]) -> None:
    """Print medians over rounds and write all rounds. `seconds`: rounds x contenders."""
    tuned = seconds[:, names.index(TORCH_TUNED)]
    results = [
        {
            "contender": name,
            "step_ms": statistics.median(mine.tolist()) * 1e3,
            "ratio_to_torch_tuned": statistics.median((mine / tuned).tolist()),
            "step_ms_rounds": (mine * 1e3).tolist(),
        }
        for name, mine in zip(names, seconds.unbind(1), strict=True)
    ]
    skipped = {name: reason for name, reason in missing.items() if name.startswith("lockstep")}
    print_missing(skipped)
    parameters = sum((fan_in + 1) * fan_out for fan_in, fan_out in itertools.pairwise(WIDTHS))
    print_table(
        f"MLP of {parameters} parameters, {dist.get_world_size()} gloo processes, {options.rounds} rounds",
        ["contender", "step ms", "/ torch tuned"],
        [[[r["contender"], r["step_ms"], r["ratio_to_torch_tuned"]] for r in results]],
    )
    settings = {"rounds": options.rounds, "steps": options.steps, "batch": options.batch, "parameters": parameters}
    content = {"world_size": dist.get_world_size(), "settings": settings, "skipped": skipped, "results": results}
    write_json(options.json, "gloo_mlp", content)


def spawned(rank: int, options: argparse.Namespace, store: str) -> None:
    """Join the group of a process that `main` started."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.world, timeout=TIMEOUT)
    measure(options)
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="each runs every contender once (default 15)")
    parser.add_argument("--steps", type=int, default=3, help="of a contender in a round (default 3)")
    parser.add_argument("--batch", type=int, default=32, help="samples of each process (default 32)")
    parser.add_argument("--world", type=int, default=2, help="processes to start (default 2; torchrun decides itself)")
    parser.add_argument("--hooks", nargs="+", default=[], metavar="NAME[:KEY=VALUE]", help="comm hooks to compare too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    return parser.parse_args()


def main() -> None:
    """Join torchrun's processes or start some."""
    options = parse_options()
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        measure(options)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder, console.status("measuring"):
        torch.multiprocessing.spawn(spawned, (options, f"{folder}/store"), nprocs=options.world)


if __name__ == "__main__":
    main()
