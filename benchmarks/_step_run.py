"""Command line, budget of time and order of work of step_tax.py and hook_tax.py."""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import _step_report as report
import torch
import torch.distributed as dist
from _contenders import Contender, baselines
from _models import Model, models
from _report import console, environment, print_missing
from _step_timing import Runner, Subject, agreed, align, all_reduce_ms, compare, device_work, join_group, release

Find = Callable[[str], tuple[list[Contender], dict[str, str]]]

TIMEOUT = timedelta(seconds=90)  # of every collective: a rank that fails must not keep the others for long
TRIAL_STEPS = 2  # of each contender, before the rounds are counted out
COUNTING_SHARE = 0.15  # of the budget, kept for counting kernels after everything is timed


def parse_options(description: str, arguments: Sequence[str] | None = None, *, group_size: int) -> argparse.Namespace:
    """Options of both benchmarks. ``group_size``: default of that option."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--models", nargs="+", choices=list(models("full")), default=list(models("full")), metavar="NAME")
    add("--contenders", nargs="+", metavar="NAME", help="those whose names start so; no reduction and limit always run")
    add("--group-size", type=int, default=group_size, help="contenders in memory at a time, besides both; 0: all")
    add("--rounds", type=int, default=12, help="each runs every contender once, as far as the budget allows")
    add("--steps", type=int, default=8, help="in a block (default 8)")
    add("--budget-seconds", type=float, default=330, help="for the whole run (default 330); fewer rounds if needed")
    add("--sweep", metavar="OPTION=V1,V2", help="run each contender with each value of a constructor's option instead")
    add("--wire", default="as NCCL chooses", metavar="NAME", help="what the result calls the wire; changes nothing")
    add("--no-profile", action="store_true", help="do not count kernels and collectives")
    add("--scale", choices=["full", "tiny"], default="full", help="tiny: a smoke test")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--json", type=Path, metavar="FILE", help="write every figure there, after each model anew")
    add("--picture", type=Path, metavar="FILE", help="draw the figures there (needs matplotlib)")
    add("--markdown", type=Path, metavar="RESULT", help="measure nothing: print the table of a JSON written before")
    return parser.parse_args(arguments)


def with_sweep(contenders: Sequence[Contender], sweep: str | None) -> list[Contender]:
    """``contenders``, or one of each for each value of ``sweep``, "option=value,value" with values as in Python."""
    if not sweep:
        return list(contenders)
    option, equals, values = sweep.partition("=")
    if not (option and equals and values):
        sys.exit(f"--sweep {sweep}: write OPTION=V1,V2, such as bucket_cap_mb=25,100")
    try:
        parsed = [ast.literal_eval(value) for value in values.split(",")]
    except (ValueError, SyntaxError):
        sys.exit(f"--sweep {sweep}: {values} are not numbers, True, False or quoted text")
    return [contender.with_options(**{option: value}) for contender in contenders for value in parsed]


def select(found: Sequence[Contender], wanted: Sequence[str] | None) -> list[Contender]:
    """Those whose names are in ``wanted``; a text that is no whole name selects all names that start with it."""
    if not wanted:
        return list(found)
    names = [contender.name for contender in found]
    chosen: set[str] = set()
    for text in wanted:
        matching = [text] if text in names else [name for name in names if name.startswith(text)]
        if not matching:
            sys.exit(f"--contenders {text!r}: no such contender here; there are: {', '.join(names)}")
        chosen.update(matching)
    return [contender for contender in found if contender.name in chosen]


class Budget:
    """Time of the run, shared among what is left to measure. Rank 0's clock counts."""

    def __init__(self, seconds: float, counting: bool) -> None:
        self.end = time.monotonic() + seconds
        self.measuring_end = self.end - (COUNTING_SHARE * seconds if counting else 0)

    def rounds(self, wanted: int, round_seconds: float, share: float) -> int:
        """Rounds to run now, up to ``wanted`` and not below 3, when this ``share`` of what is left may be spent."""
        allowed = int(share * (self.measuring_end - time.monotonic()) / round_seconds)
        return self._told(min(wanted, max(3, allowed)))

    def is_over(self) -> bool:
        return bool(self._told(time.monotonic() > self.end))

    @staticmethod
    def _told(value: int) -> int:
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]


