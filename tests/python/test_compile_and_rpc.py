"""torch.compile around and inside the wrapped model, and distributed autograd, which is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep
from models import Reversed
from oracle import Pair, rank_data


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _compiled(order: str) -> int:
    splits = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        splits.append(graph)
        return graph.forward

    def wrap(module: nn.Module) -> nn.Module:
        if order == "inside":
            return lockstep.DistributedDataParallel(torch.compile(module, backend="aot_eager"))
        return torch.compile(lockstep.DistributedDataParallel(module, bucket_cap_mb=2), backend=backend)

    pair = Pair(Plain, wrap)
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 512, step=step))
        pair.check()
        pair.zero()
    return len(splits)


def test_a_compiled_module_may_be_wrapped(ranks):
    ranks.run(_compiled, "inside", timeout=150)


def test_a_wrapped_module_may_be_compiled_and_is_split_at_its_buckets(ranks):
    # Four layers of a little over 1 MiB. The first bucket closes at 1 MiB and the others at 2: one layer, two, one.
    assert ranks.run(_compiled, "outside", timeout=150) == [3, 3]


def _inductor() -> None:
    def wrap(module: nn.Module) -> nn.Module:
        return torch.compile(lockstep.DistributedDataParallel(module, bucket_cap_mb=2), backend="inductor")

    pair = Pair(Plain, wrap)
    for step in range(2):
        pair.backward(lambda step=step: rank_data(3, 512, step=step))
        pair.check()
        pair.zero()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_wrapped_module_compiled_by_inductor_gives_the_mean(ranks):
    ranks.run(_inductor, timeout=280)


def _python_reducer(compiled_backward: bool) -> None:
    torch._dynamo.config.optimize_ddp = "python_reducer"  # before wrapping
    torch._dynamo.config.compiled_autograd = compiled_backward

    def wrap(module: nn.Module) -> nn.Module:
        return torch.compile(lockstep.DistributedDataParallel(module), backend="aot_eager")

    pair = Pair(Reversed, wrap)
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    with pytest.raises(NotImplementedError, match="mixed_precision does not work together with the Python reducer"):
        lockstep.DistributedDataParallel(Reversed(), mixed_precision=_MixedPrecision(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("compiled_backward", [False, True], ids=["eager_backward", "compiled_autograd"])
def test_the_python_reducer_of_torch_compile_gives_the_mean(broken_ranks, compiled_backward):
    broken_ranks.run(_python_reducer, compiled_backward, timeout=280)


def _rpc(folder: str) -> str:
    from torch.distributed import autograd as dist_autograd
    from torch.distributed import rpc

    rank, size = dist.get_rank(), dist.get_world_size()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=20)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    try:
        model = lockstep.DistributedDataParallel(Reversed())
        with dist_autograd.context() as context, pytest.raises(RuntimeError) as error:
            dist_autograd.backward(context, [model(rank_data(3, 6)).sum()])
        return str(error.value)
    finally:
        rpc.shutdown()


def test_distributed_autograd_is_refused_with_the_way_out(broken_ranks, tmp_path):
    for text in broken_ranks.run(_rpc, str(tmp_path), timeout=60):
        assert "torch.distributed.autograd" in text and "Use torch's own class" in text
