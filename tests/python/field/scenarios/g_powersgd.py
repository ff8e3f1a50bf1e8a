"""Torch's PowerSGD hook on a changing plan, saved, fed with infinity; and hooks when ranks run out of data."""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from field.kit import pair_of, refused, register
from field.registry import Engine, case
from models import Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data

Future = torch.futures.Future


def _state(start: int, rank: int, **options: Any) -> PowerSGDState:
    return PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=start, min_compression_rate=0.4, **options
    )


@case(
    78,
    "PowerSGD that starts while the plan changes",
    variants={"default": {}, "static": {"mode": "static_graph"}, "find": {"mode": "find_unused_parameters"}},
)
def powersgd_start(engine: Engine, mode: str = "") -> None:
    """https://github.com/pytorch/pytorch/pull/51427 https://github.com/pytorch/pytorch/pull/55271
    https://github.com/pytorch/pytorch/pull/48867 https://github.com/pytorch/pytorch/pull/48757

    Symptom: error buffers of the old bucket shapes: a crash, or the memory of another parameter is added.
    Right: torch's rule for invalid starts; with matrices approximated in full rank the mean itself comes out.
    """
    warnings.simplefilter("ignore")
    for start, (warm, feedback) in itertools.product([0, 1, 2, 3, 10], [(True, True), (False, False), (False, True)]):
        options = {"warm_start": warm, "use_error_feedback": feedback}
        if start < 2 and (warm or feedback):
            try:
                _state(start, 6, **options)
            except ValueError:
                continue
            raise AssertionError(f"start={start} with {options} was accepted")
        state = _state(start, 6, **options)
        pair = pair_of(engine, Reversed, **({mode: True} if mode else {}))
        sizes: dict[int, int] = {}

        def hook(state: PowerSGDState, bucket: dist.GradBucket, sizes: dict[int, int] = sizes) -> Future[torch.Tensor]:
            sizes[bucket.index()] = bucket.buffer().numel()
            return powerSGD_hook(state, bucket)

        register(pair.wrapped, hook, state)
        for step in range(8):
            pair.backward(lambda step=step: rank_data(3, 6, step=step))
            for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
                expected = mean_over_ranks(theirs.grad)
                torch.testing.assert_close(ours.grad, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())
            for index, error in state.error_dict.items():
                assert error.numel() == sizes[index], f"error memory of another layout in bucket {index}"
            pair.update()
            pair.zero()


@case(80, "PowerSGD saved and resumed")
def powersgd_resumed(engine: Engine) -> None:
    """https://github.com/pytorch/pytorch/pull/79334 https://github.com/pytorch/pytorch/pull/102717

    Symptom: the state cannot be saved, or training takes another path afterwards.
    Right: a run resumed from model, optimizer and hook state is bit for bit the run that went on.
    """
    warnings.simplefilter("ignore")

    def run(model: Any, optimizer: torch.optim.Optimizer, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            optimizer.zero_grad()
            model(rank_data(3, 6, step=step)).square().sum().backward()
            optimizer.step()

    def wrap(module: nn.Module, state: PowerSGDState) -> tuple[Any, torch.optim.Optimizer]:
        model = engine.wrap(module)
        model.register_comm_hook(state, powerSGD_hook)
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    state = _state(3, 1)
    model, optimizer = wrap(nn.Linear(6, 6, bias=False), state)
    run(model, optimizer, 0, 10)
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "hook": state}, file)
    run(model, optimizer, 10, 5)

    file.seek(0)
    saved = torch.load(file, weights_only=False)
    module = nn.Linear(6, 6, bias=False)
    module.load_state_dict(saved["model"])
    resumed, optimizer = wrap(module, saved["hook"])
    optimizer.load_state_dict(saved["optimizer"])
    run(resumed, optimizer, 10, 5)
    for name, ours in resumed.module.named_parameters():
        assert torch.equal(ours, model.module.get_parameter(name)), f"{name} took another path"


@case(81, "PowerSGD after a step with infinity", variants={"first_step": {"at": 0}, "compressed_step": {"at": 3}})
def powersgd_after_infinity(engine: Engine, at: int) -> None:
    """https://github.com/pytorch/pytorch/pull/55031 https://github.com/pytorch/text/pull/1257
    https://github.com/pytorch/pytorch/pull/72043

    Symptom: NaN for ever, because the error memory keeps what a skipped step put there.
    Right: infinity reaches every rank in its own step, and later steps are finite.
    """
    warnings.simplefilter("ignore")
    model = engine.wrap(Reversed())
    model.register_comm_hook(_state(2, 1), powerSGD_hook)
    for step in range(at + 8):
        model.zero_grad()
        loss = model(rank_data(3, 6, step=step)).square().sum()
        (loss * float("inf") if step == at and dist.get_rank() == 1 else loss).backward()
        finite = all(p.grad.isfinite().all() for p in model.parameters())
        assert_bit_equal_on_all_ranks([torch.tensor(finite)], "verdict")
        assert finite == (step != at), f"step {step} after infinity in step {at} is {'' if finite else 'not '}finite"


