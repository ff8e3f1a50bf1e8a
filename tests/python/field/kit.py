"""What scenarios are made of: models wrapped in pairs, and ears for warnings, errors and the standard error stream."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from field.registry import Engine
from oracle import Pair
from ranks import GROUP_TIMEOUT

#: In seconds. An error that needs no timeout must come within this.
SOON = 5.0
#: In seconds. An error that needs the group's timeout must come within this.
LATE = GROUP_TIMEOUT + 5.0

#: What every error and warning of ours ends with.
CODE = re.compile(r"\[LS-\d{3}\]")

Records = list[warnings.WarningMessage]


def pair_of(engine: Engine, make: Callable[[], torch.nn.Module], **options: Any) -> Pair:
    return Pair(make, lambda module: engine.wrap(module, **options))


@contextmanager
def recorded() -> Iterator[Records]:
    """All Python warnings of the block, also those shown before."""
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        yield records


def coded(records: Records) -> list[str]:
    """Texts of the warnings that carry a code of ours."""
    return [str(record.message) for record in records if CODE.search(str(record.message))]


def local_warnings(records: Records) -> list[str]:
    """Texts of the warnings about gradients that stayed local."""
    return [str(record.message) for record in records if record.category.__name__ == "LocalGradientWarning"]


def assert_told_once(texts: list[str], *phrases: str) -> None:
    assert texts, f"nothing was said; expected {', '.join(phrases)}"
    assert len(texts) == 1, f"said {len(texts)} times: {texts}"
    assert CODE.search(texts[0]), f"no code in: {texts[0]}"
    assert_contains(texts[0], *phrases)


def assert_contains(text: str, *phrases: str) -> None:
    missing = [phrase for phrase in phrases if phrase.lower() not in text.lower()]
    assert not missing, f"{missing} not in: {text}"


@dataclass
class Caught:
    text: str = ""
    seconds: float = 0.0


@contextmanager
def refused(
    engine: Engine,
    *phrases: str,
    within: float = SOON,
    kinds: type[BaseException] | tuple[type[BaseException], ...] = RuntimeError,
    coded_too: bool = True,
) -> Iterator[Caught]:
    """The block must raise one of ``kinds`` within the given seconds, in words that contain ``phrases``."""
    caught = Caught()
    begin = time.monotonic()
    try:
        yield caught
    except AssertionError:
        raise
    except kinds as error:
        caught.seconds = time.monotonic() - begin
        caught.text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    else:
        raise AssertionError(f"nothing was raised; expected words like {', '.join(phrases) or 'any'}")
    assert_contains(caught.text, *phrases)
    assert caught.seconds < within, f"the error came after {caught.seconds:.1f} s: {caught.text}"
    if engine.ours and coded_too:
        assert CODE.search(caught.text), f"no code in: {caught.text}"


@dataclass
class Stream:
    text: str = ""


@contextmanager
def standard_error() -> Iterator[Stream]:
    """What the block writes to the standard error stream, from Python or C++."""
    stream = Stream()
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield stream
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            stream.text = file.read().decode(errors="replace")


def collectives(block: Callable[[], Any], name: str = "") -> list[int]:
    """Elements of each of this rank's gloo collectives during ``block``, of those whose name contains ``name``."""
    with standard_error(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            block()
    events = [event for event in profiler.events() if event.name.startswith("gloo:") and name in event.name]
    return [sum(torch.Size(shape).numel() for shape in event.input_shapes if shape) for event in events]


def in_turns(function: Callable[[], Any]) -> list[Any]:
    """``function()`` of every rank, in the order of ranks."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, function())
    return gathered


def store() -> dist.Store:
    """The store of the group: for a rank that must come later than another."""
    return dist.distributed_c10d._get_default_store()


def register(model: Any, hook: Callable[..., Any], state: object = None) -> None:
    """Register a hook written here: torch refuses annotations that are strings, as they are in our files."""
    hook.__annotations__ = {}
    model.register_comm_hook(state, hook)


def done(value: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def close(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, expected, msg=lambda text: f"{what}: {text}")
