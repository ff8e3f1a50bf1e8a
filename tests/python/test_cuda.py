"""The engine on two GPUs and NCCL, against the plain oracle. Skipped where there are fewer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not lockstep.build_info()["cuda"], reason="this build of lockstep has no CUDA engine"),
]


class Net(nn.Module):
    """Convolution in channels-last order, batch norm, and a branch that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)
        self.extra = nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, arguments: tuple[torch.Tensor, bool]) -> torch.Tensor:
        x, extra = arguments
        x = self.norm(self.conv(x.to(memory_format=torch.channels_last))).mean((2, 3))
        return self.head(x) + (self.extra(x) if extra else 0)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True},
    "small_buckets": {"bucket_cap_mb": 0.0001},
    "find_unused": {"find_unused_parameters": True, "bucket_cap_mb": 0.0001},
    "static": {"static_graph": True},
}


def _rank(rank: int, store: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    pair = Pair(
        lambda: Net().cuda(rank).to(dtype),
        lambda module: lockstep.DistributedDataParallel(module, device_ids=[rank], **options),
    )
    unused = options.get("find_unused_parameters", False)
    for step in range(4):
        data = rank_data(4, 3, 8, 8, step=step).cuda(rank).to(dtype)
        pair.backward(lambda data=data, step=step: (data, not (unused and step % 2)))
        for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
            if theirs.grad is None:
                assert ours.grad is None
                continue
            mean = theirs.grad.double()
            dist.all_reduce(mean)
            torch.testing.assert_close(ours.grad, (mean / 2).to(dtype))
            assert ours.grad.stride() == theirs.grad.stride()
        grads = [p.grad for p in pair.wrapped.parameters()]
        assert_bit_equal_on_all_ranks([None if g is None else g.cpu() for g in grads], "gradient")
        pair.zero()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_mean_of_the_gradients(tmp_path: Path, mode: str, dtype: torch.dtype) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path / "store"), MODES[mode], dtype), nprocs=2)
