"""The numbers of the engine's comm hooks: against torch's hooks and against numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from hook_kit import SHAPES, Given, grads_of, reduced, torch_state
from lockstep import hooks
from oracle import mean_over_ranks

# ---- half precision ----


def _halves(name: str, native: hooks.NativeHook, wild: bool) -> None:
    shapes = [(33, 7), (5,), (2, 3, 4)]
    ours, theirs = lockstep.DistributedDataParallel(Given(*shapes)), TorchDDP(Given(*shapes))
    ours.register_comm_hook(native)
    theirs.register_comm_hook(None, getattr(default_hooks, name))
    for step in range(4):
        grads = grads_of(dist.get_rank(), step, shapes)
        if wild:  # too large for fp16, and too small for its normal numbers
            grads[0][0] *= 1e6
            grads[0][1] *= 1e-6
        for a, b in zip(reduced(ours, grads), reduced(theirs, grads), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [hooks.FP16, hooks.BF16])
def test_casts_are_bit_equal_to_torchs_hooks_in_torchs_order(two_or_three_ranks, kind):
    two_or_three_ranks.run(_halves, f"{kind.name}_compress_hook", kind(order="cast_first"), True)


@pytest.mark.parametrize("kind", [hooks.FP16, hooks.BF16])
def test_on_two_ranks_dividing_first_gives_the_same_bits(ranks, kind):
    ranks.run(_halves, f"{kind.name}_compress_hook", kind(), False)


# ---- PowerSGD ----


def _like_torchs_power_sgd(native: hooks.PowerSGD, how: str) -> None:
    # In fp64, where rounding cannot be taken for anything else after 20 steps.
    dtype = torch.float64
    ours, theirs = (wrap(Given(*SHAPES, dtype=dtype)) for wrap in (lockstep.DistributedDataParallel, TorchDDP))
    state = torch_state(native)
    theirs.register_comm_hook(state, powerSGD_hook)
    if how == "by_name":
        ours.set_comm_hook(native)
    else:
        ours.register_comm_hook(torch_state(native), powerSGD_hook)
        assert "power_sgd" in ours.reducer.hook_signature()
    for step in range(20):
        grads = grads_of(dist.get_rank(), step, SHAPES, dtype)
        for a, b in zip(reduced(ours, grads), reduced(theirs, grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    stats = ours.comm_hook_stats()
    assert (stats["rate"], stats["numel_before"], stats["numel_after"]) == state.compression_stats()
    assert stats["steps"] == state.iter == 20
    _same_memory(ours, state)


def _same_memory(ours: Any, state: PowerSGDState) -> None:
    """Q and errors, by parameter. Torch's lie in one bucket: Q by shape, errors in the order of the bucket."""
    kept = ours.comm_hook_state_dict()
    names = [ours.reducer.param_names[i] for i in ours.reducer.bucket_params()[0]]
    assert len(ours.reducer.bucket_params()) == 1
    shapes = [tuple(p.shape) for p in ours.module.parameters()]
    matrix = {n: (s[0], math.prod(s[1:])) for n, s in zip(ours.reducer.param_names, shapes, strict=True)}
    if state.use_error_feedback:
        offset = 0
        for name in names:
            numel = math.prod(matrix[name])
            if f"error/{name}" in kept:
                theirs = state.error_dict[0][offset : offset + numel]
                torch.testing.assert_close(kept[f"error/{name}"], theirs, rtol=1e-9, atol=1e-9)
            offset += numel
    if state.warm_start:
        compressed = [n for n in names if f"factor/{n}" in kept]
        order = sorted(compressed, key=lambda n: [matrix[c] for c in compressed].index(matrix[n]))
        mine = torch.cat([state.q_memory_dict[0][:0], *(kept[f"factor/{n}"] for n in order)])
        torch.testing.assert_close(mine, state.q_memory_dict[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["by_name", "as_torchs"])
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 1},
        {"rank": 2, "epsilon": 1e-8},
        {"rank": 4},
        {"rank": 32},
        {"rank": 2, "warm_start": False},
        {"rank": 1, "error_feedback": False, "seed": 5},
        {"rank": 2, "batch_same_shape": True},
        {"rank": 1, "min_compression_rate": 2.0},
        {"rank": 1, "min_compression_rate": 1000.0},  # compresses nothing
    ],
    ids=str,
)
def test_power_sgd_goes_step_by_step_with_torchs_hook(two_or_three_ranks, options, how):
    native = hooks.PowerSGD(**{"start_iteration": 2, "min_compression_rate": 0.5, **options})
    two_or_three_ranks.run(_like_torchs_power_sgd, native, how)


def _numpy_power_sgd(grads: list[np.ndarray], errors: list[np.ndarray], q: np.ndarray) -> tuple:
    """One step of the paper, with the matrices of all ranks: the mean, new errors, new Q."""
    matrices = [g + e for g, e in zip(grads, errors, strict=True)]
    p = sum(m @ np.linalg.qr(q)[0] for m in matrices)
    p = np.linalg.qr(p)[0]
    q = sum(m.T @ p for m in matrices) / len(matrices)
    mean = p @ q.T
    return mean, [m - mean for m in matrices], q


