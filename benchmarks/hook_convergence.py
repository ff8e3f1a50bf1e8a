"""What compression costs in quality: digits and a byte-level language model, trained with every comm hook.

The same model, data and seeds for every hook; only the hook differs. The language model reads the sources of Python's
own standard library, so any machine has the data; figures depend on the Python version. Processes are spawned here.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing
from _report import console, print_table, write_json
from torch import nn

import lockstep
from lockstep import hooks
from lockstep.examples._data import load_data

TIMEOUT = timedelta(seconds=120)  # of every collective: a rank that fails must not leave the others waiting
CONTEXT = 64  # bytes that the language model sees
CORPUS_BYTES = 2_000_000

#: Steps that PowerSGD leaves uncompressed: 10 % of a run, as torch's documentation advises, and few enough to matter.
START = 0.1


def contenders(steps: int) -> dict[str, hooks.NativeHook]:
    start = max(2, int(START * steps))
    return {
        "no hook": hooks.AllReduce(),
        "fp16": hooks.FP16(),
        "bf16": hooks.BF16(),
        "int8": hooks.Int8(),
        "int8, error feedback": hooks.Int8(error_feedback=True),
        **{f"PowerSGD {rank}": hooks.PowerSGD(rank=rank, start_iteration=start) for rank in (1, 2, 4)},
        "batched PowerSGD 2": hooks.BatchedPowerSGD(rank=2, start_iteration=start),
    }


class ByteModel(nn.Module):
    """A small causal transformer over bytes: 0.2 million parameters."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Parameter(torch.randn(CONTEXT, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, 256)
        mask = torch.full((CONTEXT, CONTEXT), -math.inf).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.bytes(tokens) + self.places, mask=self.mask))