class Benchmark:
    """One run: all models, all contenders, what came of them."""

    def __init__(self, name: str, options: argparse.Namespace, find: Find) -> None:
        self.name, self.options = name, options
        self.device = torch.device(options.device, torch.cuda.current_device() if options.device == "cuda" else None)
        found, missing = find(options.device)
        self.missing = missing
        self.contenders = with_sweep(select(found, options.contenders), options.sweep)
        self.budget = Budget(options.budget_seconds, not options.no_profile)
        self.cases: list[report.Case] = []
        self.rank = dist.get_rank()
        self.hardware = report.hardware(self.device) if self.rank == 0 else {}

    def groups(self) -> list[list[Contender]]:
        size = self.options.group_size or max(1, len(self.contenders))
        return [self.contenders[i : i + size] for i in range(0, len(self.contenders), size)]

    def run(self) -> None:
        known = models(self.options.scale)
        chosen = [known[name] for name in self.options.models if known[name].is_here()]
        self.missing |= {n: f"needs {known[n].package}" for n in self.options.models if not known[n].is_here()}
        if self.rank == 0:
            print_missing(self.missing)
        for place, model in enumerate(chosen):
            case = report.Case(
                model.name, model.title, [contender.name for contender in (*baselines(), *self.contenders)]
            )
            self.cases.append(case)
            share = model.cost / sum(later.cost for later in chosen[place:])
            case.error = agreed(lambda model=model, case=case, share=share: self.time(model, case, share))
            release(self.device)
            self.show(case)
        if not self.options.no_profile:
            for model, case in zip(chosen, self.cases, strict=True):
                if not case.error and not self.budget.is_over():
                    error = agreed(lambda model=model, case=case: self.count(model, case))
                    case.counting_error = error or case.counting_error
                    release(self.device)
        self.finish()

    def time(self, model: Model, case: report.Case, share: float) -> None:
        """Fill in the times and the memory of one model, in this share of the time left."""
        subject = Subject.of(model, self.device)
        case.parameters = subject.elements()
        case.gradients = sum(parameter.requires_grad for parameter in subject.module.parameters())
        case.all_reduce_ms = all_reduce_ms(case.parameters, self.device)
        release(self.device)
        groups = self.groups()
        for number, group in enumerate(groups):
            runners = self.build(subject, [*baselines(), *group], case, number)
            if len(runners) <= len(baselines()) and group:
                continue  # their errors are noted
            for runner in runners:  # memory that others have freed is found again, and how long does a round take?
                runner.block(TRIAL_STEPS)
            # Blocks start on an idle device, so that their first step is slower: what the sum says is no less.
            seconds = sum(runner.block_ms[-1] for runner in runners) * self.options.steps / 1e3
            rest = len(groups) - number
            ours = share / (rest * share + (1 - share) * len(groups))  # 1 / rest, if no other model follows
            rounds = self.budget.rounds(self.options.rounds, max(seconds, 1e-3), ours)
            compare(runners, rounds, self.options.steps)
            case.add_group(number, runners)
            del runners, runner
            release(self.device)

    def build(self, subject: Subject, contenders: Sequence[Contender], case: report.Case, group: int) -> list[Runner]:
        """Those that can be built, warmed up, and give the right gradients; the others are noted in ``case``."""
        runners: list[Runner] = []
        expected = subject.mean_gradients()
        for contender in contenders:
            built: list[Runner] = []
            error = agreed(lambda contender=contender, built=built: built.append(Runner(contender, subject)))
            if not error and contender.reduces:
                error = agreed(lambda built=built: built.append(built[0].gradient_error(expected)))
            if error:
                case.add_failure(contender.name, group, error)
                built.clear()
                release(self.device)
            else:
                runners.append(built[0])
                case.gradient_errors[contender.name] = built[1] if contender.reduces else None
        return runners

    def count(self, model: Model, case: report.Case) -> None:
        """Fill in what the profiler sees; after all timing, because CUPTI may slow down what follows."""
        subject = Subject.of(model, self.device)
        for contender in [*baselines(), *self.contenders]:
            if contender.name not in case.succeeded() or self.budget.is_over():
                continue
            work: dict[str, int] = {}
            error = agreed(lambda contender=contender, work=work: work.update(device_work(Runner(contender, subject))))
            if error:
                case.counting_error = error
            else:
                case.counts[contender.name] = work
            release(self.device)

    def show(self, case: report.Case) -> None:
        if self.rank == 0:
            report.print_case(case)
            self.write()

    def finish(self) -> None:
        if self.rank != 0:
            return
        console.rule("with what was counted after timing")
        for case in self.cases:
            report.print_case(case)
        self.write(says_so=True)
        if self.options.picture:
            report.draw(self.content(), self.options.picture)

    def content(self) -> dict[str, object]:
        options = self.options
        names = ("rounds", "steps", "group_size", "budget_seconds", "sweep", "scale", "wire")
        return {
            "benchmark": self.name,
            "environment": environment(),
            "hardware": self.hardware,
            "world_size": dist.get_world_size(),
            "settings": {name: getattr(options, name) for name in names},
            "skipped": self.missing,
            "models": [case.content() for case in self.cases],
        }

    def write(self, says_so: bool = False) -> None:
        report.write(self.options.json, self.content(), says_so)


def main(name: str, description: str, find: Find, *, group_size: int = 0) -> None:
    """Print a table of an old result, or measure as one of torchrun's processes."""
    options = parse_options(description, group_size=group_size)
    if options.markdown:
        report.print_markdown(options.markdown, options.picture)
        return
    if not dist.is_torchelastic_launched():
        sys.exit(f"start it with: torchrun --standalone --nproc-per-node 2 benchmarks/{name}.py (benchmarks/README.md)")
    join_group(options.device, TIMEOUT)
    try:
        benchmark = Benchmark(name, options, find)
        benchmark.run()
        failed = sum(case.failures() for case in benchmark.cases)
        align(benchmark.device)  # torchrun ends all processes when the first one fails: not before rank 0 has written
        rank = benchmark.rank
    finally:
        dist.destroy_process_group()
    if failed:
        sys.exit(f"{failed} rows failed; their errors are below the tables and in the JSON" if rank == 0 else 1)
