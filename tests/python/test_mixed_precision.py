"""Native mixed precision (torch's `_MixedPrecision`): values against a plain copy that casts by hand."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import lockstep
from models import Branches, Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data

HALF = _MixedPrecision(torch.float16, torch.float16, torch.float16)


def _reference_grads(plain: nn.Module, inputs, config: _MixedPrecision) -> dict[str, torch.Tensor | None]:
    """Mean gradients by hand: cast parameters and inputs, then one plain all-reduce for each gradient."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(config.param_dtype) if x.is_floating_point() and config.param_dtype else x

    arguments = (cast(inputs[0]), inputs[1]) if isinstance(inputs, tuple) else cast(inputs)
    low = {name: cast(p) for name, p in plain.named_parameters()}
    functional_call(plain, low, (arguments,)).float().square().sum().backward()
    wire = config.reduce_dtype or config.param_dtype or torch.float32
    means = {}
    for name, p in plain.named_parameters():
        absent = torch.tensor(float(p.grad is None))
        dist.all_reduce(absent)
        if absent == dist.get_world_size():
            means[name] = None
            continue
        mean = (torch.zeros_like(p) if p.grad is None else p.grad).to(wire) / dist.get_world_size()
        dist.all_reduce(mean)
        means[name] = mean.to(p.dtype)
        p.grad = None
    return means