def corpus() -> torch.Tensor:
    """The first two million bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:CORPUS_BYTES].long()


def windows(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` pieces of CONTEXT + 1 bytes."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def language(hook: hooks.NativeHook, seed: int, steps: int) -> dict[str, float]:
    """Train the language model; its loss in bits per byte on the last tenth of the text."""
    text = corpus()
    split = len(text) * 9 // 10
    torch.manual_seed(seed)
    model = lockstep.DistributedDataParallel(ByteModel())
    model.set_comm_hook(hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())

    def loss_of(pieces: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(pieces[:, :-1]).flatten(0, 1), pieces[:, 1:].flatten())

    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(windows(text[:split], 16, generator)).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        held_out = windows(text[split:], 256, torch.Generator().manual_seed(0))
        return {"bits_per_byte": loss_of(held_out).item() / math.log(2)}


def digits(hook: hooks.NativeHook, seed: int, steps: int) -> dict[str, float]:
    """Train a two-layer perceptron on handwritten digits; its loss and accuracy on 360 unseen ones."""
    train, test = load_data()
    images, labels = train.tensors
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = lockstep.DistributedDataParallel(net)
    model.set_comm_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        chosen = torch.randint(len(labels), (32,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        images, labels = test.tensors
        scores = model(images)
        accuracy = (scores.argmax(1) == labels).float().mean().item()
        return {"loss": nn.functional.cross_entropy(scores, labels).item(), "accuracy": accuracy}


TASKS: dict[str, Callable[[hooks.NativeHook, int, int], dict[str, float]]] = {"digits": digits, "language": language}


def measure(options: argparse.Namespace) -> None:
    """Run one rank, whose process group exists; rank 0 prints and writes."""
    torch.set_num_threads(1)
    results = []
    for task in options.tasks:
        steps = options.steps or {"digits": 300, "language": 400}[task]
        for name, hook in contenders(steps).items():
            runs = [TASKS[task](hook, seed, steps) for seed in range(options.seeds)]
            results.append({"task": task, "contender": name, "steps": steps, "runs": runs})
            if dist.get_rank() == 0:
                console.print(f"{task}, {name}: {runs}", highlight=False)
    if dist.get_rank() == 0:
        report(options, results)


def report(options: argparse.Namespace, results: list[dict]) -> None:
    """Print mean and standard deviation over seeds, write every run, and draw."""
    settings = {"world_size": dist.get_world_size(), "seeds": options.seeds, "powersgd_start": START}
    show(settings, results)
    write_json(options.json, "hook_convergence", {"settings": settings, "results": results})
    if options.picture:
        draw(settings, results, options.picture)


def show(settings: dict, results: list[dict]) -> None:
    """One table a task."""
    for task in dict.fromkeys(result["task"] for result in results):
        mine = [r for r in results if r["task"] == task]
        figures = list(mine[0]["runs"][0])
        rows = []
        for result in mine:
            row = [result["contender"]]
            for figure in figures:
                values = [run[figure] for run in result["runs"]]
                row += [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None]
            rows.append(row)
        columns = ["contender", *(column for figure in figures for column in (figure, "+-"))]
        title = f"{task}, {mine[0]['steps']} steps, {settings['world_size']} processes, {settings['seeds']} seeds"
        print_table(title, columns, [rows])


class Axis(NamedTuple):
    """How the picture shows a figure."""

    label: str
    scale: str
    of: Callable[[float], float]


AXES = {
    "loss": Axis("loss, nats", "log", lambda loss: loss),
    "accuracy": Axis("errors, %", "log", lambda accuracy: 100 * (1 - accuracy)),
    "bits_per_byte": Axis("loss, bits per byte", "linear", lambda bits: bits),
}


def draw(settings: dict, results: list[dict], path: Path) -> None:
    """A panel for each figure, a row for each hook: a dot for each seed, a line at the mean of those without a hook."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(result["contender"] for result in results))
    shown = list(dict.fromkeys((result["task"], figure) for result in results for figure in result["runs"][0]))
    size = (2 + 2.6 * len(shown), 1.4 + 0.25 * len(names))
    figure, panels = pyplot.subplots(1, len(shown), sharey=True, squeeze=False, figsize=size, layout="constrained")
    for panel, (task, what) in zip(panels[0], shown, strict=True):
        for place, name in enumerate(names):
            runs = [run for r in results if (r["task"], r["contender"]) == (task, name) for run in r["runs"]]
            values = [AXES[what].of(run[what]) for run in runs]
            panel.plot(values, [place] * len(values), "o", color="tab:orange" if place else "black", markersize=4)
            if place == 0:
                panel.axvline(statistics.mean(values), color="black", linewidth=0.8)
        panel.set_title(task, fontsize=9)
        panel.set_xlabel(AXES[what].label, fontsize=8)
        panel.set_xscale(AXES[what].scale)
        panel.xaxis.set_major_formatter("{x:g}")
        panel.tick_params(labelsize=8)
    panels[0][0].set_yticks(range(len(names)), names)
    panels[0][0].set_ylim(len(names) - 0.5, -0.5)  # no hook on top
    title = f"After training with each comm hook, {settings['seeds']} seeds: further left is better"
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)


def spawned(rank: int, options: argparse.Namespace, store: str) -> None:
    """Join the group of a process that `main` started."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.world, timeout=TIMEOUT)
    measure(options)
    dist.destroy_process_group()


def main() -> None:
    """Start the processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--steps", type=int, help="of every run (default: 300 of digits, 400 of language)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every hook (default 3)")
    parser.add_argument("--world", type=int, default=2, help="processes to start (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="also draw the figures there (needs matplotlib)")
    parser.add_argument("--show", type=Path, metavar="RESULT", help="measure nothing: show a JSON written before")
    options = parser.parse_args()
    if options.show:
        old = json.loads(options.show.read_text())
        show(old["settings"], old["results"])
        if options.picture:
            draw(old["settings"], old["results"], options.picture)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (options, f"{folder}/store"), nprocs=options.world)


if __name__ == "__main__":
    main()
