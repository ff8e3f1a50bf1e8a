"""Parameters of every kind: complex, mixed, empty, sparse, huge, and not the same on all ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from field.kit import LATE, assert_contains, in_turns, pair_of, refused, register
from field.registry import Engine, case
from models import ComplexAndReal, EmptyParameters
from oracle import Pair, assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data


def _register(model: Any, hook: str) -> None:
    if hook == "powersgd":
        state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.4)
        model.register_comm_hook(state, powerSGD_hook)
    else:
        model.register_comm_hook(None, getattr(default_hooks, hook))


class Complex(nn.Module):
    """Complex layers whose output is real; ``conjugated`` gives gradients that are lazily conjugated."""

    def __init__(self, conjugated: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.cfloat)
        self.conjugated = conjugated
        self.register_buffer("phase", torch.complex(torch.ones(4), torch.full((4,), float(dist.get_rank()))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(x, x.flip(0))
        out = nn.functional.linear(z, self.layer.weight.conj(), self.layer.bias) if self.conjugated else self.layer(z)
        return (out * self.phase).abs()


@case(
    34,
    "complex gradients keep their imaginary part",
    variants={
        "plain": {},
        "conjugated": {"conjugated": True},
        "views": {"options": {"gradient_as_bucket_view": True}},
        "with_real": {"mixed": True},
        **{hook: {"hook": hook} for hook in ("allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "powersgd")},
    },
)
def complex_parameters(
    engine: Engine,
    conjugated: bool = False,
    mixed: bool = False,
    hook: str = "",
    options: dict[str, Any] | None = None,
) -> None:
    """https://github.com/pytorch/pytorch/issues/158753 https://github.com/pytorch/pytorch/pull/166863
    https://github.com/pytorch/pytorch/issues/71613 https://github.com/pytorch/pytorch/issues/156632
    https://github.com/pytorch/pytorch/issues/80080

    Symptom: a complex model converges in one process and not in several: imaginary parts are lost.
    Right: exact without a hook; a compressing hook handles both parts or is refused by the parameter's name.
    """
    pair = pair_of(engine, ComplexAndReal if mixed else lambda: Complex(conjugated), **(options or {}))
    if not mixed:
        assert_bit_equal_on_all_ranks([pair.wrapped.module.phase], "buffer")
        pair.plain.phase.copy_(pair.wrapped.module.phase)
    try:
        if hook:
            _register(pair.wrapped, hook)
        for step in range(4):
            pair.backward(lambda step=step: rank_data(3, 4, step=step))
            if hook in ("", "allreduce_hook"):
                pair.check()
            else:
                _check_roughly(pair)
            pair.update()
            pair.zero()
    except (RuntimeError, ValueError, TypeError) as error:
        assert hook, error
        assert_contains(str(error), "layer.weight")


def _check_roughly(pair: Pair) -> None:
    for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
        expected = mean_over_ranks(theirs.grad)
        error = (ours.grad - expected).abs().max() / expected.abs().max()
        assert error < 0.05, f"off by {error:.0%} of the largest element"


class Alternating(nn.Module):
    """Layers of four dtypes in turns, used in the reverse order of registration."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64] * 3
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in reversed(self.layers):
            x = x.to(layer.weight.dtype)
            x = x + layer(x) / 4  # what differs between ranks reaches every layer
        return x.float()


@case(35, "four dtypes in one model", variants={"default": {}, "views": {"views": True}})
def mixed_dtypes(engine: Engine, views: bool = False) -> None:
    """https://github.com/pytorch/pytorch/pull/4891 https://github.com/chainer/chainer/issues/5732
    https://github.com/pytorch/pytorch/pull/62231

    Symptom: buckets of one dtype each, small limits and another order of gradients interact.
    Right: right values and dtypes; every rank starts its collectives in the same order, before and after the rebuild.
    """
    pair = pair_of(engine, Alternating, bucket_cap_mb=5e-5, gradient_as_bucket_view=views)
    sent: list[tuple[int, str, int]] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append((bucket.index(), str(bucket.buffer().dtype), sum(p.numel() for p in bucket.parameters())))
        return default_hooks.allreduce_hook(None, bucket)

    register(pair.wrapped, hook)
    for step in range(4):
        sent.clear()
        pair.backward(lambda step=step: rank_data(3, 4, step=step))
        pair.check()
        orders = in_turns(lambda: list(sent))
        assert orders[0] == orders[1], orders
        assert step == 0 or len(sent) > 8, f"only {len(sent)} buckets"
        pair.update()
        pair.zero()


