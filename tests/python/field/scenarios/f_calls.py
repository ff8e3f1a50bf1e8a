"""Evaluation, copies, attributes, compilation and gradient scaling of a wrapped model."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from field.kit import LATE, collectives, in_turns, pair_of, refused
from field.registry import Engine, case
from models import Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, assert_mean_grads, rank_data


def _with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def _train(pair: Pair, first: int, steps: int = 2) -> None:
    for step in range(first, first + steps):
        pair.backward(lambda step=step: rank_data(3, 4, step=step))
        pair.check()
        pair.update()
        pair.zero()


@case(
    65,
    "evaluation, on all ranks or on one",
    variants={
        "before_training": {"how": "before"},
        "on_rank_0": {"how": "rank_0", "own_processes": True},
        "uneven": {"how": "uneven", "own_processes": True},
        "in_turns": {"how": "turns"},
        "training_mode_on_one_rank": {"how": "training_mode", "own_processes": True},
    },
)
def evaluation(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/issues/19896 https://github.com/pytorch/pytorch/issues/54059
    https://github.com/pytorch/pytorch/issues/89716 https://github.com/pytorch/pytorch/issues/143647
    https://github.com/pytorch/pytorch/issues/154116 https://haoxiangsnr.github.io/spiking-fullsubnet/reference/FAQ.html

    Symptom: validation on one rank hangs, because even a forward without gradients sends buffers.
    Right: no collective in eval mode without gradients; otherwise an error in time that says who is absent.
    """
    pair = pair_of(engine, _with_norm, **engine.where_offered(stall_threshold=2.0))
    rank = dist.get_rank()

    @torch.no_grad()
    def evaluate(batches: int) -> None:
        pair.wrapped.eval()
        for _ in range(batches):
            pair.wrapped(rank_data(3, 4))
        pair.wrapped.train()

    if how == "before":
        with torch.no_grad():
            pair.wrapped(rank_data(3, 4))
        _train(pair, 0)
    elif how == "turns":
        for i in range(3):
            _train(pair, 2 * i)
            evaluate(2)
    elif how == "training_mode":
        _train(pair, 0)
        if rank == 1:
            with refused(engine, "buffer", "rank 0", ".module", within=LATE), torch.no_grad():
                pair.wrapped(rank_data(3, 4))
    else:
        _train(pair, 0)
        sent = collectives(lambda: evaluate((1 - rank) * 3 if how == "rank_0" else 3 - rank))
        assert not sent, f"evaluation sent {sent}"
        _train(pair, 2)


def _hooked(model: Any, start: int = 2) -> Any:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=start)
    model.register_comm_hook(state, powerSGD_hook)
    return model


