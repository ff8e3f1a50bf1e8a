"""What lockstep.StepTimer adds to a training step: blocks of steps with its hooks and without, in turns.

    torchrun --standalone --nproc-per-node 2 benchmarks/timer_cost.py --json timer_cost.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _models import Model, loss, models
from _report import print_table, write_json
from _step_report import hardware
from _step_timing import Subject, Timer, align, join_group, release
from torch import nn

import lockstep

WARMUP_STEPS = 20
TIMEOUT = timedelta(seconds=90)  # of every collective


def small(width: int, layers: int) -> Model:
    """A net whose step is over in a millisecond or two: nearly all of it is the host's work."""

    def build() -> nn.Module:
        return nn.Sequential(*itertools.chain(*((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))))

    return Model(
        f"mlp-{layers}x{width}",
        f"MLP, {layers} layers of {width}",
        build,
        lambda: (torch.randn(64, width), torch.randint(width, (64,))),
    )


class Training:
    """A model under our engine with its optimizer and batch, timed or not."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.subject = Subject.of(model, device)
        self.model = lockstep.DistributedDataParallel(self.subject.copy())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.timer = Timer(device)
        self.steps(WARMUP_STEPS)

    def steps(self, count: int) -> None:
        inputs, targets = self.subject.batch
        for _ in range(count):
            self.optimizer.zero_grad()
            with torch.autocast(self.subject.device.type, dtype=torch.bfloat16):
                value = loss(self.model(inputs), targets)
            value.backward()
            self.optimizer.step()

    def block(self, steps: int, timed: bool) -> float:
        """Milliseconds a step, of the slowest rank, from an idle device to the end of its work."""
        timer = lockstep.StepTimer(self.model, self.optimizer, warmup=0) if timed else None
        align(self.subject.device)
        self.timer.start()
        self.steps(steps)
        slowest = torch.tensor([self.timer.stop() / steps], dtype=torch.float64, device=self.subject.device)
        if timer is not None:
            timer.close()
            assert len(timer.steps()) == steps
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item()


def measure(model: Model, device: torch.device, rounds: int, steps: int) -> dict[str, object]:
    """Both kinds of blocks, the other one first in each round; the first round only warms up."""
    training = Training(model, device)
    blocks: dict[bool, list[float]] = {True: [], False: []}
    for round in range(rounds + 1):
        for timed in (round % 2 == 0, round % 2 == 1):
            blocks[timed].append(training.block(steps, timed))
    without, timed = blocks[False][1:], blocks[True][1:]
    added = [100 * (b / a - 1) for a, b in zip(without, timed, strict=True)]
    noise = [100 * abs(b / a - 1) for a, b in itertools.pairwise(without)]
    return {
        "model": model.title,
        "without_ms": without,
        "with_ms": timed,
        "added_percent": statistics.median(added),
        "added_us": 1e3 * statistics.median(b - a for a, b in zip(without, timed, strict=True)),
        "noise_percent": statistics.median(noise),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=40, help="in a block (default 40)")
    parser.add_argument("--models", nargs="*", default=["resnet50", "gpt-small"], help="of step_tax.py, after the MLPs")
    parser.add_argument("--scale", choices=["full", "tiny"], default="full", help="tiny: a smoke test")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        sys.exit("start it with: torchrun --standalone --nproc-per-node 2 benchmarks/timer_cost.py")
    device = join_group(options.device, TIMEOUT)
    known = models(options.scale)
    results = []
    for model in [small(256, 4), small(1024, 8), *(known[name] for name in options.models if known[name].is_here())]:
        results.append(measure(model, device, options.rounds, options.steps))
        release(device)
    if dist.get_rank() == 0:
        rows = [
            (
                row["model"],
                statistics.median(row["without_ms"]),
                row["added_us"],
                row["added_percent"],
                row["noise_percent"],
            )
            for row in results
        ]
        columns = ("model", "step, ms", "added, us", "added, %", "block to block, %")
        print_table(f"StepTimer on {dist.get_world_size()} ranks, {options.device}", columns, [rows])
        content = {
            "hardware": hardware(device),
            "world_size": dist.get_world_size(),
            "rounds": options.rounds,
            "steps": options.steps,
            "models": results,
        }
        write_json(options.json, "timer_cost", content)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
