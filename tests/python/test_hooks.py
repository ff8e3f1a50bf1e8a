"""Comm hooks written in Python for torch, through the adapter."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from models import KINDS, Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data


def _done(value: Any) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return future


def new_storage_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Answers in memory of its own."""
    total = bucket.buffer().clone()
    dist.all_reduce(total)
    return _done(total / dist.get_world_size())


def concatenating_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Builds its answer from the single gradients: there must be no gaps between them."""
    total = torch.cat([grad.reshape(-1) for grad in bucket.gradients()])
    dist.all_reduce(total)
    return _done(total / dist.get_world_size())


def chained_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda f: f.value()[0] * 2).then(lambda f: f.value() / (2 * dist.get_world_size()))


HOOKS = {
    "allreduce": default_hooks.allreduce_hook,
    "new_storage": new_storage_hook,
    "concatenating": concatenating_hook,
    "chained": chained_hook,
}


def _mean(hook: str, kind: str, options: dict) -> None:
    make, data = KINDS[kind]

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        model = lockstep.DistributedDataParallel(module, **options)
        model.register_comm_hook(None, HOOKS[hook], native=False)
        return model

    pair = Pair(make, wrap)
    pair.train(4, lambda step: data(step))


@pytest.mark.parametrize("views", [False, True], ids=["default", "views"])
@pytest.mark.parametrize("kind", ["reversed", "channels_last", "complex", "empty"])
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_written_for_torch_reduce_the_buckets(ranks, hook, kind, views):
    ranks.run(_mean, hook, kind, {"gradient_as_bucket_view": views})


def _like_torch(name: str, native: bool) -> None:
    def train(cls: type) -> list[torch.Tensor]:
        how = {"native": native} if cls is not TorchDDP else {}
        torch.manual_seed(1)
        # PowerSGD waits inside callbacks: with several buckets in flight it can use up gloo's threads on any engine.
        model = cls(Reversed(), bucket_cap_mb=25 if name == "powersgd" else 0.0003)
        if name == "powersgd":
            state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1)
            model.register_comm_hook(state, powerSGD_hook, **how)
        else:
            model.register_comm_hook(None, getattr(default_hooks, name), **how)
        grads = []
        for step in range(5):
            model.zero_grad()
            model(rank_data(3, 6, step=step)).square().sum().backward()
            grads += [p.grad.clone() for p in model.parameters()]
        return grads

    ours, theirs = train(lockstep.DistributedDataParallel), train(TorchDDP)
    assert_bit_equal_on_all_ranks(ours, "gradient")
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("native", [False, True], ids=["torchs", "native"])
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook", "allreduce_hook", "powersgd"])
def test_hooks_give_bit_for_bit_what_they_give_on_torchs_engine(two_or_three_ranks, name, native):
    if name == "powersgd" and native:
        pytest.skip("equal up to rounding: test_native_hook_values.py")
    two_or_three_ranks.run(_like_torch, name, native)


def _bucket_contents() -> None:
    module = Reversed()
    model = lockstep.DistributedDataParallel(module, bucket_cap_mb=0.0003)
    seen = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        assert type(bucket) is dist.GradBucket and state == "state"
        seen.append((bucket.index(), bucket.is_last(), bucket.parameters()))
        assert bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
        for grad, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
            assert grad.shape == parameter.shape
            # Undivided: dividing is the hook's duty.
            assert torch.equal(grad, parameter.grad)
        return default_hooks.allreduce_hook(None, bucket)

    model.register_comm_hook("state", hook)
    for step in range(3):
        seen.clear()
        model.zero_grad()
        model(rank_data(3, 6, step=step)).sum().backward()
        indices = [index for index, _, _ in seen]
        assert indices == list(range(len(seen))) and [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
        members = [id(p) for _, _, parameters in seen for p in parameters]
        assert sorted(members) == sorted(id(p) for p in module.parameters())


def test_a_hook_sees_torchs_own_bucket_with_undivided_gradients_and_the_parameters_themselves(ranks):
    ranks.run(_bucket_contents)


def _bad_answer(kind: str) -> list[str]:
    answers = {
        "none": lambda bucket: None,
        "number": lambda bucket: 1,
        "tensor": lambda bucket: bucket.buffer(),
        "empty_future": lambda bucket: _done(None),
        "wrong_size": lambda bucket: _done(torch.zeros(3)),
        "raises": lambda bucket: (_ for _ in ()).throw(ValueError("the user's own text")),
        "failed_future": lambda bucket: default_hooks.allreduce_hook(None, bucket).then(lambda f: f.value() / "x"),
    }
    failing = [True]

    def hook(state, bucket):
        return answers[kind](bucket) if failing[0] else default_hooks.allreduce_hook(None, bucket)

    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module))
    pair.wrapped.register_comm_hook(None, hook)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        pair.wrapped(rank_data(3, 6)).sum().backward()
    # The engine is ready for the next step.
    failing[0] = False
    pair.zero()
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    return [type(error.value).__name__, str(error.value)]


@pytest.mark.parametrize(
    ("kind", "kind_of_error", "phrase"),
    [
        ("none", "RuntimeError", "callback must return a torch.futures.Future object, but got"),
        ("number", "RuntimeError", "callback must return a torch.futures.Future object, but got"),
        ("tensor", "RuntimeError", "callback must return a torch.futures.Future object, but got"),
        ("empty_future", "RuntimeError", "value is not one tensor"),
        ("wrong_size", "RuntimeError", "returned a tensor with 3 elements"),
        ("raises", "ValueError", "the user's own text"),
        ("failed_future", "RuntimeError", "unsupported operand"),
    ],
)
def test_a_hook_that_fails_is_an_error_and_the_next_step_is_right(broken_ranks, kind, kind_of_error, phrase):
    for name, text in broken_ranks.run(_bad_answer, kind):
        assert phrase in text and (name == kind_of_error or kind == "failed_future")


def _registration() -> None:
    model = lockstep.DistributedDataParallel(Reversed())
    with pytest.raises(TypeError, match="callable"):
        model.register_comm_hook(None, 1)

    def wrong(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]: ...

    wrong.__annotations__ = {"bucket": int}
    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket"):
        model.register_comm_hook(None, wrong)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def test_wrong_and_repeated_registrations_are_refused_as_torch_refuses_them(ranks):
    ranks.run(_registration)


def _after_steps() -> None:
    pair = Pair(Reversed, lambda module: lockstep.DistributedDataParallel(module, gradient_as_bucket_view=True))
    with pair.wrapped.no_sync():
        pair.backward(lambda: rank_data(3, 6))
    pair.backward(lambda: rank_data(3, 6, step=1))
    pair.wrapped.register_comm_hook(None, default_hooks.allreduce_hook)  # other gaps between slots from here on
    pair.backward(lambda: rank_data(3, 6, step=2))
    pair.check()


def test_a_hook_registered_in_the_middle_of_training_keeps_accumulated_gradients(ranks):
    ranks.run(_after_steps)


@pytest.mark.parametrize("type_name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_builtin_hooks_are_there(ranks, type_name):
    ranks.run(_builtin, type_name)


def _builtin(type_name: str) -> None:
    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        model = lockstep.DistributedDataParallel(module)
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, type_name))
        return model

    pair = Pair(Reversed, wrap)
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 6, step=step) / 100)
        if type_name == "ALLREDUCE":
            pair.check()
        else:
            for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
                reference = theirs.grad.half() / dist.get_world_size()
                dist.all_reduce(reference)
                assert torch.equal(ours.grad, reference.float())
        pair.zero()


#: In seconds, far more than it takes to call a hook for the next bucket.
_SLOW = 0.3


def _second_round_at_once_at_first() -> None:
    """In the first steps the callback with the second round runs within the hook, because the first round is over."""
    at_once, previous, overlapped = True, None, []

    def hook(state, bucket):
        nonlocal previous
        overlapped.append(previous is not None and not previous.done())

        def again(future: torch.futures.Future) -> torch.Tensor:
            if not at_once:
                time.sleep(_SLOW)  # a slow network
            dist.all_reduce(future.value()[0])
            return future.value()[0] / dist.get_world_size() ** 2

        first = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        if at_once:
            first.wait()
        previous = first.then(again)
        return previous

    def wrap(module: torch.nn.Module) -> torch.nn.Module:
        model = lockstep.DistributedDataParallel(module, bucket_cap_mb=0.0003)
        model.register_comm_hook(None, hook)
        return model

    pair = Pair(Reversed, wrap)
    for step in range(4):
        at_once = step < 3
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    assert len(overlapped) > 8 and not any(overlapped)


def test_buckets_of_a_hook_with_two_rounds_never_overlap_even_if_the_second_was_once_inside_the_hook(ranks):
    ranks.run(_second_round_at_once_at_first)


def _sees_where_the_other_hook_is() -> str:
    seen = []

    def late(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The first rank waits in its collective until the second one has seen it there."""
        deadline = time.monotonic() + 20
        while dist.get_rank() == 1 and not seen and time.monotonic() < deadline:
            newest = list(lockstep.dump_state().values())[-1]  # others may be alive
            seen.extend(text for text in [newest[0]["sentence"]] if "waiting for" in text)
        return new_storage_hook(state, bucket)

    model = lockstep.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)), stall_threshold=1.0)
    model.register_comm_hook(None, late)
    model(rank_data(2, 2)).sum().backward()
    dist.barrier()  # one model at a time is alive
    return "".join(seen)


def test_a_rank_that_waits_inside_its_hook_says_so(ranks):
    _, seen = ranks.run(_sees_where_the_other_hook_is)
    assert "rank 0 is in backward of step 1, waiting for its comm hook, since" in seen