def _like_numpy(rank: int, batched: bool) -> None:
    shape = (20, 12)
    side = math.ceil(math.sqrt(math.prod(shape)))
    world = dist.get_world_size()
    model = lockstep.DistributedDataParallel(Given(shape, dtype=torch.float64))
    kind = hooks.BatchedPowerSGD if batched else hooks.PowerSGD
    model.set_comm_hook(kind(rank=rank, start_iteration=0, min_compression_rate=0.0, seed=3))
    torch_seed = np.random.RandomState(3).randint(1_000_000_000)
    generator = torch.Generator().manual_seed(torch_seed)
    rows, cols = (side, side) if batched else shape
    q = torch.randn(1, cols, rank, generator=generator, dtype=torch.float64)[0].numpy()
    errors = [np.zeros((rows, cols))] * world
    for step in range(20):
        given = [grads_of(r, step, [shape], torch.float64)[0].numpy() for r in range(world)]
        if batched:
            given = [np.pad(g.ravel(), (0, side**2 - g.size)).reshape(side, side) for g in given]
        mean, errors, q = _numpy_power_sgd(given, errors, q)
        grad = reduced(model, grads_of(dist.get_rank(), step, [shape], torch.float64))[0]
        np.testing.assert_allclose(grad.numpy().ravel(), mean.ravel()[: math.prod(shape)], rtol=1e-7, atol=1e-9)
    error = model.comm_hook_state_dict()["error/weights.0"].numpy()
    np.testing.assert_allclose(error, errors[dist.get_rank()].ravel()[: error.size], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("batched", [False, True], ids=["per_parameter", "batched"])
@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_power_sgd_is_what_the_paper_says(two_or_three_ranks, rank, batched):
    two_or_three_ranks.run(_like_numpy, rank, batched)


def _zero_gradients() -> None:
    model = lockstep.DistributedDataParallel(Given((8, 8)))
    model.set_comm_hook("power_sgd", rank=2, start_iteration=0, min_compression_rate=0.1)
    for step in range(4):
        grads = grads_of(dist.get_rank(), step, [(8, 8)])
        grad = reduced(model, [grads[0] * (step % 2)])[0]
        assert grad.isfinite().all()


def test_power_sgd_takes_gradients_that_vanish(ranks):
    ranks.run(_zero_gradients)


# ---- int8 ----


def _quantized(data: np.ndarray) -> np.ndarray:
    """The values that remain after rounding to 8 bits per block of 256, data of a whole number of blocks."""
    blocks = data.reshape(-1, 256)
    scales = (np.abs(blocks).max(1) / np.float32(127)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        codes = np.where(scales[:, None] > 0, np.rint(blocks / scales[:, None]), 0).astype(np.float32)
    return (codes * scales[:, None]).reshape(data.shape)


def _int8_like_numpy(feedback: bool) -> None:
    shapes = [(40, 30), (7,)]
    world, rank = dist.get_world_size(), dist.get_rank()
    model = lockstep.DistributedDataParallel(Given(*shapes))
    model.set_comm_hook("int8", error_feedback=feedback)
    errors = [[np.zeros(math.prod(s), np.float32) for s in shapes] for _ in range(world)]
    for step in range(5):
        ours = reduced(model, grads_of(rank, step, shapes))
        for i, shape in enumerate(shapes):
            numel = math.prod(shape)
            pad = -numel % 256
            sent = []
            for r in range(world):
                exact = grads_of(r, step, shapes)[i].numpy().ravel() * np.float32(1 / world) + errors[r][i]
                sent.append(_quantized(np.pad(exact, (0, pad))))
                if feedback:
                    errors[r][i] = exact - sent[-1][:numel]
            total = np.sum(sent, axis=0, dtype=np.float32)
            mean = _quantized(total)
            np.testing.assert_allclose(ours[i].numpy().ravel(), mean[:numel], rtol=1e-5, atol=1e-6)
            if feedback:  # the rank that rounded the sum adds what it left out to its next gradient
                left_out = (total - mean)[:numel]
                kept = model.comm_hook_state_dict()[f"error/weights.{i}"]
                everywhere = kept.double().clone()
                dist.all_reduce(everywhere)
                expected = sum(errors[r][i] for r in range(world)) + left_out
                np.testing.assert_allclose(everywhere.numpy(), expected, rtol=1e-3, atol=1e-5)
                gathered = [torch.zeros_like(kept) for _ in range(world)]
                dist.all_gather(gathered, kept)
                errors_of = [g.numpy() for g in gathered]
                for r in range(world):
                    errors[r][i] = errors_of[r]


@pytest.mark.parametrize("feedback", [False, True], ids=["plain", "error_feedback"])
def test_int8_is_what_numpy_makes_of_it(two_or_three_ranks, feedback):
    two_or_three_ranks.run(_int8_like_numpy, feedback)


def _stochastic() -> None:
    shape = (16, 64)
    model = lockstep.DistributedDataParallel(Given(shape))
    model.set_comm_hook("int8", rounding="stochastic", seed=7)
    grads = grads_of(dist.get_rank(), 0, [shape])
    total = torch.zeros(shape)
    once = reduced(model, grads)[0]
    steps = 400
    for _ in range(steps):
        total += reduced(model, grads)[0]
    exact = mean_over_ranks(grads[0])
    step = exact.abs().max() / 127 * 2
    assert (once - exact).abs().max() <= 2 * step
    # Independent errors of at most two steps: their mean over 400 shrinks twentyfold; 5 standard deviations.
    assert (total / steps - exact).abs().max() < 5 * step / math.sqrt(steps)
    assert ((total / steps - exact).abs().mean() < (once - exact).abs().mean() / 5).item()


def test_stochastic_rounding_is_right_in_the_mean(ranks):
    ranks.run(_stochastic)
