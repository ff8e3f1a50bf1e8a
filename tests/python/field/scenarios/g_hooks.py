"""Communication hooks: those that fail, those that wait, and who divides."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from field.kit import LATE, SOON, assert_contains, done, pair_of, refused, register
from field.registry import Engine, case
from models import Reversed
from oracle import mean_over_ranks, rank_data

Future = torch.futures.Future


def _raise(bucket: dist.GradBucket) -> Future:
    if bucket.index() == 2 or bucket.is_last():
        raise ValueError("the user's own text")
    return default_hooks.allreduce_hook(None, bucket)


def _failed(bucket: dist.GradBucket) -> Future:
    return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value() / "x")


def _double(bucket: dist.GradBucket) -> Future:
    return default_hooks.allreduce_hook(None, bucket).then(lambda future: future.value().double())


#: What a hook does wrong, and words that must be in the error.
WRONG: dict[str, tuple[Callable[[dist.GradBucket], Any], list[str]]] = {
    "raises": (_raise, ["the user's own text", "hook", "bucket", "layers."]),
    "none": (lambda bucket: None, ["future", "none", "hook"]),
    "tensor": (lambda bucket: bucket.buffer(), ["future", "tensor", "hook"]),
    "list": (lambda bucket: done([bucket.buffer(), bucket.buffer()]), ["tensor", "hook"]),
    "wrong_size": (lambda bucket: done(torch.zeros(3)), ["3", "hook", "bucket"]),
    "other_dtype": (_double, ["hook", "double"]),
    "other_device": (lambda bucket: done(bucket.buffer().to("meta")), ["hook", "meta"]),
    "failed_future": (_failed, ["unsupported operand", "hook", "bucket"]),
    "never": (lambda bucket: Future(), ["hook", "bucket"]),
    "one_rank": (lambda bucket: _raise(bucket) if dist.get_rank() else default_hooks.allreduce_hook(None, bucket), []),
}


@case(
    73,
    "a hook that raises or returns the wrong thing",
    variants={how: {"how": how, "own_processes": how in ("never", "one_rank")} for how in WRONG},
    limit=40,
)
def failing_hook(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/pull/40848 https://github.com/pytorch/pytorch/issues/58255
    https://github.com/pytorch/pytorch/issues/61914 https://github.com/pytorch/pytorch/pull/62457

    Symptom: "unable to cast Python instance to C++ type" out of backward, or a hang.
    Right: the user's exception, or what was expected and what came, with hook and bucket; the next step works.
    """
    function, phrases = WRONG[how]
    wrong = [True]

    def my_hook(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
        return function(bucket) if wrong[0] else default_hooks.allreduce_hook(None, bucket)

    pair = pair_of(engine, Reversed, bucket_cap_mb=0.0003, **engine.where_offered(stall_threshold=2.0))
    register(pair.wrapped, my_hook)
    if how == "other_dtype":  # right values are as good as an error
        with contextlib.suppress(RuntimeError):
            pair.backward(lambda: rank_data(3, 6))
            pair.check()
    elif how == "one_rank":
        begin_late = dist.get_rank() == 0
        with refused(engine, within=LATE, kinds=(RuntimeError, ValueError), coded_too=begin_late) as caught:
            for step in range(2):
                pair.wrapped(rank_data(3, 6, step=step)).sum().backward()
        assert_contains(caught.text, "rank 1" if begin_late else "the user's own text")
        return  # nobody can know when both are ready for another step
    else:
        kinds = ValueError if how == "raises" else (RuntimeError, TypeError, ValueError)
        coded_too = how not in ("raises", "failed_future")  # those are the user's own errors
        within = LATE if how == "never" else SOON
        with refused(engine, "my_hook", *phrases, within=within, kinds=kinds, coded_too=coded_too):
            pair.wrapped(rank_data(3, 6)).square().sum().backward()
    wrong[0] = False
    for step in range(3):
        pair.zero()
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()


def _two_rounds(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """Sum, and sum once more inside the callback, as PowerSGD and quantization do."""

    def again(future: Future) -> torch.Tensor:
        total = future.value()[0]
        dist.all_reduce(total, async_op=True).wait()
        return total / dist.get_world_size() ** 2

    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


@contextlib.contextmanager
def _busy_thread() -> Any:
    """Another Python thread that takes the GIL by turns."""
    stop = threading.Event()

    def spin() -> None:
        count = 0
        while not stop.is_set():
            count += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@case(
    74,
    "waiting inside a future's callback",
    variants={
        "one_bucket": {"cap": 25.0},
        "many_buckets": {"cap": 0.0003, "own_processes": True},
        "wrapping_in_a_thread": {"in_thread": True, "cap": 25.0},
    },
    limit=90,
)
def waiting_callback(engine: Engine, cap: float, in_thread: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/48478 https://github.com/pytorch/pytorch/issues/119262
    https://github.com/pytorch/pytorch/pull/40495

    Symptom: deadlocks, of the group's threads or of the GIL.
    Right: no deadlock, while another Python thread runs; a hook that uses up the group's threads is an error in time.
    """
    with _busy_thread():
        if in_thread:
            pairs: list[Any] = []
            thread = threading.Thread(target=lambda: pairs.append(pair_of(engine, Reversed)), daemon=True)
            thread.start()
            thread.join(timeout=LATE)
            assert pairs, "deadlock in construction"
            pair = pairs[0]
        else:
            pair = pair_of(engine, Reversed, bucket_cap_mb=cap)
        register(pair.wrapped, _two_rounds)
        for step in range(3):
            x = rank_data(3, 6, step=step)
            pair.plain(x).square().sum().backward()
            try:
                pair.wrapped(x).square().sum().backward()
            except RuntimeError as error:
                assert cap < 1, error
                assert_contains(str(error), "bucket", "layers.")
                return
            # The second round summed the sum: two ranks make it twice the first.
            for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, mean_over_ranks(theirs.grad))
            pair.zero()


def _summing(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])


def _dividing(state: object, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    return default_hooks.allreduce_hook(None, bucket)


@case(
    75,
    "a hook sees undivided gradients",
    variants={
        "sum_only": {"how": "sum"},
        "divides": {"how": "divides"},
        "fp16_around_it": {"how": "fp16"},
        "join_initial_size": {"how": "join", "join": {"divide_by_initial_world_size": True}},
        "join_live_size": {"how": "join", "join": {"divide_by_initial_world_size": False}},
        "join_with_hook": {"how": "join", "join": {"divide_by_initial_world_size": False}, "hooked": True},
    },
)
def who_divides(engine: Engine, how: str, join: dict[str, Any] | None = None, hooked: bool = False) -> None:
    """https://github.com/pytorch/pytorch/pull/42399 https://github.com/epfml/powersgd/issues/1

    Symptom: the learning rate is off by the number of ranks.
    Right: torch's contract: with a hook the bucket is undivided and the hook divides, also under join.
    """
    pair = pair_of(engine, Reversed)
    if how == "join":
        _who_divides_when_joined(pair, join or {}, hooked)
        return
    hooks = {"sum": _summing, "divides": _dividing, "fp16": default_hooks.fp16_compress_wrapper(_dividing)}
    register(pair.wrapped, hooks[how])
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        factor = dist.get_world_size() if how == "sum" else 1
        tolerance = {"rtol": 2e-3, "atol": 2e-3} if how == "fp16" else {}
        for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, factor * mean_over_ranks(theirs.grad), **tolerance)
        pair.update()
        pair.zero()


def _who_divides_when_joined(pair: Any, join: dict[str, Any], hooked: bool) -> None:
    if hooked:
        register(pair.wrapped, _dividing)
    divisors = []
    with pair.wrapped.join(**join):
        for step in range(3 - 2 * dist.get_rank()):
            pair.backward(lambda step=step: rank_data(3, 6, step=step))
            if step:  # rank 1 has run out of data
                ours, theirs = (next(iter(m.parameters())).grad for m in (pair.wrapped, pair.plain))
                divisors.append(float((theirs / ours).median()))
            pair.zero()
    expected = 2.0 if hooked or join["divide_by_initial_world_size"] else 1.0
    torch.testing.assert_close(divisors, [expected] * (2 - 2 * dist.get_rank()), rtol=1e-4, atol=0)


@case(
    77,
    "a hook registered twice, late, or on one rank",
    variants={
        "twice": {"how": "twice"},
        "then_builtin": {"how": "builtin"},
        "late": {"how": "late"},
        "one_rank": {"how": "one_rank", "own_processes": True},
    },
)
def registration(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/pull/53325 https://github.com/pytorch/pytorch/pull/61640
    https://github.com/huggingface/accelerate/pull/2841 https://github.com/Lightning-AI/pytorch-lightning/pull/6736

    Symptom: misuse by integrations gives asserts, or means of different things.
    Right: a second registration is a RuntimeError; a late one works; one on one rank only raises on every rank.
    """
    pair = pair_of(engine, Reversed, bucket_cap_mb=0.0003, **engine.where_offered(stall_threshold=2.0))
    if how in ("twice", "builtin"):
        register(pair.wrapped, _dividing)
        with refused(engine, "once"):
            if how == "twice":
                register(pair.wrapped, _dividing)
            else:
                pair.wrapped._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    for step in range(2):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    if how == "one_rank":
        if dist.get_rank() == 1:
            register(pair.wrapped, _dividing)
        with refused(engine, "hook", "rank", within=LATE):
            for step in range(2):
                pair.wrapped(rank_data(3, 6, step=step)).sum().backward()
    elif how == "late":
        register(pair.wrapped, _dividing)
        for step in range(3):
            pair.backward(lambda step=step: rank_data(3, 6, step=step))
            pair.check()
            pair.zero()