#: What trains with unequal numbers of batches: options, and the hook.
JOINED: dict[str, dict[str, Any]] = {
    "plain": {},
    "live_size": {"join": {"divide_by_initial_world_size": False}},
    "find": {"options": {"find_unused_parameters": True}},
    "static": {"options": {"static_graph": True}},
    "views": {"options": {"gradient_as_bucket_view": True}},
    "norm": {"norm": True},
    "accumulating": {"accumulate": True},
    "fp16": {"hook": "fp16"},
    "powersgd": {"hook": "powersgd"},
    "early_stop": {"join": {"throw_on_early_termination": True}},
    "sync_batchnorm": {"sync_batchnorm": True},
}


@case(84, "join, with hooks and every mode", variants=JOINED)
def joined(
    engine: Engine,
    options: dict[str, Any] | None = None,
    join: dict[str, Any] | None = None,
    norm: bool = False,
    accumulate: bool = False,
    hook: str = "",
    sync_batchnorm: bool = False,
) -> None:
    """https://github.com/pytorch/pytorch/issues/60611 https://github.com/pytorch/pytorch/issues/44425
    https://github.com/pytorch/pytorch/issues/38174 https://github.com/microsoft/PyMarlin/issues/80

    Symptom: a hang with unequal numbers of batches; hooks and no_sync are ignored.
    Right: torch's documented numbers; final weights equal on all ranks. A layer that communicates in forward is
    refused where a rank would wait in it for one that has run out of data.
    """
    warnings.simplefilter("ignore")
    if sync_batchnorm:
        return _sync_batchnorm_is_refused(engine)
    join = join or {}
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6)] if norm else [nn.Linear(6, 6), nn.Tanh()]
    pair = Pair(lambda: nn.Sequential(*layers, nn.Linear(6, 6)), lambda m: engine.wrap(m, **(options or {})))
    if hook == "fp16":
        pair.wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook:
        pair.wrapped.register_comm_hook(_state(2, 1), powerSGD_hook)
    window = 2 if accumulate else 1
    batches = [5 * window, 3 * window]
    rate = 0.05
    done = 0
    stops = join.get("throw_on_early_termination", False)
    try:
        with pair.wrapped.join(**join):
            for step in range(batches[dist.get_rank()]):
                reduced = step % window == window - 1
                with contextlib.nullcontext() if reduced else pair.wrapped.no_sync():
                    pair.wrapped(rank_data(3, 6, step=step)).square().mean().backward()
                done += 1
                if reduced:
                    with torch.no_grad():
                        for p in pair.wrapped.parameters():
                            p.sub_(rate * p.grad)
                    pair.wrapped.zero_grad()
    except RuntimeError as error:
        assert stops, error
        assert done == batches[1], f"stopped after {done} batches"
        return
    assert not stops, "nothing was raised"
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")
    if not hook and not norm:
        _simulate(pair.plain, batches, window, rate, join.get("divide_by_initial_world_size", True))
        for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def _sync_batchnorm_is_refused(engine: Engine) -> None:
    norm = nn.SyncBatchNorm(6, affine=False, track_running_stats=False)
    with refused(engine, "SyncBatchNorm", "only work with GPU modules", kinds=ValueError):
        engine.wrap(nn.Sequential(nn.Linear(6, 6), norm))
    model = engine.wrap(nn.Sequential(nn.Linear(6, 6), nn.Identity()))
    model.module[1] = norm  # as it could be wrapped on a GPU
    with refused(engine, "SyncBatchNorm", "layer '1'", "throw_on_early_termination", kinds=ValueError), model.join():
        pass
    with model.join(throw_on_early_termination=True):
        pass
    with model.join(enable=False):
        pass


def _simulate(plain: nn.Module, batches: list[int], window: int, rate: float, initial: bool) -> None:
    """The same training in one process, with the data of every rank."""
    for first in range(0, max(batches), window):
        active = [rank for rank, count in enumerate(batches) if first < count]
        plain.zero_grad()
        for rank in active:
            for step in range(first, first + window):
                generator = torch.Generator().manual_seed(100 * step + rank)
                plain(torch.randn(3, 6, generator=generator)).square().mean().backward()
        with torch.no_grad():
            for p in plain.parameters():
                p.sub_(rate * p.grad / (len(batches) if initial else len(active)))
