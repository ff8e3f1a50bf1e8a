"""What scripts and frameworks do with torch's class besides training in a loop."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import lockstep
from models import Branches, Reversed
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data


def _wrap(module: nn.Module, **options) -> lockstep.DistributedDataParallel:
    return lockstep.DistributedDataParallel(module, **options)


# ---- manual finalization ----


def _manual(options: dict) -> None:
    def wrap(module: nn.Module) -> nn.Module:
        model = _wrap(module, bucket_cap_mb=0.0003, **options)
        model.require_manual_backward_finalization = True
        return model

    pair = Pair(Reversed, wrap)
    for step in range(4):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.wrapped.finalize_backward()
        pair.check()
        pair.update()
        pair.zero()
    with pair.wrapped.no_sync():
        pair.backward(lambda: rank_data(3, 6, step=4))
    pair.backward(lambda: rank_data(3, 6, step=5))
    pair.wrapped.finalize_backward()
    pair.check()
    pair.wrapped.require_manual_backward_finalization = False
    pair.zero()
    pair.backward(lambda: rank_data(3, 6, step=6))
    pair.check()


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}],
    ids=["default", "views", "find_unused", "static"],
)
def test_gradients_may_be_finalized_by_hand(ranks, options):
    ranks.run(_manual, options)


def _refused(call: Callable[[], object], *phrases: str) -> None:
    with pytest.raises(RuntimeError) as error:
        call()
    for phrase in phrases:
        assert phrase in str(error.value), str(error.value)


def _manual_errors() -> None:
    model = _wrap(Branches())
    _refused(model.finalize_backward, "manual backward finalization is not required")
    out = model((rank_data(3, 4), "ab")).sum()
    _refused(
        lambda: setattr(model, "require_manual_backward_finalization", True),
        "cannot be called after forward while a backward pass is expected",
    )
    out.backward()

    model.require_manual_backward_finalization = True
    _refused(model.finalize_backward, "no gradient reduction requires finalization")
    out = model((rank_data(3, 4), "ab")).sum()
    _refused(model.finalize_backward, "no gradient reduction requires finalization")
    out.backward()
    _refused(lambda: model((rank_data(3, 4), "ab")), "Expected to have finalized the prior backward pass")
    _refused(lambda: model.register_comm_hook(None, allreduce_hook), "cannot be replaced while a backward pass")
    with torch.no_grad():
        model((rank_data(3, 4), "ab"))
    model.finalize_backward()
    _refused(model.finalize_backward, "no gradient reduction requires finalization")

    model.register_comm_hook(None, allreduce_hook)  # the refused one has left no trace

    # A parameter is missing: refused, but another backward may bring it.
    model((rank_data(3, 4), "a")).sum().backward()
    _refused(model.finalize_backward, "before all DDP buckets were ready. next_bucket_=0 buckets_.size()=1")
    model.module.b(rank_data(3, 4)).sum().backward()
    model.finalize_backward()


def test_finalizing_at_the_wrong_time_is_refused_as_torch_refuses_it(ranks):
    ranks.run(_manual_errors)


def _when_to_finalize(options: dict) -> list[bool]:
    model = _wrap(Reversed(), **options)
    seen = [model.should_finalize_after_backward]
    model.require_manual_backward_finalization = True
    for step in range(3):
        out = model(rank_data(3, 6, step=step)).sum()
        seen.append(model.should_finalize_after_backward)
        out.backward()
        model.finalize_backward()
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [False, True, False, False]),
        ({"static_graph": True}, [False, True, True, False]),
        ({"find_unused_parameters": True}, [False, False, False, False]),
    ],
    ids=["default", "static", "find_unused"],
)
def test_it_says_when_finalizing_at_once_pays(ranks, options, expected):
    assert ranks.run(_when_to_finalize, options) == [expected, expected]


# ---- copies ----


def _pickled(how: str) -> None:
    model = _wrap(Reversed(), static_graph=True, gradient_as_bucket_view=True)
    model(rank_data(3, 6)).sum().backward()
    if how == "deepcopy":
        again = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert type(again) is lockstep.DistributedDataParallel and again.static_graph
    again.zero_grad()
    for step in range(3):
        again(rank_data(3, 6, step=step)).sum().backward()
    assert_bit_equal_on_all_ranks([p.grad for p in again.parameters()], "gradient")


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_wrapped_model_survives_copying(ranks, how):
    ranks.run(_pickled, how)


# ---- ignored and delayed parameters ----


class WithRootParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.layer(x)


def _ignored() -> None:
    module = WithRootParameter()
    lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["scale"])
    model = _wrap(module)
    x = rank_data(3, 2)
    model(x).sum().backward()
    assert torch.equal(module.scale.grad, module.layer(x).sum().detach().reshape(1)), "an ignored one stays local"
    assert_bit_equal_on_all_ranks([module.layer.weight.grad], "gradient")


def test_a_parameter_of_the_root_module_can_be_ignored_by_name(ranks):
    ranks.run(_ignored)


def _delayed() -> None:
    def wrap(module: nn.Module) -> nn.Module:
        # Backward begins with layer 0 and ends with layer 4, whose gradient sets the delayed reduction going.
        delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("layers.0")]
        return _wrap(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.layers[4].weight)

    pair = Pair(Reversed, wrap)
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    with pair.wrapped.no_sync():
        pair.backward(lambda: rank_data(3, 6, step=3))
    for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_delayed_parameters_get_the_mean_at_the_end_of_backward(ranks):
    ranks.run(_delayed)


# ---- fewer bytes ----


def _lazy() -> None:
    pair = Pair(Reversed, lambda module: _wrap(module, lazy_bucket_allocation=True, bucket_cap_mb=0.0003))

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer() / dist.get_world_size(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0])

    for step in range(4):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()
    pair.wrapped.register_comm_hook(None, hook)
    pair.backward(lambda: rank_data(3, 6))
    pair.check()


def test_lazy_buckets_give_the_mean(ranks):
    ranks.run(_lazy)


def _skipped(*usage: str) -> list[int]:
    pair = Pair(
        Branches,
        lambda module: _wrap(
            module, find_unused_parameters=True, skip_all_reduce_unused_params=True, bucket_cap_mb=1e-6
        ),
    )
    sent = []
    for step, of_ranks in enumerate(usage):
        branches = of_ranks.split("|")[dist.get_rank()]
        pair.backward(lambda step=step, branches=branches: (rank_data(3, 4, step=step), branches))
        pair.check()
        pair.zero()
        pair.wrapped.logger.set_runtime_stats_and_log()
        sent.append(pair.wrapped._get_ddp_logging_data()["num_buckets_reduced"])
    return sent


def test_buckets_of_unused_parameters_can_be_left_out(ranks):
    # A bucket is left out when nobody used it in the last step, and comes back in the step that uses it.
    assert ranks.run(_skipped, *[f"{b}|{b}" for b in ["ab", "a", "a", "ab", "b"]]) == [[6, 6, 4, 6, 6]] * 2


def test_ranks_that_leave_out_different_buckets_agree_on_what_to_send(ranks):
    assert ranks.run(_skipped, "a|a", "a|a", "a|b", "a|ab", "a|a", "b|b") == [[6, 4, 6, 6, 6, 6]] * 2


# ---- another group ----


def _new_group() -> None:
    pair = Pair(Reversed, lambda module: _wrap(module, bucket_cap_mb=0.0003))
    for step in range(2):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.zero()
    pair.wrapped._update_process_group(dist.new_group([0, 1]))
    for step in range(3):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        pair.zero()


def test_the_process_group_can_be_exchanged(ranks):
    ranks.run(_new_group)


# ---- buffers by hook ----


def _buffer_hook(location_name: str) -> None:
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = _wrap(module)

    def average(state: object, buffers: dict[str, torch.Tensor]) -> list[torch.futures.Future]:
        works = [dist.all_reduce(b, async_op=True) for b in buffers.values() if b.is_floating_point()]
        return [work.get_future() for work in works]

    model._register_buffer_comm_hook(None, average, getattr(_BufferCommHookLocation, location_name))
    for step in range(2):
        model(rank_data(4, 2, step=step)).sum().backward()
    if location_name == "POST_FORWARD":
        assert_bit_equal_on_all_ranks([module[1].running_mean, module[1].running_var], "buffer")


@pytest.mark.parametrize("location", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_replaces_the_broadcast_and_is_awaited_at_the_end_of_backward(ranks, location):
    ranks.run(_buffer_hook, location)


# ---- optimizers inside backward ----


class _NoStream(contextlib.nullcontext):
    """What torch's hook asks of an accelerator's stream, for tensors on the host."""

    def wait_stream(self, other: object) -> None: ...


def _optimizer_in_backward(views: bool) -> None:
    if torch.accelerator.is_available():
        return _train_with_optimizer_in_backward(views)
    with mock.patch("torch.Stream", _NoStream), mock.patch("torch.accelerator.current_stream", _NoStream):
        _train_with_optimizer_in_backward(views)


def _train_with_optimizer_in_backward(views: bool) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(1)
    module = Reversed()
    reference = copy.deepcopy(module)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = _wrap(module, gradient_as_bucket_view=views)
    plain = _wrap(reference)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        model(rank_data(3, 6, step=step)).sum().backward()
        assert all(p.grad is None for p in module.parameters())
        plain(rank_data(3, 6, step=step)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("views", [False, True], ids=["default", "views"])
def test_optimizers_applied_in_backward_see_the_mean(ranks, views):
    ranks.run(_optimizer_in_backward, views)


def _fused_optimizer() -> None:
    torch.manual_seed(1)
    module = Reversed()
    reference = copy.deepcopy(module)
    model = _wrap(module)
    model._register_fused_optim(torch.optim.SGD, 0.1)
    plain = _wrap(reference)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        for wrapped in (model, plain):
            wrapped.zero_grad()
            wrapped(rank_data(3, 6, step=step)).sum().backward()
        optimizer.step()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_fused_optimizer_steps_as_the_buckets_arrive(ranks):
    ranks.run(_fused_optimizer)
