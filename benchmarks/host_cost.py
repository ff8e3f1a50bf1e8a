"""Host time and memory that data parallelism adds to a step, with no wire and almost no computing in the way.

One process, a process group whose collectives are over at once (`lockstep_testing`), and a module of many tiny
parameters. All engines run in turns within each round and are compared round by round, so that a machine that
becomes slower in between does not favour one. Times are medians over rounds, of processor time unless asked
otherwise: nothing here waits for a device or a network, and other programs on the machine then count for little.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from _contenders import TORCH_DEFAULT, TORCH_TUNED, Contender, engines, unguarded
from _report import console, print_missing, print_table, write_json
from torch import nn

try:
    import lockstep_testing
except ImportError as error:
    sys.exit(f"host_cost.py needs the test extension ({error}). benchmarks/README.md says how to build it.")

BARE = "bare module"
CLOCKS = {"cpu": time.process_time_ns, "wall": time.perf_counter_ns}
ELEMENTS = 8  # of each parameter, fp32
PATIENCE_NS = 10e9  # constructions are repeated within this time: torch's grow with the square of the parameters
WARMUP_STEPS = 5  # torch builds its buckets anew before the second step and sets everything up by the third
MIB = 2**20


class _GradientForEach(torch.autograd.Function):
    """One autograd node with an edge to every parameter; all gradients are cut from one tensor."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.count = len(parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split_with_sizes(torch.ones(ctx.count * ELEMENTS), [ELEMENTS] * ctx.count)