def _train(make: Callable[[], nn.Module], make_input, config: _MixedPrecision, options: dict, to_none: bool) -> None:
    torch.manual_seed(1)
    plain = make()
    model = lockstep.DistributedDataParallel(copy.deepcopy(plain), mixed_precision=config, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        inputs = make_input(step)
        model(inputs).float().square().sum().backward()
        expected = _reference_grads(plain, inputs, config)
        for name, p in model.module.named_parameters():
            assert p.dtype == torch.float32 and isinstance(p, nn.Parameter), name
            if expected[name] is None:
                assert p.grad is None or not p.grad.any(), name
                continue
            assert p.grad.dtype == torch.float32 and torch.equal(p.grad, expected[name]), (step, name)
        optimizer.step()
        plain.load_state_dict(model.module.state_dict())
        model.zero_grad(set_to_none=to_none)


def _reversed_input(step: int) -> torch.Tensor:
    return rank_data(3, 6, step=step)


def _branch_input(step: int) -> tuple[torch.Tensor, str]:
    return rank_data(3, 4, step=step), ["a", "ab", "b", "a" if dist.get_rank() else "ab"][step]


MODES = {
    "default": (Reversed, _reversed_input, {}, True),
    "zeroed": (Reversed, _reversed_input, {}, False),
    "views": (Reversed, _reversed_input, {"gradient_as_bucket_view": True}, True),
    "zeroed_views": (Reversed, _reversed_input, {"gradient_as_bucket_view": True}, False),
    "many_buckets": (Reversed, _reversed_input, {"bucket_cap_mb": 0.0003}, True),
    "static": (Reversed, _reversed_input, {"static_graph": True}, True),
    "find_unused": (Branches, _branch_input, {"find_unused_parameters": True, "gradient_as_bucket_view": True}, True),
}


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_the_mean_of_those_computed_and_sent_in_low_precision(ranks, mode):
    make, make_input, options, to_none = MODES[mode]
    ranks.run(_train, make, make_input, HALF, options, to_none)


@pytest.mark.parametrize(
    "config",
    [
        _MixedPrecision(param_dtype=torch.bfloat16),
        _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        _MixedPrecision(reduce_dtype=torch.float16),
        _MixedPrecision(),
    ],
    ids=["bf16", "bf16_reduced_in_fp32", "reduced_in_fp16", "nothing"],
)
def test_each_dtype_of_the_config_does_what_it_says(ranks, config):
    ranks.run(_train, Reversed, _reversed_input, config, {}, True)


def _on_the_wire(config: _MixedPrecision) -> float:
    layer = nn.Linear(1, 1, bias=False)
    model = lockstep.DistributedDataParallel(layer, mixed_precision=config)
    model(torch.tensor([[2.0**17 * (1 + 2 * dist.get_rank())]])).sum().backward()
    return layer.weight.grad.item()


def test_reduce_dtype_decides_what_a_gradient_may_be_worth(ranks):
    # Ranks have gradients of 2**17 and 3 * 2**17. The largest number of fp16 is 65504.
    bf16 = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    assert ranks.run(_on_the_wire, bf16) == [float("inf")] * 2
    assert ranks.run(_on_the_wire, _MixedPrecision(param_dtype=torch.bfloat16)) == [2.0**18] * 2


class Observed(nn.Module):
    """Notes the dtypes that its forward finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.counts = nn.Parameter(torch.ones(2, dtype=torch.long), requires_grad=False)
        self.register_buffer("offset", torch.randn(2))
        self.register_buffer("steps", torch.tensor(3))
        self.seen: list[dict[str, torch.dtype]] = []

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        named = {"x": x, "scale": scale, **dict(self.named_parameters()), **dict(self.named_buffers())}
        self.seen.append({name: tensor.dtype for name, tensor in named.items()})
        return self.layer(x) * scale + self.frozen + self.offset


def _dtypes() -> None:
    module = Observed()
    model = lockstep.DistributedDataParallel(module, mixed_precision=HALF)
    assert module.offset.dtype == torch.float16 and module.steps.dtype == torch.long
    for name, p in model.named_parameters():
        if "counts" not in name:
            assert p._mp_param.dtype == torch.float16 and p._fp_param.dtype == torch.float32, name
    before = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    for _ in range(2):
        out = model(rank_data(3, 2), scale=torch.ones(2))
        assert out.dtype == torch.float16
        assert {name: tensor.dtype for name, tensor in module.state_dict().items()} == before, "before backward"
        out.sum().backward()
        with torch.no_grad():
            assert model(rank_data(3, 2), scale=torch.ones(2)).dtype == torch.float16
        assert {name: tensor.dtype for name, tensor in module.state_dict().items()} == before
        assert module.frozen.grad is None and module.layer.weight.grad.dtype == torch.float32
    half = torch.float16
    found = {"x": half, "scale": half, "layer.weight": half, "layer.bias": half, "frozen": half, "offset": half}
    assert module.seen == [found | {"counts": torch.long, "steps": torch.long}] * 4


def test_forward_finds_low_precision_and_everybody_else_full_precision(ranks):
    ranks.run(_dtypes)


def _ignored() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module.register_buffer("offset", torch.ones(2))
    lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight", "offset"])
    model = lockstep.DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16, None, torch.half))
    assert module.offset.dtype == torch.float32
    assert not hasattr(module[0].weight, "_mp_param") and hasattr(module[0].bias, "_mp_param")
    seen = []
    module[0].register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.bias.dtype)))
    with pytest.raises(RuntimeError, match="dtype"):
        model(rank_data(1, 2))
    assert seen == [(torch.float32, torch.bfloat16)]
    assert isinstance(module[1].weight, nn.Parameter), "a forward that raises leaves the module as it was"


def test_ignored_parameters_and_buffers_keep_their_dtype(ranks):
    ranks.run(_ignored)


def _accumulated() -> None:
    torch.manual_seed(1)
    plain = Reversed()
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = lockstep.DistributedDataParallel(copy.deepcopy(plain), mixed_precision=config)
    for _ in range(2):
        for step in range(3):
            inputs = _reversed_input(step)
            low = {name: p.bfloat16() for name, p in plain.named_parameters()}
            functional_call(plain, low, (inputs.bfloat16(),)).sum().backward()
            model.require_backward_grad_sync = step == 2
            model(inputs).sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mean = theirs.grad / 2
            dist.all_reduce(mean)
            assert torch.equal(ours.grad, mean)
        model.zero_grad()
        plain.zero_grad()


def test_micro_batches_are_accumulated_in_full_precision(ranks):
    ranks.run(_accumulated)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.block = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.reentrant = reentrant

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.block(x)) * self.scale  # `scale` belongs to no module that is called here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.reentrant is None:
            return self._run(x)
        return checkpoint(self._run, x, use_reentrant=self.reentrant)


def _checkpointed(reentrant: bool) -> None:
    grads = []
    for way in (None, reentrant):
        torch.manual_seed(1)
        model = lockstep.DistributedDataParallel(Checkpointed(way), mixed_precision=HALF)
        for step in range(3):
            model.zero_grad()
            model(rank_data(2, 4, step=step)).sum().backward()
            grads.append([p.grad for p in model.parameters()])
            assert all(type(p) is nn.Parameter for p in model.parameters())
    for ours, plain in zip(grads[3:], grads[:3], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("reentrant", [False, True], ids=["without_reentry", "reentrant"])
def test_recomputation_in_backward_finds_the_parameters_of_forward(ranks, reentrant):
    ranks.run(_checkpointed, reentrant)


def _after_failures() -> None:
    module = Checkpointed(False)
    model = lockstep.DistributedDataParallel(module, mixed_precision=HALF, find_unused_parameters=True)

    def fail(_: torch.Tensor) -> None:
        raise KeyError("mine")

    handle = module.block.weight.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        model(rank_data(2, 4)).sum().backward()
    handle.remove()
    model.zero_grad()
    model(rank_data(2, 4)).sum().backward()
    assert all(type(p) is nn.Parameter and p.grad.dtype == torch.float32 for p in model.parameters())
    assert_bit_equal_on_all_ranks([p.grad for p in model.parameters()], "gradient")


def test_a_backward_that_throws_spoils_no_later_step(ranks):
    ranks.run(_after_failures)


class Recurrent(nn.Module):
    """Shares a weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Linear(4, 16, bias=False)
        self.out.weight = self.rnn.weight_ih_l0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.rnn(x)[0])