@case(
    42,
    "parameters without elements",
    variants={
        "default": {},
        "alone_in_a_bucket": {"options": {"bucket_cap_mb": 1e-6}},
        "views": {"options": {"gradient_as_bucket_view": True}},
        "fp16": {"hook": "fp16_compress_hook"},
        "powersgd": {"hook": "powersgd"},
    },
)
def empty_parameters(engine: Engine, options: dict[str, Any] | None = None, hook: str = "") -> None:
    """https://github.com/pytorch/pytorch/issues/87280 https://github.com/ACEsuit/mace/pull/1399

    Symptom: a parameter of shape [0] never gets a gradient, so the second forward raises.
    Right: it counts as ready and causes no error.
    """
    pair = pair_of(engine, EmptyParameters, **(options or {}))
    if hook:
        _register(pair.wrapped, hook)
    for step in range(4):
        pair.backward(lambda step=step: rank_data(3, 4, step=step))
        if hook:
            something = (pair.wrapped.module.something.weight.grad, pair.plain.something.weight.grad)
            torch.testing.assert_close(something[0], mean_over_ranks(something[1]), rtol=0.01, atol=0.01)
        else:
            pair.check()
        pair.update()
        pair.zero()


def _two_layers(first: str, second: str) -> nn.Module:
    module = nn.Sequential()
    module.add_module(first, nn.Linear(4, 4))
    module.add_module(second, nn.Linear(4, 4))
    return module


@case(45, "same shapes, registered in another order on one rank")
def other_order(engine: Engine) -> None:
    """https://github.com/NVIDIA/apex/issues/19 https://github.com/pytorch/pytorch/issues/102438

    Symptom: shapes agree, so different parameters are averaged together.
    Right: every rank raises when the model is wrapped, with both sides' view of the first difference.
    """
    names = ("a", "b") if dist.get_rank() == 0 else ("b", "a")
    with refused(engine, "a.weight", "b.weight", "rank 0", "rank 1"):
        engine.wrap(_two_layers(*names))
    dist.barrier()


