"""Bad input: the same kind of exception as torch's engine raises, on every rank, and a text that says what to do."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep
from models import Branches
from oracle import rank_data

#: Torch takes this, or fails in a way no program can catch: only ours refuses, with the given kind.
UNCHECKED = object()


class Case(NamedTuple):
    call: Callable[[type], Any]  # gets the class and does something wrong
    phrases: tuple[str, ...] = ()  # that our text must contain
    ours: type[BaseException] | None = None  # where it is not torch's kind
    torch: object = None  # UNCHECKED, or None: raises


def _wrap(**options: Any) -> Callable[[type], Any]:
    return lambda cls: cls(nn.Linear(2, 2), **options)


def _call(method: str, *args: Any, **kwargs: Any) -> Callable[[type], Any]:
    return lambda cls: getattr(cls(nn.Linear(2, 2)), method)(*args, **kwargs)


def _frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


def _all_ignored(cls: type) -> None:
    module = nn.Linear(2, 2)
    TorchDDP._set_params_and_buffers_to_ignore_for_model(module, ["weight", "bias"])
    cls(module)


def _two_device_types(cls: type) -> None:
    cls(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape)


NO_GRADIENT = "doesn't have any parameter that requires a gradient"
NOT_FOR_CPU = "device_ids and output_device arguments only work with"

CONSTRUCTOR = {
    "module_is_none": Case(lambda cls: cls(None), ("torch.nn.Module", "None")),
    "module_is_a_tensor": Case(lambda cls: cls(torch.ones(2)), ("torch.nn.Module", "Tensor")),
    "module_frozen": Case(lambda cls: cls(_frozen()), (NO_GRADIENT,)),
    "module_without_parameters": Case(lambda cls: cls(nn.ReLU()), (NO_GRADIENT,)),
    "module_all_ignored": Case(_all_ignored, (NO_GRADIENT,)),
    "module_uninitialized": Case(lambda cls: cls(nn.LazyLinear(2)), ("Run a dummy forward pass",)),
    "module_on_two_device_types": Case(_two_device_types, ("must be on the same type of devices", "cpu", "meta")),
    "device_ids_two": Case(_wrap(device_ids=[0, 1]), ("device_ids can only be None or contain a single element",)),
    "device_ids_for_cpu": Case(_wrap(device_ids=[0]), (NOT_FOR_CPU, "weight", "leave device_ids out")),
    "device_ids_number": Case(_wrap(device_ids=1), ("device_ids is a list", "1")),
    "output_device_for_cpu": Case(_wrap(output_device=1), (NOT_FOR_CPU,)),
    "process_group_and_mesh": Case(
        lambda cls: cls(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=_mesh(2)),
        ("Cannot specify both process_group and device_mesh",),
    ),
    "process_group_is_a_name": Case(_wrap(process_group="gloo"), ("process group", "'gloo'")),
    "process_group_without_this_rank": Case(
        lambda cls: cls(nn.Linear(2, 2), process_group=_group_of_the_other()), ("process group", "new_group")
    ),
    "mesh_of_two_dimensions": Case(
        lambda cls: cls(nn.Linear(2, 2), device_mesh=_mesh(1, 2)), ("Only 1D device mesh is supported",)
    ),
    "mesh_is_a_list": Case(_wrap(device_mesh=[0, 1]), ("device_mesh", "[0, 1]")),
    # Torch 2.11 says so by an assertion, and takes 0 from 2.12 on; all versions take a negative size.
    "bucket_cap_zero": Case(_wrap(bucket_cap_mb=0), ("bucket_cap_mb", "positive"), ValueError, UNCHECKED),
    "bucket_cap_negative": Case(_wrap(bucket_cap_mb=-1), ("bucket_cap_mb", "-1"), ValueError, UNCHECKED),
    "bucket_cap_nan": Case(_wrap(bucket_cap_mb=float("nan")), ("bucket_cap_mb", "nan")),
    "bucket_cap_infinite": Case(_wrap(bucket_cap_mb=float("inf")), ("bucket_cap_mb", "inf")),
    "bucket_cap_list": Case(_wrap(bucket_cap_mb=[25]), ("bucket_cap_mb", "[25]")),
    "bucket_cap_list_zero": Case(_wrap(bucket_cap_mb_list=[1, 0]), ("bucket_cap_mb_list",), ValueError, UNCHECKED),
    "bucket_cap_list_number": Case(_wrap(bucket_cap_mb_list=25), ("bucket_cap_mb_list", "25")),
    "delayed_without_a_trigger": Case(
        _wrap(delay_all_reduce_named_params=[]), ("need to be set at the same time", "param_to_hook_all_reduce")
    ),
    "trigger_without_delayed": Case(
        _wrap(param_to_hook_all_reduce=nn.Parameter(torch.ones(1))), ("need to be set at the same time",)
    ),
    "delayed_without_names": Case(
        _wrap(delay_all_reduce_named_params=[1], param_to_hook_all_reduce=nn.Parameter(torch.ones(1))),
        ("delay_all_reduce_named_params", "(name, parameter)"),
    ),
    "trigger_is_a_name": Case(
        lambda cls: cls(
            layer := nn.Linear(2, 2),
            delay_all_reduce_named_params=[("bias", layer.bias)],
            param_to_hook_all_reduce="weight",
        ),
        ("param_to_hook_all_reduce", "'weight'"),
    ),
    "mixed_precision_is_a_dtype": Case(_wrap(mixed_precision=torch.float16), ("mixed_precision", "LS-102")),
    "mixed_precision_of_a_name": Case(_wrap(mixed_precision=_MixedPrecision("fp16")), ("param_dtype", "'fp16'")),
    "mixed_precision_of_integers": Case(
        _wrap(mixed_precision=_MixedPrecision(torch.int8)), ("param_dtype", "torch.int8", "floating point")
    ),
    "unknown_keyword": Case(_wrap(bucket_cap=25), ("bucket_cap",)),
}


def _group_of_the_other() -> Any:
    groups = [dist.new_group([rank]) for rank in range(2)]
    return groups[1 - dist.get_rank()]


def _wrong_bucket(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("never called")


def _wrong_return(state: object, bucket: dist.GradBucket) -> int:
    raise AssertionError("never called")


def _no_bucket(state: object, gradients: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("never called")


# Without annotations, which are text in this file: torch's class refuses those before it calls the hook.
def _answers_a_tensor(state, bucket):
    return bucket.buffer()


def _answers_nothing(state, bucket):
    return None


def _hook_twice(cls: type) -> None:
    model = cls(nn.Linear(2, 2))
    model.register_comm_hook(None, allreduce_hook)
    model.register_comm_hook(None, allreduce_hook)


def _builtin_after_hook(cls: type) -> None:
    model = cls(nn.Linear(2, 2))
    model.register_comm_hook(None, allreduce_hook)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def _step_with(hook: Callable) -> Callable[[type], None]:
    def call(cls: type) -> None:
        model = cls(nn.Linear(2, 2))
        model.register_comm_hook(None, hook)
        model(rank_data(1, 2)).sum().backward()

    return call


def _static_too_late(cls: type) -> None:
    model = cls(nn.Linear(2, 2))
    model(rank_data(1, 2)).sum().backward()
    model._set_static_graph()


def _other_group_pickled(cls: type) -> None:
    pickle.dumps(cls(nn.Linear(2, 2), process_group=dist.new_group([0, 1])))


def _unfinished(cls: type) -> None:
    model = cls(Branches())
    for _ in range(2):
        model((rank_data(1, 4), "a")).sum().backward()


def _unfinished_and_checked(cls: type) -> None:
    model = cls(Branches())
    model((rank_data(1, 4), "a")).sum().backward()
    model._check_reducer_finalized()


METHODS = {
    "hook_not_callable": Case(_call("register_comm_hook", None, 1), ("must be callable",)),
    "hook_bucket_annotation": Case(_call("register_comm_hook", None, _wrong_bucket), ("should be dist.GradBucket",)),
    "hook_return_annotation": Case(_call("register_comm_hook", None, _wrong_return), ("torch.futures.Future",)),
    "hook_without_bucket": Case(_call("register_comm_hook", None, _no_bucket), ("bucket", "gradients")),
    "hook_twice": Case(_hook_twice, ("can only be called once", "allreduce_hook")),
    "builtin_after_hook": Case(_builtin_after_hook, ("can only be called once", "allreduce_hook")),
    "builtin_by_name": Case(_call("_register_builtin_comm_hook", "ALLREDUCE"), ("BuiltinCommHookType", "'ALLREDUCE'")),
    "hook_answers_a_tensor": Case(_step_with(_answers_a_tensor), ("_answers_a_tensor", "Future")),
    "hook_answers_nothing": Case(_step_with(_answers_nothing), ("_answers_nothing", "None"), RuntimeError, UNCHECKED),
    "fused_optimizer_of_no_kind": Case(_call("_register_fused_optim", nn.Linear, 0.1)),
    "buffer_hook_not_callable": Case(_call("_register_buffer_comm_hook", None, 1), ("callable",)),
    "sparse_indices": Case(
        _call("_set_sparse_metadata", {}), ("finds the indices", "Remove the call"), NotImplementedError, UNCHECKED
    ),
    "sample_rate_zero": Case(_call("_set_ddp_runtime_logging_sample_rate", 0), ("equal or greater than 1", "0")),
    "sample_rate_a_name": Case(_call("_set_ddp_runtime_logging_sample_rate", "often")),
    "static_graph_too_late": Case(_static_too_late, ("before training loop starts",)),
    "group_is_none": Case(_call("_update_process_group", None), ("process group", "None"), TypeError, UNCHECKED),
    "group_is_a_name": Case(_call("_update_process_group", "gloo"), ("process group", "'gloo'")),
    "pickled_with_a_group_of_its_own": Case(_other_group_pickled, ("default process group", ".module")),
    "unfinished": Case(_unfinished, ("Expected to have finished reduction in the prior iteration", "b.weight")),
    "unfinished_and_checked": Case(_unfinished_and_checked, ("Expected to have finished reduction", "b.weight")),
    "join_of_an_unknown_option": Case(_call("join", divide_by=2), ("divide_by",)),
    "no_sync_with_an_argument": Case(_call("no_sync", True)),
}


def _of_reducer(method: str, *args: Any) -> Callable[[type], Any]:
    return lambda cls: getattr(cls(nn.Linear(2, 2)).reducer, method)(*args)


REDUCER = {
    "prepare_for_backward_a_name": Case(_of_reducer("prepare_for_backward", "loss")),
    "prepare_for_backward_nothing": Case(_of_reducer("prepare_for_backward", None)),
    "autograd_hook_beyond": Case(
        _of_reducer("_autograd_hook", 2), ("no parameter 2", "2 parameters"), IndexError, UNCHECKED
    ),
    "autograd_hook_negative": Case(_of_reducer("_autograd_hook", -1), (), TypeError, UNCHECKED),
}


def _own(*phrases: str, kind: type[BaseException] = ValueError, **options: Any) -> Case:
    """A keyword that torch does not have."""
    return Case(_wrap(**options), phrases, kind, UNCHECKED)


OWN_KEYWORDS = {
    "stall_threshold_negative": _own("stall_threshold", "-1", "LS-114", stall_threshold=-1),
    "stall_threshold_nan": _own("stall_threshold", "nan", stall_threshold=float("nan")),
    "check_sync_every_negative": _own("check_sync_every", "-1", check_sync_every=-1),
    "communicator_unknown": _own("communicator", "'nvlink'", "'group'", communicator="nvlink"),
    "nccl_for_cpu": _own("communicator='nccl'", "'cpu'", "LS-036", kind=RuntimeError, communicator="nccl"),
    "nccl_with_settings_for_cpu": _own("'cpu'", "LS-036", kind=RuntimeError, communicator=lockstep.Nccl(max_ctas=4)),
    "nccl_size_negative": Case(lambda cls: lockstep.Nccl(in_place_mb=-1), ("in_place_mb", "-1"), ValueError, UNCHECKED),
    "nccl_blocks_negative": Case(lambda cls: lockstep.Nccl(max_ctas=-1), ("max_ctas", "-1"), ValueError, UNCHECKED),
    "nccl_net_a_number": Case(lambda cls: lockstep.Nccl(net_name=1), ("net_name", "'Socket'"), ValueError, UNCHECKED),
}

CASES = {**CONSTRUCTOR, **METHODS, **REDUCER, **OWN_KEYWORDS}


def _raised(name: str, cls: type) -> tuple[type[BaseException] | None, str]:
    try:
        CASES[name].call(cls)
    except BaseException as error:
        return type(error), str(error)
    return None, ""


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_on_every_rank_as_torch_refuses_it(ranks, name):
    case = CASES[name]
    ours = ranks.run(_raised, name, lockstep.DistributedDataParallel)
    if case.torch is UNCHECKED:
        expected = [case.ours] * 2
    else:
        expected = [kind for kind, _ in ranks.run(_raised, name, TorchDDP)]
        assert None not in expected, "torch takes it"
    assert [kind for kind, _ in ours] == expected, ours
    for _, text in ours:
        for phrase in case.phrases:
            assert phrase in text, text
    ranks.run(dist.barrier)  # the group is still of use


def test_without_a_process_group_it_says_how_to_get_one():
    kinds = []
    for cls in (lockstep.DistributedDataParallel, TorchDDP):
        with pytest.raises((RuntimeError, ValueError), match="init_process_group") as error:
            cls(nn.Linear(2, 2))
        kinds.append(error.type)
    assert kinds[0] is kinds[1]