class TinyParameters(nn.Module):
    """`count` parameters whose forward and backward cost next to nothing.

    It keeps the autograd nodes of its parameters, as every engine does. A plain module makes them anew in each forward,
    and that time would otherwise count as saved by the engine.
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(ELEMENTS) for _ in range(count))
        self.in_order = tuple(self.weights)  # walking a ParameterList costs more than the step
        self.kept_nodes = [weight.view(-1).grad_fn.next_functions[0][0] for weight in self.in_order]

    def forward(self) -> torch.Tensor:
        """Return a scalar whose gradient with respect to every element is 1."""
        return _GradientForEach.apply(*self.in_order)


@dataclass
class Result:
    """One contender with one number of parameters and one world size. Every figure is for one step, bare included."""

    world_size: int
    params: int
    contender: str
    construction_ms: float | None  # median
    warmup_ms: float  # the first steps together, where engines finish what construction left open
    kept_bytes: int  # tensor memory that construction and warm-up left behind, gradients dropped
    peak_bytes: int  # most tensor memory above the module during a step: kept bytes, gradients and temporaries
    collectives: int
    wire_bytes: int  # handed to collectives by this rank
    operators: int  # dispatched, nested ones included
    step_us_rounds: list[float] = field(default_factory=list)
    step_us: float = 0.0  # forward and backward, median over rounds
    added_us: float = 0.0  # above the bare module of the same round, median over rounds
    added_us_per_param: float = 0.0
    added_over: dict[str, float | None] = field(default_factory=dict)  # this added time / that contender's


class Runner:
    """A module under one engine, warmed up, with what construction and a steady step need."""

    def __init__(
        self, contender: Contender, params: int, group: dist.ProcessGroup, constructions: int, clock: Callable[[], int]
    ) -> None:
        self.clock = clock
        nanoseconds = []
        for _ in range(constructions):
            self.module = self.model = None  # the last try goes first
            gc.collect()
            self.module = TinyParameters(params)
            with lockstep_testing.AllocationMeter() as construction:
                start = clock()
                self.model = contender.wrap(self.module, group)
                nanoseconds.append(clock() - start)
            if sum(nanoseconds) > PATIENCE_NS:
                break
        with construction:
            warmup_us = WARMUP_STEPS * self.steps(WARMUP_STEPS)
        is_bare = self.model is self.module
        self._check_gradients(1.0 if is_bare else 1 / group.size())
        lockstep_testing.reset_counts(group)
        with lockstep_testing.AllocationMeter() as step, lockstep_testing.OperatorCounter() as operators:
            self.steps(1)
        counts = lockstep_testing.counts(group).values()
        self.result = Result(
            world_size=group.size(),
            params=params,
            contender=contender.name,
            construction_ms=None if is_bare else statistics.median(nanoseconds) / 1e6,
            warmup_ms=warmup_us / 1e3,
            kept_bytes=construction.live_bytes,
            peak_bytes=construction.live_bytes + step.peak_bytes,
            collectives=sum(count.calls for count in counts),
            wire_bytes=sum(count.bytes for count in counts),
            operators=operators.count,
        )

    def steps(self, count: int) -> float:
        """Run `count` steps; return the mean microseconds of forward and backward. Gradients are set to None after."""
        nanoseconds = 0
        for _ in range(count):
            start = self.clock()
            self.model().backward()
            nanoseconds += self.clock() - start
            self._drop_gradients()
        return nanoseconds / count / 1e3

    def _drop_gradients(self) -> None:
        for parameter in self.module.in_order:
            parameter.grad = None

    def _check_gradients(self, expected: float) -> None:
        """Raise unless the engine did its job: divided by the ranks, and summed with ranks that contribute nothing."""
        self.model().backward()
        gradients = torch.cat([parameter.grad for parameter in self.module.in_order])
        torch.testing.assert_close(gradients, torch.full_like(gradients, expected))
        self._drop_gradients()


@contextlib.contextmanager
def instant_world(world_size: int) -> Iterator[dist.ProcessGroup]:
    """Rank 0 of `world_size` ranks as torch's default group; the others exist in name only."""
    dist.init_process_group("instant", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def compare(runners: Sequence[Runner], rounds: int, steps: int) -> None:
    """Time all runners in turns, another one first in each round, and fill in their results."""
    gc.collect()
    gc.disable()
    try:
        for first in range(rounds):
            for place in range(len(runners)):
                runner = runners[(first + place) % len(runners)]
                runner.result.step_us_rounds.append(runner.steps(steps))
    finally:
        gc.enable()

    rounds_of = {runner.result.contender: runner.result.step_us_rounds for runner in runners}
    added = {
        name: [mine - bare for mine, bare in zip(times, rounds_of[BARE], strict=True)]
        for name, times in rounds_of.items()
    }
    for result in (runner.result for runner in runners):
        mine = added[result.contender]
        result.step_us = statistics.median(result.step_us_rounds)
        result.added_us = statistics.median(mine)
        result.added_us_per_param = result.added_us / result.params
        if result.contender != BARE:
            result.added_over = {name: _ratio(mine, added[name]) for name in (TORCH_DEFAULT, TORCH_TUNED)}


def _ratio(mine: list[float], other: list[float]) -> float | None:
    """Median of the ratios of equal rounds, without those where noise hid the other's cost; None if none is left."""
    ratios = [a / b for a, b in zip(mine, other, strict=True) if b > 0]
    return statistics.median(ratios) if ratios else None


def print_case(results: Sequence[Result]) -> None:
    """Everything known about one number of parameters and one world size."""
    columns = ["contender", "step ms", "added ms", "us/param", "/ default", "/ tuned", "construct ms", "warm-up ms"]
    columns += ["kept MiB", "peak MiB", "collectives", "wire KiB", "operators"]
    rows = [
        (
            *(r.contender, r.step_us / 1e3, r.added_us / 1e3, r.added_us_per_param),
            *(r.added_over.get(TORCH_DEFAULT), r.added_over.get(TORCH_TUNED), r.construction_ms, r.warmup_ms),
            *(r.kept_bytes / MIB, r.peak_bytes / MIB, r.collectives, r.wire_bytes / 1024, r.operators),
        )
        for r in results
    ]
    print_table(f"{results[0].params} parameters, {results[0].world_size} ranks", columns, [rows])


def print_summary(results: Sequence[Result]) -> None:
    """Added microseconds per parameter: a line for each contender and world size, a column for each size."""
    sizes = sorted({r.params for r in results})
    figure = {(r.contender, r.world_size, r.params): r.added_us_per_param for r in results}
    names = [name for name in dict.fromkeys(r.contender for r in results) if name != BARE]
    worlds = sorted({r.world_size for r in results})
    groups = [[[name, world, *(figure[name, world, size] for size in sizes)] for world in worlds] for name in names]
    print_table("Added microseconds per parameter and step", ["contender", "ranks", *map(str, sizes)], groups)


def parse_options() -> argparse.Namespace:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=int, nargs="+", default=[10**2, 10**3, 10**4, 10**5], metavar="N")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 64, 1024], metavar="W", help="world sizes")
    parser.add_argument("--rounds", type=int, default=15, help="each runs every contender once (default 15)")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="time of the processor (default) or of the wall")
    parser.add_argument("--constructions", type=int, default=3, help="timed constructions of each (default 3)")
    parser.add_argument("--quick", action="store_true", help="5 rounds, 100 to 10,000 parameters, 2 and 64 ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every figure there")
    options = parser.parse_args()
    if options.quick:
        options.params, options.worlds, options.rounds = [10**2, 10**3, 10**4], [2, 64], 5
    return options


def main() -> None:
    """Measure every case, print it when done, and the summary at the end."""
    options = parse_options()
    torch.set_num_threads(1)  # tiny tensors gain nothing from more, and the times get quieter
    found, missing = engines()
    found += unguarded()  # what the guards cost
    print_missing(missing)
    contenders = [Contender(BARE, lambda module, _: module), *found]
    with instant_world(2) as group:
        for contender in contenders:
            contender.wrap(TinyParameters(1), group)  # the first use of an engine imports the rest of torch
    results: list[Result] = []
    for params in options.params:
        for world_size in options.worlds:
            with instant_world(world_size) as group, console.status(f"{params} parameters, {world_size} ranks"):
                runners = [
                    Runner(contender, params, group, options.constructions, CLOCKS[options.clock])
                    for contender in contenders
                ]
                compare(runners, options.rounds, steps=max(1, min(50, 20_000 // params)))
                case = [runner.result for runner in runners]
                del runners
            print_case(case)
            results += case
    print_summary(results)
    settings = {"clock": options.clock, "rounds": options.rounds, "constructions": options.constructions}
    content = {"settings": settings, "skipped": missing, "results": [asdict(result) for result in results]}
    write_json(options.json, "host_cost", content)


if __name__ == "__main__":
    main()