@case(
    46,
    "a rank that does not come is not a difference of models",
    variants={
        "stays_away": {"how": "away", "own_processes": True},
        "dies": {"how": "dies", "lost": (1,)},
        "raises": {"how": "raises", "own_processes": True},
        "other_model": {"how": "other"},
    },
)
def rank_missing_at_construction(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/issues/102438 https://github.com/huggingface/accelerate/issues/1481
    https://github.com/X-PLUG/mPLUG-Owl/issues/86 https://github.com/Kent0n-Li/ChatDoctor/issues/49
    https://github.com/yifan123/flow_grpo/issues/245

    Symptom: "rank 1 has inconsistent 0 params" for a rank that crashed; people search their model for days.
    Right: two errors: a rank that did not reach construction, and a true difference with names.
    """
    mine = dist.get_rank() == 1
    if how == "other":
        module = _two_layers("a", "b") if mine else nn.Sequential(nn.Linear(4, 4))
        with refused(engine, "Rank 0 has 2 params, while rank 1 has inconsistent 4", "weight"):
            engine.wrap(module)
        dist.barrier()
        return
    if mine:
        if how == "dies":
            os._exit(1)
        return  # with "raises", user code failed before the model was wrapped; that rank is alive and goes elsewhere
    with refused(engine, "rank 1", "construct", within=LATE) as caught:
        engine.wrap(nn.Linear(4, 4))
    assert "0 params" not in caught.text


class Tables(nn.Module):
    """Sparse tables, the second of which is used when asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Embedding(10, 8, sparse=True)
        self.spare = nn.Embedding(10, 8, sparse=True)

    def forward(self, with_spare: bool) -> torch.Tensor:
        tokens = torch.tensor([1, 2, 2, 7 + dist.get_rank()])
        return self.used(tokens) + (self.spare(tokens) if with_spare else 0)


@case(
    47,
    "an unused sparse embedding",
    variants={"nowhere": {"on": ""}, "one_rank": {"on": "1"}, "later": {"on": "-01"}},
)
def unused_sparse(engine: Engine, on: str) -> None:
    """https://github.com/pytorch/pytorch/issues/80496

    Symptom: "Expected sparse gradient to be defined".
    Right: used nowhere: the gradient stays None; used on one rank: the others contribute nothing.
    """
    pair = pair_of(engine, Tables, find_unused_parameters=True)
    for step in range(4):
        mine = str(dist.get_rank()) in on and not (on.startswith("-") and step < 2)
        pair.backward(lambda mine=mine: mine)
        pair.check()
        assert on or pair.wrapped.module.spare.weight.grad is None
        pair.update()
        pair.zero()


@case(
    49,
    "sparse gradients with hooks and views",
    variants={
        "default": {},
        "views": {"views": True},
        **{hook: {"hook": hook} for hook in ("fp16_compress_hook", "bf16_compress_hook", "powersgd")},
    },
)
def sparse_with_hooks(engine: Engine, views: bool = False, hook: str = "") -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/5355 https://github.com/pytorch/pytorch/issues/111422

    Symptom: "Tensors must be dense" in the middle of backward.
    Right: sparse gradients are right with every hook, or refused by name before training.
    """

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 8, sparse=True)
            self.layer = nn.Linear(8, 8)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.layer(self.table(tokens))

    try:
        pair = pair_of(engine, Text, gradient_as_bucket_view=views)
        if hook:
            _register(pair.wrapped, hook)
    except (RuntimeError, ValueError) as error:
        assert_contains(str(error), "table.weight")
        return
    for step in range(4):
        pair.backward(lambda step=step: torch.tensor([1, 2, 2, 7 + (step + dist.get_rank()) % 3]))
        if not hook:
            pair.check()
        # PowerSGD approximates what is dense; the table must be right with every hook.
        assert_bit_equal_on_all_ranks([p.grad for p in pair.wrapped.parameters()], "gradient")
        grad, expected = pair.wrapped.module.table.weight.grad, mean_over_ranks(pair.plain.table.weight.grad)
        grad = grad.to_dense() if grad.is_sparse else grad
        torch.testing.assert_close(grad, expected, rtol=0.02, atol=0.02 * expected.abs().max().item())
        pair.update()
        pair.zero()


@case(
    57,
    "a module without trainable parameters",
    variants={"refused": {}, "passed_through": {"passthrough": True}},
)
def nothing_to_train(engine: Engine, passthrough: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/25552 https://github.com/senwu/emmental/pull/86
    https://github.com/huggingface/diffusers/issues/10160

    Symptom: an error where a set-up wraps every submodule.
    Right: torch's RuntimeError, or on request a wrapper that simply forwards.
    """
    for module in (nn.ReLU(), nn.Linear(4, 4).requires_grad_(False)):
        if passthrough:
            options = engine.require(allow_passthrough=True)
            x = rank_data(3, 4)
            assert torch.equal(engine.wrap(module, **options)(x), module(x))
            continue
        with refused(engine, "DistributedDataParallel is not needed when a module", coded_too=False):
            engine.wrap(module)


@case(
    58,
    "parameters larger than a bucket",
    variants={
        "small_huge_small": {"sizes": [256, 100_000, 256], "cap": 0.1},
        "cap_of_zero": {"sizes": [256, 1000, 256], "cap": 0},
        "huge_cap": {"sizes": [256, 100_000, 256], "cap": 1e6},
        "one_parameter": {"sizes": [100_000], "cap": 0.1},
        "many_tiny": {"sizes": [100_000] + [4] * 60, "cap": 0.001},
    },
)
def huge_parameters(engine: Engine, sizes: list[int], cap: float) -> None:
    """https://github.com/pytorch/pytorch/issues/61353 https://github.com/pytorch/pytorch/pull/121640
    https://github.com/pytorch/pytorch/pull/62748 https://github.com/meta-pytorch/torchft/issues/41

    Symptom: more collectives than the limit asks for, and an order that flips after the rebuild.
    Right: right values; the user's limit is obeyed, with the same layout on all ranks.
    """

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(torch.full((n,), 1.0 + i) for i, n in enumerate(sizes))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([(scale * x).mean() for scale in self.scales])

    try:
        pair = pair_of(engine, Scales, bucket_cap_mb=cap)
    except ValueError as error:
        assert cap <= 0, error
        assert_contains(str(error), "bucket_cap_mb")
        return
    sent: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(sum(p.numel() for p in bucket.parameters()))
        return default_hooks.allreduce_hook(None, bucket)

    register(pair.wrapped, hook)
    for step in range(4):
        sent.clear()
        pair.backward(lambda step=step: rank_data(1, step=step))
        pair.check()
        assert sum(sent) == sum(sizes)
        layouts = in_turns(lambda: list(sent))
        assert layouts[0] == layouts[1], layouts
        limit = cap * 2**20 / 4
        # The parameter that reaches the limit closes its bucket.
        assert step == 0 or all(n < limit + max(sizes) for n in sent), sent
        assert step == 0 or cap < 1000 or len(sent) == 1, sent
        pair.update()
        pair.zero()
