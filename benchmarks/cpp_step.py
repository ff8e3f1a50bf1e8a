"""A step on the C++ front against torch's DDP in Python, on the same models with the same batch.

    python benchmarks/cpp_step.py --program build/release/front/cpp_step --model gpt --rounds 12

Starts as many processes of each kind as there are ranks, all of which stay alive; they take turns, a round each. Within
a round contenders of one language take turns too. "limit" is a step with one all-reduce of one element instead of the
gradients, in either language; percentages are over that of the same language and round, and "/ torch" is the time over
that of torch's faster contender of the same round. Ranks use a GPU each, with NCCL, where there are enough, and gloo
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from _report import console, print_table, write_json
from torch import nn
from torch.nn.functional import gelu, mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

WARMUP_STEPS = 3
TORCH = {"torch default": {}, "torch tuned": {"gradient_as_bucket_view": True, "bucket_cap_mb": 100}}

# ---- the models of cpp_models.h ----


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.body = nn.Sequential(first, nn.BatchNorm2d(channels), nn.ReLU(), second, nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[2]
        query, key, value = self.qkv(self.norm1(x)).view(*x.shape[:2], 3, width // 64, 64).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        y = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return y + self.down(gelu(self.up(self.norm2(y))))


def make_task(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The net, its inputs, and targets."""
    torch.manual_seed(0)
    if options.model == "resnet":
        width, side = options.width or 128, options.size or 32
        first = nn.Conv2d(3, width, 3, padding=1, stride=2)
        blocks = [Residual(width) for _ in range(20)]
        net = nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(width, 100))
        shape: tuple[int, ...] = (options.batch or 4, 3, side, side)
        answer: tuple[int, ...] = (shape[0], 100)
    else:
        width = options.width or 256
        net = nn.Sequential(*(Block(width) for _ in range(12)), nn.Linear(width, 256))
        shape = (options.batch or 4, options.size or 128, width)
        answer = (*shape[:2], 256)
    return net.to(device), torch.randn(shape, device=device), torch.randn(answer, device=device)


# ---- one rank in Python ----


def make_step(name: str, options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """Forward, backward, reduction and optimizer of one contender."""
    net, inputs, targets = make_task(options, device)
    model = net
    if name in TORCH:
        places = None if device.type == "cpu" else [device]
        model = DistributedDataParallel(net, device_ids=places, **TORCH[name])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        if name == "limit":
            dist.all_reduce(torch.zeros(1, device=device))
        optimizer.step()

    for _ in range(WARMUP_STEPS):
        step()
    return step


def time_steps(step: Callable[[], None], count: int, device: torch.device) -> float:
    """Milliseconds a step of the slowest rank."""
    dist.all_reduce(torch.zeros(1))
    synchronize = (lambda: None) if device.type == "cpu" else torch.cuda.synchronize
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize()
    elapsed = torch.tensor([1000 * (time.perf_counter() - start) / count], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def serve(options: argparse.Namespace) -> None:
    """A rank: a round for each line on rank 0's standard input."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=600))
    steps = {name: make_step(name, options, device) for name in ("limit", *TORCH)}
    while True:
        wanted = torch.tensor([1 if rank == 0 and sys.stdin.readline() else 0])
        dist.all_reduce(wanted)
        if not wanted.item():
            break
        times = {name: time_steps(step, options.steps, device) for name, step in steps.items()}
        if rank == 0:
            print(json.dumps(times), flush=True)
    dist.destroy_process_group()


# ---- the turns ----


class Side:
    """All ranks of one language."""

    def __init__(self, command: list[str], ranks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        where = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        where |= {"LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
        self.processes = [
            subprocess.Popen(
                command,
                env=os.environ | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(ranks)
        ]

    def round(self) -> dict[str, float]:
        """Milliseconds a step, by contender."""
        first = self.processes[0]
        assert first.stdin is not None and first.stdout is not None
        first.stdin.write("\n")
        first.stdin.flush()
        line = first.stdout.readline()
        if not line:
            raise SystemExit(f"cpp_step.py: {first.args[0]} ended with status {first.wait()}; see its error above")
        return json.loads(line)

    def close(self) -> None:
        stdin = self.processes[0].stdin
        assert stdin is not None
        stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()


def compare(options: argparse.Namespace) -> None:
    sizes = [f"--{name}={getattr(options, name)}" for name in ("model", "batch", "width", "size", "steps")]
    cpp = [str(options.program), *(word for pair in sizes for word in pair.split("=")), "--turns"]
    python = [sys.executable, str(Path(__file__).resolve()), "--serve", *sizes]
    sides = {"C++": Side(cpp, options.ranks), "Python": Side(python, options.ranks)}
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        for number in range(options.rounds):
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            rounds.append({name: sides[name].round() for name in order})
        for side in sides.values():
            side.close()
    finally:
        for side in sides.values():
            side.kill()

    rows, results = [], {}
    for side in sides:
        for name in rounds[0][side]:
            times = [a_round[side][name] for a_round in rounds]
            over = [100 * (a_round[side][name] / a_round[side]["limit"] - 1) for a_round in rounds]
            beside = [a_round[side][name] / min(a_round["Python"][best] for best in TORCH) for a_round in rounds]
            medians = {"ms": statistics.median(times), "over_limit": statistics.median(over)}
            results[f"{side} {name}"] = medians | {"over_torch": statistics.median(beside), "rounds_ms": times}
            rows.append((f"{side}, {name}", *medians.values(), statistics.median(beside)))
    load = os.getloadavg()[0]
    title = f"{options.model}, {options.ranks} ranks, {options.rounds} rounds of {options.steps} steps, load {load:.1f}"
    print_table(title, ("contender", "ms a step", "% over limit", "/ torch"), [rows])
    settings = {name: value for name, value in vars(options).items() if name not in ("program", "json", "serve")}
    write_json(options.json, "cpp_step", {"settings": settings, "load": load, "results": results})
    console.print(json.dumps({name: {k: round(v[k], 3) for k in ("ms", "over_limit", "over_torch")}
                              for name, v in results.items()}), highlight=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, default=Path("build/release/front/cpp_step"), help="the built cpp_step")
    parser.add_argument("--model", choices=("resnet", "gpt"), default="gpt")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4, help="steps of each contender in a round")
    for name, text in (("batch", "of a rank"), ("width", "of the model"), ("size", "of an image, or tokens")):
        parser.add_argument(f"--{name}", type=int, default=0, help=f"{text}; 0: the model's default")
    parser.add_argument("--json", type=Path, help="where all figures go")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options)
    elif not options.program.exists():
        parser.error(f"there is no {options.program}: build the target cpp_step, or say --program")
    else:
        compare(options)


if __name__ == "__main__":
    main()
