"""Numbers: what is averaged, how reproducibly, and what every constructor argument does to it."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from field.kit import close, pair_of, register
from field.registry import Engine, case
from models import Branches, Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data

Future = torch.futures.Future


@case(92, "sums, means and unequal batches", variants={"sum": {"reduction": "sum"}, "mean": {"reduction": "mean"}})
def loss_scaling(engine: Engine, reduction: str) -> None:
    """https://github.com/ylsung/VL_adapter/issues/8
    https://discuss.pytorch.org/t/training-performance-degrades-with-distributeddataparallel/47152

    Symptom: training is worse than in one process: summed losses are divided by the number of ranks.
    Right: torch's meaning: the mean over ranks of each rank's gradient, whatever its batch.
    """
    sizes = [3, 5]
    layer = nn.Linear(4, 1, bias=False)
    model = engine.wrap(layer)
    xs = [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in sizes]
    getattr(model(xs[dist.get_rank()]), reduction)().backward()
    by_rank = [getattr(x, reduction)(0) for x in xs]
    close(layer.weight.grad[0], (by_rank[0] + by_rank[1]) / 2, reduction)
    if reduction == "sum":  # the joined batch in one process
        close(2 * layer.weight.grad[0], torch.cat(xs).sum(0), "ranks times the gradient of the joined batch")


MODES: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@case(93, "reproducibility", variants={"two_ranks": {}, "four_ranks": {"ranks": 4}})
def reproducibility(engine: Engine) -> None:
    """https://github.com/pytorch/pytorch/issues/36871 https://github.com/pytorch/pytorch/issues/187279
    https://github.com/NVIDIA/nccl/issues/157

    Symptom: runs differ from one another; the bucket layout changes the low bits.
    Right: bit-equal from run to run and on all ranks after every step, in every mode.
    """

    def run(options: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(7)
        model = engine.wrap(nn.Sequential(Reversed(), nn.Linear(6, 6)), **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        for step in range(20):
            optimizer.zero_grad()
            model(rank_data(3, 6, step=step)).square().sum().backward()
            optimizer.step()
            if step < 3 or step == 19:
                assert_bit_equal_on_all_ranks([torch.cat([p.detach().flatten() for p in model.parameters()])], "model")
        return [p.detach().clone() for p in model.parameters()]

    for options in MODES:
        first, second = (run({"bucket_cap_mb": 0.0003, **options}) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b), f"two runs differ with {options}"
    for a, b in zip(first, run({"bucket_cap_mb": 25.0}), strict=True):
        close(a, b, "small and large buckets")


@case(
    99,
    "a new plan while gradients accumulate",
    variants={"views": {"views": True}, "default": {"views": False}, "alone": {"views": True, "ranks": 1}},
)
def rebuild_while_accumulating(engine: Engine, views: bool) -> None:
    """https://github.com/InfiniTensor/InfiniTrain/pull/183

    Symptom: gradients accumulated so far live in the old bucket, and vanish when buckets are made anew.
    Right: what exists is copied; only what is absent may be overwritten.
    """
    for replaced in (False, True):
        pair = pair_of(engine, Reversed, gradient_as_bucket_view=views, bucket_cap_mb=0.0003)
        for step in range(4):
            pair.backward(lambda step=step: rank_data(3, 6, step=step))
            pair.check()
            if replaced and step == 0:
                for model in (pair.wrapped, pair.plain):
                    for p in model.parameters():
                        p.grad = torch.full_like(p, 0.5)
        for step in range(4, 8):
            with contextlib.nullcontext() if step == 7 else pair.wrapped.no_sync():
                pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero(set_to_none=False)
        pair.backward(lambda: rank_data(3, 6, step=8))
        pair.check()


#: Every keyword of the newest torch, with a value that is not its default.
KEYWORDS: dict[str, Any] = {
    "dim": 1,
    "broadcast_buffers": False,
    "init_sync": False,
    "bucket_cap_mb": 1,
    "find_unused_parameters": True,
    "check_reduction": True,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "skip_all_reduce_unused_params": True,
    "bucket_cap_mb_list": [0.0003],
    "batched_grad_copy": True,
    "forward_sync_buffers": False,
    "lazy_bucket_allocation": True,
}
#: Keywords that came after the oldest torch we serve.
NEWER = ("batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation")


@case(
    100,
    "every constructor argument",
    variants={
        "signature": {"how": "signature"},
        "accepted": {"how": "accepted"},
        "short_and_long_cap_lists": {"how": "caps"},
        "skip_same_set": {"how": "same"},
        "skip_changing_set": {"how": "changing"},
        "skip_other_set_on_each_rank": {"how": "other", "own_processes": True},
    },
)
def constructor_arguments(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/pull/151503 https://github.com/pytorch/pytorch/issues/42183
    https://github.com/pytorch/pytorch/pull/169026 https://github.com/pytorch/pytorch/pull/176638
    https://github.com/huggingface/transformers/pull/45519

    Symptom: TypeError for a keyword that the installed torch knows; the skip option desynchronises or hangs.
    Right: all are accepted and do what they say; sets that differ between ranks raise on
    all of them, or give the right means.
    """
    known = engine.signature.parameters
    if how == "signature":
        theirs = inspect.signature(TorchDDP.__init__).parameters
        ours = [name for name in known if name in theirs]
        assert ours == list(theirs), f"missing or in another order: {set(theirs) - set(known)}"
    elif how == "accepted":
        for name, value in KEYWORDS.items():
            if engine.ours or name not in NEWER:
                pair = pair_of(engine, Reversed, **{name: value})
                pair.train(2, lambda step: rank_data(3, 6, step=step))
        pair = pair_of(engine, Reversed, device_mesh=init_device_mesh("cpu", (2,)))
        pair.train(2, lambda step: rank_data(3, 6, step=step))
    elif how == "caps":
        for caps in ([0.0003], [0.0003, 0.0001], [0.0001] * 50):
            pair = pair_of(engine, Reversed, bucket_cap_mb_list=caps)
            sent: list[int] = []

            def hook(
                state: object, bucket: dist.GradBucket, sent: list[int] = sent
            ) -> torch.futures.Future[torch.Tensor]:
                sent.append(bucket.index())
                return allreduce_hook(None, bucket)

            register(pair.wrapped, hook)
            pair.train(3, lambda step: rank_data(3, 6, step=step))
            assert len(set(sent)) > 1, f"{caps} made one bucket"
    else:
        _skip_unused(engine, how)


def _skip_unused(engine: Engine, how: str) -> None:
    options = {"skip_all_reduce_unused_params": True, "find_unused_parameters": True, "bucket_cap_mb": 1e-6}
    pair = pair_of(engine, Branches, **options, **engine.where_offered(stall_threshold=2.0))
    patterns = {
        "same": ["a|a"] * 4,
        "changing": ["ab|ab", "a|a", "b|b", "ab|ab", "|", "b|b"],
        "other": ["a|b", "a|b", "b|a", "a|a", "a|ab"],
    }
    for step, of_ranks in enumerate(patterns[how]):
        branches = of_ranks.split("|")[dist.get_rank()]
        pair.backward(lambda step=step, branches=branches: (rank_data(3, 4, step=step), branches))
        pair.check()
        pair.update()
        pair.zero()
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")