def _recurrent() -> None:
    torch.manual_seed(1)
    module = Recurrent()
    model = lockstep.DistributedDataParallel(module, mixed_precision=_MixedPrecision(torch.bfloat16))
    for step in range(3):
        out = model(rank_data(2, 3, 4, step=step))
        assert out.dtype == torch.bfloat16
        out.sum().backward()
    assert_bit_equal_on_all_ranks([p.grad for p in model.parameters()], "gradient")
    for p, name in zip(module.rnn._flat_weights, module.rnn._flat_weights_names, strict=True):
        assert p is module.rnn._parameters[name]


def test_recurrent_modules_and_shared_weights_are_cast(ranks):
    ranks.run(_recurrent)


def _copied(how: str) -> float:
    torch.manual_seed(1)
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False), mixed_precision=config)
    model(torch.ones(1, 1)).sum().backward()
    if how == "deepcopy":
        again = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        again = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    again.zero_grad()
    out = again(torch.full((1, 1), 2.0**17))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    return again.module.weight.grad.item()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_copy_computes_and_reduces_in_the_same_precision(ranks, how):
    assert ranks.run(_copied, how) == [float("inf")] * 2  # fp16 on the wire


def _refused() -> None:
    def wrap(config: object, module: nn.Module | None = None) -> lockstep.DistributedDataParallel:
        return lockstep.DistributedDataParallel(module or nn.Linear(2, 2), mixed_precision=config)

    with pytest.raises(AttributeError, match=r"has no param_dtype, reduce_dtype, buffer_dtype.*LS-102"):
        wrap(torch.float16)
    with pytest.raises(TypeError, match=r"mixed_precision\.param_dtype is a torch\.dtype or None, but is 'fp16'"):
        wrap(_MixedPrecision("fp16"))
    with pytest.raises(RuntimeError, match=r"mixed_precision\.reduce_dtype must be a floating point.*torch\.int8"):
        wrap(_MixedPrecision(reduce_dtype=torch.int8))
    with pytest.raises(NotImplementedError, match="TorchScript"):
        wrap(HALF, torch.jit.script(nn.Linear(2, 2)))
    model = wrap(HALF)
    with pytest.raises(RuntimeError, match=r"only be called once; 'mixed_precision\(torch.float16\)' is registered"):
        model.register_comm_hook(None, _any_hook)


def _any_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError("never called")


def test_what_cannot_be_is_refused_before_anything_is_sent(ranks):
    ranks.run(_refused)


def _different() -> str:
    dtype = torch.float16 if dist.get_rank() == 0 else torch.bfloat16
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=_MixedPrecision(reduce_dtype=dtype))
    with pytest.raises(RuntimeError) as error:
        model(rank_data(1, 2)).sum().backward()
    return str(error.value)


def test_ranks_that_reduce_in_different_dtypes_are_told_so(broken_ranks):
    for text in broken_ranks.run(_different):
        assert "different comm hooks" in text
