"""What the engine's comm hooks keep between steps, and torch's states that answer for them."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from hook_kit import SHAPES, Given, grads_of, reduced, torch_state
from lockstep import hooks
from models import Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data

# ---- saved and loaded ----


def _train(model: Any, first: int, steps: int) -> list[torch.Tensor]:
    grads = []
    for step in range(first, first + steps):
        model.zero_grad()
        model(rank_data(3, 6, step=step)).square().sum().backward()
        grads += [p.grad.clone() for p in model.parameters()]
    return grads


def _resumed(native: hooks.NativeHook) -> None:
    def wrapped() -> Any:
        torch.manual_seed(1)
        model = lockstep.DistributedDataParallel(Reversed(), bucket_cap_mb=0.0003)
        model.set_comm_hook(native)
        return model

    went_on = wrapped()
    _train(went_on, 0, 5)
    file = io.BytesIO()
    torch.save(went_on.comm_hook_state_dict(), file)
    file.seek(0)
    resumed = wrapped()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_comm_hook_state_dict(torch.load(file))
    for a, b in zip(_train(went_on, 5, 4), _train(resumed, 5, 4), strict=True):
        assert torch.equal(a, b)  # also where a sum depends on its place in the bucket


@pytest.mark.parametrize(
    "native",
    [
        hooks.PowerSGD(rank=2, start_iteration=2, min_compression_rate=0.3),
        hooks.PowerSGD(rank=1, start_iteration=0, min_compression_rate=0.3, warm_start=False),
        hooks.Int8(error_feedback=True),
        hooks.Int8(rounding="stochastic", error_feedback=True),
    ],
    ids=["power_sgd", "cold_power_sgd", "int8", "stochastic_int8"],
)
def test_a_resumed_run_goes_on_bit_for_bit(two_or_three_ranks, native):
    two_or_three_ranks.run(_resumed, native)


def _misfitting() -> None:
    native = hooks.PowerSGD(rank=1, start_iteration=0, min_compression_rate=0.1)

    model = lockstep.DistributedDataParallel(Given((6, 6), (8, 6)))
    model.set_comm_hook(native)
    reduced(model, grads_of(dist.get_rank(), 0, [(6, 6), (8, 6)]))
    saved = model.comm_hook_state_dict()

    other = lockstep.DistributedDataParallel(Given((6, 6), (6, 9), (4, 4)))
    other.set_comm_hook(native)
    with pytest.warns(UserWarning, match=r"another size.*'weights\.1' \(48 elements, now 54\)"):
        other.load_comm_hook_state_dict(saved)
    assert torch.equal(other.comm_hook_state_dict()["error/weights.0"], saved["error/weights.0"])
    assert "error/weights.1" not in other.comm_hook_state_dict()

    alien = lockstep.DistributedDataParallel(nn.Linear(6, 6))
    with pytest.raises(RuntimeError, match="keeps nothing between steps"):
        alien.load_comm_hook_state_dict(saved)
    alien.set_comm_hook(native)
    before = alien.comm_hook_state_dict()
    with pytest.raises(RuntimeError, match=r"another model.*weights\.0"):
        alien.load_comm_hook_state_dict(saved)
    assert alien.comm_hook_state_dict().keys() == before.keys()

    # One state for all ranks: the errors are those of rank 0 only.
    everybodys = [saved]
    dist.broadcast_object_list(everybodys)
    same = lockstep.DistributedDataParallel(Given((6, 6), (8, 6)))
    same.set_comm_hook(native)
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        same.load_comm_hook_state_dict(everybodys[0])
    told = [str(r.message) for r in records if "saved by rank 0" in str(r.message)]
    assert len(told) == (dist.get_rank() != 0)
    assert ("error/weights.0" in same.comm_hook_state_dict()) == (dist.get_rank() == 0)
    assert_bit_equal_on_all_ranks(reduced(same, grads_of(dist.get_rank(), 1, [(6, 6), (8, 6)])), "gradient")


def test_a_state_that_does_not_fit_is_named_and_what_fits_is_kept(ranks):
    ranks.run(_misfitting)


# ---- torch's hooks ----


def _stand_in(hook_name: str, native: bool | None) -> str:
    hook = {"power": powerSGD_hook, "batched": batched_powerSGD_hook}.get(hook_name) or getattr(
        default_hooks, hook_name
    )
    state = PowerSGDState(None, 1, 2, 0.1) if hook_name in ("power", "batched") else None
    model = lockstep.DistributedDataParallel(Reversed())
    model.register_comm_hook(state, hook, native=native)
    _train(model, 0, 2 if hook_name == "batched" and native is False else 5)  # torch's asserts at the third
    return model.reducer.hook_signature()


@pytest.mark.parametrize(
    ("hook", "signature"),
    [
        ("allreduce_hook", "allreduce(division='after_packing')"),
        ("fp16_compress_hook", "fp16(order='cast_first')"),
        ("bf16_compress_hook", "bf16(order='cast_first')"),
        ("power", "power_sgd(batch_same_shape=false"),
        ("batched", "batched_power_sgd(batch_same_shape=false"),
    ],
)
def test_torchs_hooks_select_the_engines_unless_told_not_to(ranks, hook, signature):
    assert all(text.startswith(signature) for text in ranks.run(_stand_in, hook, None))
    assert all("(" not in text for text in ranks.run(_stand_in, hook, False))


def _another_group() -> str:
    group = dist.new_group([0, 1])
    model = lockstep.DistributedDataParallel(Reversed())
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    _train(model, 0, 2)
    return model.reducer.hook_signature()


def test_a_hook_of_torch_for_another_group_stays_as_it_is(ranks):
    assert ranks.run(_another_group) == ["fp16_compress_hook"] * 2


def _linked_state() -> None:
    native = hooks.PowerSGD(rank=2, start_iteration=2, min_compression_rate=0.5)
    state, reference = torch_state(native), torch_state(native)
    ours, theirs = lockstep.DistributedDataParallel(Given(*SHAPES)), TorchDDP(Given(*SHAPES))
    ours.register_comm_hook(state, powerSGD_hook)
    theirs.register_comm_hook(reference, powerSGD_hook)
    assert isinstance(state, PowerSGDState)
    for step in range(6):
        grads = grads_of(dist.get_rank(), step, SHAPES)
        reduced(ours, grads)
        reduced(theirs, grads)
        assert state.iter == reference.iter == step + 1
        assert state.compression_stats() == reference.compression_stats()
    assert state.matrix_approximation_rank == 2
    assert state.error_dict.keys() == state.q_memory_dict.keys() == {0}
    assert np.array_equal(state.rng.get_state()[1], reference.rng.get_state()[1])
    with pytest.raises(AttributeError, match="taken over by the engine"):
        state.matrix_approximation_rank = 4
    resumed = lockstep.DistributedDataParallel(Given(*SHAPES))
    copied = pickle.loads(pickle.dumps(state))
    assert copied.iter == 6 and copied.compression_stats() == state.compression_stats()
    resumed.register_comm_hook(copied, powerSGD_hook)
    grads = grads_of(dist.get_rank(), 7, SHAPES)
    for a, b in zip(reduced(ours, grads), reduced(resumed, grads), strict=True):
        assert torch.equal(a, b)

    ours.set_comm_hook("bf16")
    assert state.iter == 7  # what was last true
    reduced(ours, grads)
    assert state.iter == 7


def test_a_state_of_torch_answers_from_the_engine(ranks):
    ranks.run(_linked_state)


def _shared_state() -> None:
    """As with torch's hook, one state may be given to several models; here each has errors of its own."""
    native = hooks.PowerSGD(rank=2, start_iteration=2, min_compression_rate=0.5)
    state, reference = torch_state(native), torch_state(native)
    first, second, alone = (lockstep.DistributedDataParallel(Given(*SHAPES)) for _ in range(3))
    grads = [grads_of(dist.get_rank(), step, SHAPES) for step in range(8)]
    first.register_comm_hook(state, powerSGD_hook)
    alone.register_comm_hook(reference, powerSGD_hook)
    for step in range(3):
        reduced(first, grads[step])
        reduced(alone, grads[step])
    with pytest.warns(UserWarning, match=r"in use by another model.*\[LS-150\]"):
        second.register_comm_hook(state, powerSGD_hook)
    # Both go on as the one model would have, whatever the other one does in between.
    for step in range(3, 6):
        expected = reduced(alone, grads[step])
        for model in (first, second):
            for a, b in zip(reduced(model, grads[step]), expected, strict=True):
                assert torch.equal(a, b)
    reduced(second, grads[7])
    assert state.iter == 7  # of the second
    first.set_comm_hook("bf16")
    assert state.iter == 7
    second.set_comm_hook("bf16")
    reduced(second, grads[0])
    assert state.iter == 7

    other = lockstep.DistributedDataParallel(torch.nn.Linear(5, 7))
    with pytest.raises(RuntimeError, match="another model"):
        other.register_comm_hook(state, powerSGD_hook)


def test_a_state_that_is_given_to_a_second_model_serves_both(ranks):
    ranks.run(_shared_state)
