"""A stand-in: class, state dicts, install, and the cost of one step."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from oracle import rank_data


def test_the_class_is_a_torch_ddp():
    assert issubclass(lockstep.DistributedDataParallel, TorchDDP)


def _state_dicts() -> None:
    ours = lockstep.DistributedDataParallel(nn.Linear(3, 3))
    theirs = TorchDDP(nn.Linear(3, 3))
    assert list(ours.state_dict()) == list(theirs.state_dict()) == ["module.weight", "module.bias"]
    with torch.no_grad():
        ours.module.weight.fill_(1.0)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.module.weight, torch.ones(3, 3))
    with torch.no_grad():
        theirs.module.weight.fill_(2.0)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.module.weight, torch.full((3, 3), 2.0))


def test_state_dicts_go_back_and_forth_between_the_engines(ranks):
    ranks.run(_state_dicts)


def test_install_replaces_torchs_class_everywhere_and_uninstall_puts_it_back():
    script = textwrap.dedent("""
        import torch.nn.parallel.distributed as home
        from torch.nn.parallel import DistributedDataParallel as imported_before
        import lockstep
        theirs = home.DistributedDataParallel
        lockstep.install()
        lockstep.install()
        import torch
        assert torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
        assert home.DistributedDataParallel is imported_before is lockstep.DistributedDataParallel
        from torch.nn.parallel import DistributedDataParallel as imported_after
        assert imported_after is lockstep.DistributedDataParallel
        lockstep.uninstall()
        assert torch.nn.parallel.DistributedDataParallel is home.DistributedDataParallel is imported_before is theirs
        assert issubclass(lockstep.DistributedDataParallel, theirs)
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_no_thread_of_the_group_outlives_it_after_a_model_was_wrapped():
    script = textwrap.dedent("""
        import gc, os
        import lockstep
        import torch, torch.distributed as dist

        def gloo_threads():
            names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
            return sum("gloo" in name for name in names)

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = lockstep.DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        assert gloo_threads() > 0, "the names of gloo's threads have changed"
        del model
        dist.destroy_process_group()
        gc.collect()
        assert gloo_threads() == 0
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_build_info_says_what_it_was_built_with():
    info = lockstep.build_info()
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["compiler"] and set(info) >= {"lockstep", "torch", "cuda", "nccl", "compiler"}
    assert info["lockstep"] == lockstep.__version__


def test_a_build_for_another_torch_is_refused_before_it_can_crash():
    script = textwrap.dedent("""
        import sys, types
        import torch
        torch.__version__ = "2.99.0"
        try:
            import lockstep
        except ImportError as error:
            text = str(error)
            assert "2.99.0" in text and "built for torch" in text and "pip install" in text, text
        else:
            raise SystemExit("imported")
        assert "lockstep._C" not in sys.modules
    """)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class Many(nn.Module):
    """``count`` scalars that all get their gradient from one node."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scalars = nn.ParameterList(nn.Parameter(torch.ones(8)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Scale.apply(x, *self.scalars)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *scalars):
        ctx.count = len(scalars)
        return x * scalars[0]

    @staticmethod
    def backward(ctx, grad):
        return None, *(grad.clone() for _ in range(ctx.count))


def _operators(count: int, cls: type, options: dict) -> int:
    """Operators dispatched by the engine in one step: those of the wrapped model above those of the bare one."""

    def in_a_step(model: nn.Module) -> int:
        for step in range(3):
            model.zero_grad()
            model(rank_data(8, step=step)).sum().backward()
        model.zero_grad()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(rank_data(8)).sum().backward()
        return len([event for event in profile.events() if event.name.startswith(("aten::", "c10d::"))])

    return in_a_step(cls(Many(count), **options)) - in_a_step(Many(count))


def _count(options: dict) -> tuple[int, int, int]:
    ours = [_operators(count, lockstep.DistributedDataParallel, options) for count in (10, 200)]
    return *ours, _operators(200, TorchDDP, options) - _operators(10, TorchDDP, options)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["default", "views"])
def test_operators_in_a_step_grow_with_buckets_and_not_with_parameters(ranks, options):
    for few, many, growth_of_torch in ranks.run(_count, options):
        assert few == many, "one more operator for some parameters"
        assert growth_of_torch >= 190, "the measure does not see operators per parameter"


@pytest.mark.parametrize("caps", [1, 4])
def test_operators_in_a_step_grow_with_the_number_of_buckets(ranks, caps):
    # 200 parameters of 32 bytes; the limit is reached by `200 / caps` of them.
    cap = 200 * 32 / caps / 2**20
    for operators, one_bucket in ranks.run(_count_buckets, cap):
        assert (operators - one_bucket) % (caps - 1 or 1) == 0
        assert (operators > one_bucket) == (caps > 1)


def _count_buckets(cap: float) -> tuple[int, int]:
    cls = lockstep.DistributedDataParallel
    return _operators(200, cls, {"bucket_cap_mb": cap}), _operators(200, cls, {"bucket_cap_mb": 25})
