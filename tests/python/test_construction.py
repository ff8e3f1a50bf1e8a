"""What construction checks and copies, and what it says when ranks or arguments do not fit."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from oracle import assert_bit_equal_on_all_ranks, rank_data
from ranks import GROUP_TIMEOUT

#: In seconds: how soon every rank must raise when ranks wrap different models.
SOON = 10


def _named(**layers: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, layer in layers.items():
        module.add_module(name, layer)
    return module


def _frozen(layer: nn.Module, name: str) -> nn.Module:
    getattr(layer, name).requires_grad_(False)
    return layer


#: What rank 0 and rank 1 wrap, and what the message must contain.
DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], list[str]]] = {
    "count": (
        lambda: _named(a=nn.Linear(2, 2)),
        lambda: _named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
        ["expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 4", "'b.weight'"],
    ),
    "frozen": (
        lambda: _named(a=nn.Linear(2, 2)),
        lambda: _named(a=_frozen(nn.Linear(2, 2), "bias")),
        ["Rank 0 has 2 params, while rank 1 has inconsistent 1", "'a.bias'"],
    ),
    "shape": (
        lambda: _named(a=nn.Linear(2, 2), b=nn.Linear(2, 3)),
        lambda: _named(a=nn.Linear(2, 2), b=nn.Linear(2, 4)),
        ["parameter 2 on rank 1", "appears not to match", "'b.weight' size [3, 2]", "'b.weight' size [4, 2]"],
    ),
    "strides": (
        lambda: _named(a=nn.Conv2d(2, 2, 3)),
        lambda: _named(a=nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)),
        ["appears not to match", "'a.weight'", "stride"],
    ),
    "dtype": (
        lambda: _named(a=nn.Linear(2, 2)),
        lambda: _named(a=nn.Linear(2, 2, dtype=torch.float64)),
        ["appears not to match", "Float on cpu", "Double on cpu"],
    ),
    "order": (
        lambda: _named(a=nn.Linear(2, 2), b=nn.Linear(2, 2)),
        lambda: _named(b=nn.Linear(2, 2), a=nn.Linear(2, 2)),
        ["appears not to match", "rank 0 has 'a.weight'", "rank 1 has 'b.weight'"],
    ),
}


def _wrap_different(case: str) -> tuple[str, float]:
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        lockstep.DistributedDataParallel(DIFFERENT[case][dist.get_rank() != 0]())
    seconds = time.monotonic() - begin
    dist.barrier()  # the group is still of use
    return str(error.value), seconds


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_models_are_an_error_on_every_rank_that_names_the_difference(two_or_three_ranks, case):
    for rank, (text, seconds) in enumerate(two_or_three_ranks.run(_wrap_different, case)):
        assert seconds < SOON and text.startswith(f"[rank {rank}]")
        for phrase in DIFFERENT[case][2]:
            assert phrase in text, text


def _one_missing() -> tuple[str, float]:
    if dist.get_rank() == 1:
        return "", 0.0
    begin = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        lockstep.DistributedDataParallel(nn.Linear(2, 2))
    return str(error.value), time.monotonic() - begin


def test_a_rank_that_does_not_come_is_an_error_after_the_groups_timeout(broken_ranks):
    text, seconds = broken_ranks.run(_one_missing)[0]
    # The timeout, 4.5 s in which the monitor looks for a rank that died, and room for a busy machine.
    assert text and seconds < 3 * GROUP_TIMEOUT


def _initial_state(options: dict, buffers_equal: bool) -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(3, 3, dtype=torch.cfloat), nn.Linear(3, 3).half(), nn.BatchNorm1d(3))
    module[1].weight.requires_grad_(False)
    module[2].register_buffer("flags", torch.tensor([dist.get_rank() == 0, True]))
    module[2].register_buffer("big", torch.tensor(2**60 + dist.get_rank()))
    model = lockstep.DistributedDataParallel(module, **options)
    assert_bit_equal_on_all_ranks(model.parameters(), "parameter")
    if buffers_equal:
        assert_bit_equal_on_all_ranks(model.buffers(), "buffer")
    else:
        assert module[2].big == 2**60 + dist.get_rank()


def test_all_ranks_start_from_the_state_of_rank_zero(two_or_three_ranks):
    two_or_three_ranks.run(_initial_state, {}, True)


def test_broadcast_buffers_false_leaves_buffers_alone_as_in_torch(ranks):
    ranks.run(_initial_state, {"broadcast_buffers": False}, False)


def _no_initial_sync() -> None:
    torch.manual_seed(dist.get_rank())
    module = nn.Linear(3, 3)
    before = module.weight.detach().clone()
    lockstep.DistributedDataParallel(module, init_sync=False)
    assert torch.equal(module.weight, before)


def test_init_sync_false_copies_nothing(ranks):
    ranks.run(_no_initial_sync)


def _buffers_each_forward(options: dict) -> list[float]:
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.zeros(1))
    model = lockstep.DistributedDataParallel(module, **options)
    seen = []
    for _ in range(2):
        module.count = torch.full((1,), float(10 + dist.get_rank()))  # re-assigned, not written in place
        model(rank_data(1, 2)).sum().backward()
        seen.append(module.count.item())
    return seen


def test_buffers_are_those_of_rank_zero_in_each_forward(ranks):
    assert ranks.run(_buffers_each_forward, {}) == [[10.0, 10.0], [10.0, 10.0]]


def test_buffers_stay_local_with_forward_sync_buffers_false_on_every_torch_version(ranks):
    assert ranks.run(_buffers_each_forward, {"forward_sync_buffers": False}) == [[10.0, 10.0], [11.0, 11.0]]


def _bad_arguments() -> None:
    layer = nn.Linear(2, 2)
    for cap in (0, -1, -0.5):
        with pytest.raises(ValueError, match="bucket_cap_mb is the size of a bucket in MiB and must be positive"):
            lockstep.DistributedDataParallel(layer, bucket_cap_mb=cap)
    with pytest.raises(ValueError, match="bucket_cap_mb_list"):
        lockstep.DistributedDataParallel(layer, bucket_cap_mb_list=[1, 0])
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        lockstep.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        lockstep.DistributedDataParallel(nn.ReLU())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        lockstep.DistributedDataParallel(layer, process_group=dist.group.WORLD, device_mesh=mesh)
    with pytest.raises(ValueError, match="device_ids"):
        lockstep.DistributedDataParallel(layer, device_ids=[0, 1])
    with pytest.raises(RuntimeError, match=r"parameters are on 'meta', but this build of lockstep serves cpu"):
        lockstep.DistributedDataParallel(nn.Linear(2, 2, device="meta"))
    with pytest.raises(RuntimeError, match="uninitialized parameters"):
        lockstep.DistributedDataParallel(nn.LazyLinear(3))


def test_arguments_that_make_no_sense_are_refused_as_torch_refuses_them(ranks):
    ranks.run(_bad_arguments)


def test_every_keyword_of_the_installed_torch_is_accepted():
    ours = inspect.signature(lockstep.DistributedDataParallel.__init__).parameters
    theirs = inspect.signature(TorchDDP.__init__).parameters
    assert list(ours)[: len(theirs)] == list(theirs)


def _mesh() -> None:
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (2,)))
    model(rank_data(1, 2)).sum().backward()
    assert_bit_equal_on_all_ranks([p.grad for p in model.parameters()], "gradient")


def test_a_one_dimensional_device_mesh_gives_the_group(ranks):
    ranks.run(_mesh)


def _subset() -> tuple[float, float]:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mine = pairs[0] if dist.get_rank() == 0 else pairs[1]
    grads = []
    for group in (mine, alone):
        if dist.get_rank() == 1 and group is mine:
            # The rank in the middle takes part in both pairs.
            first = _gradient(pairs[0])
            grads.append(first + _gradient(pairs[1]))
        else:
            grads.append(_gradient(group))
    return tuple(grads)


def _gradient(group: dist.ProcessGroup) -> float:
    layer = nn.Linear(1, 1, bias=False)
    model = lockstep.DistributedDataParallel(layer, process_group=group)
    model(torch.full((1, 1), float(10 ** dist.get_rank()))).sum().backward()
    return layer.weight.grad.item()


def test_a_subset_of_ranks_averages_among_itself(pool_of):
    # Inputs are 1, 10 and 100: the gradient of rank r is 10 ** r.
    assert pool_of(3).run(_subset) == [(5.5, 1.0), (5.5 + 55.0, 10.0), (55.0, 100.0)]


def test_a_group_of_the_fake_backend_serves(tmp_path):
    script = """
        import torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        import lockstep
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        layer = torch.nn.Linear(1, 1, bias=False)
        model = lockstep.DistributedDataParallel(layer)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((1, 1), 8.0)).sum().backward()
        assert layer.weight.grad.item() == 2.0, layer.weight.grad  # nobody adds anything to our quarter
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
