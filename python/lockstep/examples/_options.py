"""Command line of the example."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of ``python -m lockstep.examples.digits``; see ``check`` for rules that join two options."""
    parser = argparse.ArgumentParser(
        prog="python -m lockstep.examples.digits",
        description="Train a small convolutional net on scikit-learn's handwritten digits, on as many processes as "
        "torchrun starts (one without torchrun). The last line of rank 0's stdout is a JSON report.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--engine", choices=["lockstep", "torch"], default="lockstep", help="who reduces gradients")
    parser.add_argument("--epochs", type=_integer(0), default=20, help="in all, those before --resume included")
    parser.add_argument("--batch-size", type=_integer(1), default=32, help="images of a micro-batch, per rank")
    parser.add_argument("--accumulate", type=_integer(1), default=1, help="micro-batches of one optimizer step")
    parser.add_argument("--lr", type=_positive_number, default=0.05, help="learning rate of SGD with momentum 0.9")
    parser.add_argument("--seed", type=_integer(0), default=0, help="of starting weights and order of images")
    parser.add_argument(
        "--hook",
        choices=["none", "allreduce", "fp16", "bf16"],
        default="none",
        help="communication hook: torch's own of that name, or the engine's plain reduction",
    )
    parser.add_argument("--views", action="store_true", help="gradients are views into buckets: less memory, no copy")
    parser.add_argument(
        "--against-single",
        action="store_true",
        help="afterwards train on the same batches in one process too, and report single_difference",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="PATH", help="write this file after every epoch; without it nothing is kept"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from --checkpoint; --engine and --views may differ from then"
    )
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Leave with the parser's error and status 2 if options contradict each other."""
    if args.resume and args.checkpoint is None:
        parser.error("argument --resume: needs --checkpoint PATH, the file to go on from")
    if args.checkpoint is not None and args.checkpoint.is_dir():
        parser.error(f"argument --checkpoint: {args.checkpoint} is a folder; give the path of a file")


def _integer(minimum: int) -> Callable[[str], int]:
    maximum = 2**31 - 1

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"must be a whole number from {minimum} to {maximum}, not {text!r}")
        return value

    return parse


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return value
