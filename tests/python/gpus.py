"""Ranks on GPUs, in an NCCL group: each on its own, or all on one where there is only one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from oracle import Pair, mean_over_ranks, rank_data
from ranks import GROUP_TIMEOUT

#: Skips where nothing of this can run.
NEEDS_GPU = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not lockstep.build_info()["cuda"], reason="this build of lockstep has no CUDA engine"),
]

#: Arguments of the wrapper for each mode that every test of values goes through.
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "find_unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0001},
    "static": {"static_graph": True},
}


#: What carries the collectives: arguments of the wrapper, too.
COMMUNICATORS = ["auto", "nccl"]


class Deep(nn.Module):
    """Layers for several buckets."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


def join_nccl(rank: int, world_size: int, store: str, timeout: float = 3 * GROUP_TIMEOUT) -> None:
    """Become one rank of an NCCL group. Ranks that share a GPU pretend to be hosts of their own, else NCCL refuses."""
    torch.set_num_threads(1)
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    if torch.cuda.device_count() < world_size:
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )


def on_gpu(*shape: int, step: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return rank_data(*shape, step=step, dtype=dtype).cuda()


def pair_on_gpu(make: Any, dtype: torch.dtype | None = None, **options: Any) -> Pair:
    """A wrapped model and a plain copy, both on this rank's GPU."""
    return Pair(lambda: make().cuda().to(dtype), lambda module: lockstep.DistributedDataParallel(module, **options))


def check(pair: Pair) -> None:
    """Like ``Pair.check``, with collectives that NCCL has, and with strides."""
    for (name, plain), wrapped in zip(pair.plain.named_parameters(), pair.wrapped.parameters(), strict=True):
        users = torch.tensor(float(plain.grad is not None), device="cuda")
        dist.all_reduce(users)
        if users == 0:
            assert wrapped.grad is None, f"{name} is used nowhere, but has a gradient"
            continue
        local = torch.zeros_like(plain) if plain.grad is None else plain.grad
        expected = mean_over_ranks(local)
        assert wrapped.grad is not None, f"{name} has no gradient"
        torch.testing.assert_close(wrapped.grad, expected, msg=lambda text, name=name: f"{name}: {text}")
        if plain.grad is not None and not plain.grad.is_sparse:
            assert wrapped.grad.stride() == plain.grad.stride(), name
        same = torch.stack([wrapped.grad.abs().double().sum()] * 2)
        dist.all_reduce(same[:1], dist.ReduceOp.MAX)
        dist.all_reduce(same[1:], dist.ReduceOp.MIN)
        assert same[0] == same[1], f"{name} differs between ranks"


def checked_steps(pair: Pair, make_input: Callable[[int], Any], steps: int = 3) -> None:
    """``steps`` backwards on what ``make_input(step)`` gives, each checked."""
    for step in range(steps):
        pair.backward(functools.partial(make_input, step))
        check(pair)
        pair.zero()
