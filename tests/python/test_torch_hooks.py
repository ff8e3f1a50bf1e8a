"""Torch's own hook library, unchanged, on our engine. Its quantization hooks need CUDA tensors on any engine."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from models import Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data


def _hook(name: str) -> tuple[object, object]:
    """State and function of one hook."""
    group = dist.group.WORLD
    if name == "post_local_sgd":
        # Local steps from the third on, without a subgroup.
        state = post_localSGD_hook.PostLocalSGDState(group, None, 2, post_local_gradient_allreduce=False)
        return state, post_localSGD_hook.post_localSGD_hook
    if name == "powersgd_rank_2":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        return state, powerSGD_hook.powerSGD_hook
    if name == "fp16_wrapped_powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        return state, default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    hooks = {
        "noop": debugging_hooks.noop_hook,
        "bf16_wrapper": default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
    }
    return group, hooks[name]


def _train(cls: type, name: str, options: dict) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = cls(Reversed(), **options)
    model.register_comm_hook(*_hook(name), **({} if cls is TorchDDP else {"native": False}))
    averager = PeriodicModelAverager(period=1, warmup_steps=2) if name == "post_local_sgd" else None
    grads = []
    for step in range(5):
        model.zero_grad()
        model(rank_data(3, 6, step=step)).square().sum().backward()
        grads += [p.grad.clone() for p in model.parameters()]
        if averager is not None:
            averager.average_parameters(model.parameters())
    return grads


def _like_torch(name: str, options: dict) -> None:
    ours, theirs = (_train(cls, name, options) for cls in (lockstep.DistributedDataParallel, TorchDDP))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("views", [False, True], ids=["default", "views"])
@pytest.mark.parametrize(
    "name",
    [
        "noop",
        "bf16_wrapper",
        "post_local_sgd",
        "powersgd_rank_2",
        "fp16_wrapped_powersgd",
    ],
)
def test_a_hook_of_torch_gives_bit_for_bit_what_it_gives_on_torchs_engine(ranks, name, views):
    ranks.run(_like_torch, name, {"gradient_as_bucket_view": views})


def _overflow(hook_name: str, value: float) -> list[float]:
    """The mean of `value` over ranks, as a half-precision hook sees it."""
    layer = torch.nn.Linear(1, 1, bias=False)
    model = lockstep.DistributedDataParallel(layer)
    model.register_comm_hook(None, getattr(default_hooks, hook_name))
    model(torch.full((1, 1), value)).sum().backward()
    assert_bit_equal_on_all_ranks([layer.weight.grad], "gradient")
    return layer.weight.grad.flatten().tolist()


def test_overflow_in_fp16_reaches_every_rank_as_infinity_and_bf16_keeps_the_range(ranks):
    assert ranks.run(_overflow, "fp16_compress_hook", 70000.0) == [[float("inf")]] * 2  # above 65504, before dividing
    assert ranks.run(_overflow, "bf16_compress_hook", 65536.0) == [[65536.0]] * 2