@case(
    67,
    "deepcopy, pickle and averages of a wrapped model",
    variants={how: {"how": how} for how in ("deepcopy", "with_hook", "saved", "custom_group", "averaged")},
)
def copies(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/issues/76927 https://github.com/pytorch/pytorch/issues/73825
    https://github.com/ultralytics/yolov5/issues/279 https://github.com/hpcaitech/Open-Sora/issues/28

    Symptom: "cannot pickle ProcessGroup".
    Right: copies train on their own; on a custom group the error names the attribute and advises `.module`.
    """
    if how == "custom_group":
        model = engine.wrap(Reversed(), process_group=dist.new_group([0, 1]))
        with refused(engine, "process_group", ".module", kinds=(RuntimeError, TypeError)):
            copy.deepcopy(model)
        return
    pair = pair_of(engine, Reversed)
    _steps(pair.wrapped, pair.plain)
    if how == "averaged":
        average = AveragedModel(pair.wrapped.module)
        average.update_parameters(pair.wrapped.module)
        wrapped_average = AveragedModel(pair.wrapped)
        wrapped_average.update_parameters(pair.wrapped)
        for a, b in zip(average.module.parameters(), wrapped_average.module.parameters(), strict=True):
            assert torch.equal(a, b)
        _steps(pair.wrapped, pair.plain)
        return
    if how == "with_hook":
        _hooked(pair.wrapped, start=1000)  # exact for as long as the test takes
    if how == "saved":
        file = io.BytesIO()
        torch.save(pair.wrapped, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = copy.deepcopy(pair.wrapped)
    for _ in range(2):  # in turns: they must not share buckets
        _steps(pair.wrapped, pair.plain)
        before = [p.grad.clone() for p in pair.wrapped.parameters()]
        _steps(other, copy.deepcopy(other.module))
        for p, grad in zip(pair.wrapped.parameters(), before, strict=True):
            assert torch.equal(p.grad, grad), "a step of the copy changed the gradients of the original"


def _steps(wrapped: nn.Module, plain: nn.Module) -> None:
    for step in range(2):
        for model in (wrapped, plain):
            model.zero_grad()
            model(rank_data(3, 6, step=step)).square().sum().backward()
        assert_mean_grads(wrapped, plain)


@dataclass
class Batch:
    x: torch.Tensor
    note: str


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, batch: Batch, nested: dict[str, Any], flag: bool = False) -> torch.Tensor:
        assert isinstance(batch, Batch) and batch.note == "kept" and nested["names"] == ["a", "b"] and flag
        return self.layer(batch.x) + nested["inner"]["offset"]

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum()


@case(69, "attributes of the wrapped module", variants={"attribute": {}, "inputs": {"inputs": True}})
def attributes(engine: Engine, inputs: bool = False) -> None:
    """https://github.com/huggingface/diffusers/issues/6351

    Symptom: "object has no attribute", for a method that the module has.
    Right: the error says where it is; any input passes; frameworks that ask isinstance are content.
    """
    model = engine.wrap(ByKeyword())
    assert isinstance(model, TorchDDP)
    if inputs:
        nested = {"names": ["a", "b"], "inner": {"offset": torch.ones(4)}}
        x = rank_data(3, 4)
        out = model(batch=Batch(x, "kept"), nested=nested, flag=True)
        torch.testing.assert_close(out, model.module.layer(x) + 1)
        out.sum().backward()
        assert_bit_equal_on_all_ranks([p.grad for p in model.parameters()], "gradient")
        return
    assert not hasattr(model, "nowhere_at_all")
    with refused(engine, "did you mean", ".module.compute_loss", kinds=AttributeError, coded_too=False):
        _ = model.compute_loss


class CompiledNet(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.checkpointed else self.first(x)
        return self.last(torch.relu(self.norm(x)))


@case(
    70,
    "torch.compile",
    variants={"inside": {"inside": True, "options": {"static_graph": True}}, "outside": {"checkpointed": False}},
    limit=120,
)
def compiled(
    engine: Engine, inside: bool = False, checkpointed: bool = True, options: dict[str, Any] | None = None
) -> None:
    """https://github.com/pytorch/pytorch/issues/93672 https://github.com/pytorch/pytorch/issues/104674
    https://github.com/pytorch/pytorch/issues/108269 https://github.com/pytorch/pytorch/issues/108966
    https://github.com/pytorch/pytorch/issues/141827 https://github.com/pytorch/pytorch/issues/196227
    https://github.com/pytorch/pytorch/issues/113809 https://github.com/ultralytics/ultralytics/pull/24413

    Symptom: graph splits tied to buckets, static_graph and checkpoints that fail, evaluation that breaks the graph.
    Right: the numbers of the eager model, in training and evaluation.
    """

    def wrap(module: nn.Module) -> nn.Module:
        if inside:
            return engine.wrap(torch.compile(module, backend="aot_eager"), **(options or {}))
        return torch.compile(engine.wrap(module, **(options or {})), backend="aot_eager")

    pair = Pair(lambda: CompiledNet(checkpointed), wrap)
    for step in range(4):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    pair.plain.load_state_dict(_state(pair.wrapped))
    for model in (pair.wrapped, pair.plain):
        model.eval()
    with torch.no_grad():
        evaluated = (pair.wrapped(rank_data(3, 6)), pair.plain(rank_data(3, 6)))
    if dist.get_rank() == 0:  # others may have got rank 0's running statistics just now
        torch.testing.assert_close(*evaluated)


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.replace("module.", "").replace("_orig_mod.", ""): value for name, value in model.state_dict().items()}


HOOKS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "fp16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda model: model.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "powersgd": _hooked,
}


@case(
    72,
    "gradient scaling: infinity on one rank, and scales that differ",
    variants={hook: {"hook": hook} for hook in HOOKS} | {"scales_differ": {"drift": True}},
)
def gradient_scaler(engine: Engine, hook: str = "plain", drift: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/136009 https://github.com/pytorch/pytorch/issues/90057
    https://github.com/NVIDIA/apex/issues/237

    Symptom: one rank skips a step that the others take, or scales grow apart; ranks diverge.
    Right: infinity reaches every rank through every hook, so all skip; drift is reported when asked for.
    """
    warnings.simplefilter("ignore")
    model = engine.wrap(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), **engine.where_offered(stall_threshold=2.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2 if drift else 100)
    if drift:
        _scales_drift(engine, model, optimizer, scaler)
        return
    HOOKS[hook](model)
    for step in range(5):
        infinite = step == 3 and dist.get_rank() == 1
        with model.no_sync():
            scaler.scale(model(rank_data(3, 6, step=step)).mean() * (float("inf") if infinite else 1.0)).backward()
        scaler.scale(model(rank_data(3, 6, step=step + 50)).mean()).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 3:
            assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)), "not skipped"
            assert scaler.get_scale() == 2.0
            break
    assert_bit_equal_on_all_ranks(model.parameters(), "parameter")
    assert in_turns(scaler.get_scale) == [2.0, 2.0]


def _scales_drift(engine: Engine, model: Any, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    engine.require("assert_in_sync")

    def step(i: int) -> None:
        scaler.scale(model(rank_data(3, 6, step=i)).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with model.join():
        for i in range(4 - 3 * dist.get_rank()):
            step(i)
    model.assert_in_sync()
    step(9)
    with refused(engine, "0.weight", "rank 1"):
        model.assert_in_sync()
