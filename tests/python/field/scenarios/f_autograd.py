"""Uses of autograd beyond one plain backward."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from field.kit import assert_told_once, coded, local_warnings, pair_of, recorded
from field.registry import Engine, case
from models import Reversed
from oracle import assert_bit_equal_on_all_ranks, rank_data


def _one_good_step(pair: Any, step: int = 90) -> None:
    pair.zero()
    pair.backward(lambda: rank_data(3, 6, step=step))
    pair.check()
    pair.zero()


@case(
    60,
    "backward(create_graph=True)",
    variants={"default": {}, "views": {"options": {"gradient_as_bucket_view": True}}, "hook": {"hook": True}},
)
def create_graph(engine: Engine, options: dict[str, Any] | None = None, hook: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/63812 https://github.com/pytorch/pytorch/issues/48531
    https://github.com/pytorch/pytorch/issues/63929 https://github.com/pytorch/pytorch/pull/63831

    Symptom: a crash when a bucket is copied, or memory that grows with every step.
    Right: first-order gradients are reduced, nothing is leaked, and a second backward through them does no harm. That
    it is local is said once: the graph of the gradients does not contain the reduction.
    """
    pair = pair_of(engine, Reversed, **(options or {}))
    if hook:
        pair.wrapped.register_comm_hook(None, allreduce_hook)
    alive = []
    with recorded() as records:
        for step in range(20):
            x = rank_data(3, 6, step=step)
            for model in (pair.wrapped, pair.plain):
                model(x).square().sum().backward(create_graph=True)
            pair.check()
            pair.zero()
            if step in (4, 19):
                gc.collect()
                alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
        assert alive[1] <= alive[0], f"tensors alive after 5 and 20 steps: {alive}"
        x = rank_data(3, 6)
        pair.wrapped(x).square().sum().backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in pair.wrapped.parameters())
        if penalty.requires_grad:
            torch.autograd.grad(penalty, [pair.wrapped.module.layers[0].weight], allow_unused=True)
    _one_good_step(pair)
    about_it = [text for text in local_warnings(records) if "create_graph" in text]
    assert_told_once(about_it, "graph is that of this rank alone", "not reduced")


@case(61, "autograd.grad", variants={"of_parameters": {}, "of_an_input": {"of_input": True}})
def autograd_grad(engine: Engine, of_input: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/47562 https://github.com/pytorch/pytorch/issues/63929

    Symptom: with respect to parameters it returns local gradients, and nothing is said.
    Right: local as in torch, said once; the next step is right. With respect to an input it stays quiet.
    """
    pair = pair_of(engine, Reversed)
    with recorded() as records:
        for step in range(3):
            x = rank_data(3, 6, step=step).requires_grad_()
            wanted = [x] if of_input else list(pair.wrapped.parameters())
            grads = torch.autograd.grad(pair.wrapped(x).square().sum(), wanted)
            wanted = [x] if of_input else list(pair.plain.parameters())
            for mine, expected in zip(grads, torch.autograd.grad(pair.plain(x).square().sum(), wanted), strict=True):
                torch.testing.assert_close(mine, expected)
            _one_good_step(pair, step)
    if of_input:
        assert not coded(records), coded(records)
    else:
        assert_told_once(local_warnings(records), "autograd.grad", "this rank")


@case(
    62,
    "hooks that step the optimizer before the reduction",
    variants={
        "before_wrapping": {"how": "before"},
        "after_wrapping": {"how": "after"},
        "only_looking": {"how": "look"},
        "after_reduction": {"how": "reduced"},
    },
)
def optimizer_in_backward(engine: Engine, how: str) -> None:
    """https://github.com/kohya-ss/musubi-tuner/issues/679 https://github.com/pytorch/pytorch/pull/94258

    Symptom: fused-backward tricks update with local gradients; ranks diverge.
    Right: such hooks see local gradients; one that clears them is named; ours come after the mean is there.
    """
    if how == "reduced":
        _after_reduction(engine)
        return
    seen: dict[int, torch.Tensor] = {}

    def hook(parameter: torch.Tensor) -> None:
        seen[id(parameter)] = parameter.grad.clone()
        if how != "look":
            with torch.no_grad():
                parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None

    def wrap(module: nn.Module) -> nn.Module:
        if how == "before":
            for p in module.parameters():
                p.register_post_accumulate_grad_hook(hook)
        model = engine.wrap(module)
        if how != "before":
            for p in module.parameters():
                p.register_post_accumulate_grad_hook(hook)
        return model

    torch.manual_seed(1)
    plain, module = Reversed(), Reversed()
    module.load_state_dict(plain.state_dict())
    model = wrap(module)
    with recorded() as records:
        for step in range(3):
            x = rank_data(3, 6, step=step)
            plain.load_state_dict(module.state_dict())
            plain.zero_grad()
            plain(x).square().sum().backward()
            model.zero_grad()
            model(x).square().sum().backward()
            for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(seen[id(ours)], theirs.grad)
    if how == "look":
        assert not coded(records), coded(records)
    else:
        assert_told_once(local_warnings(records), "layers.", "cleared by a hook before it could be reduced")


def _after_reduction(engine: Engine) -> None:
    engine.require("register_reduced_hook")
    pair = pair_of(engine, Reversed)
    seen: list[torch.Tensor] = []

    def hook(parameter: torch.Tensor) -> None:
        seen.append(parameter.grad.clone())
        with torch.no_grad():
            parameter.sub_(0.1 * parameter.grad)

    handle = pair.wrapped.register_reduced_hook(hook)
    for step in range(3):
        seen.clear()
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        assert len(seen) == 10, f"called {len(seen)} times for 10 parameters"
        assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")
        pair.plain.load_state_dict(pair.wrapped.module.state_dict())
        pair.zero()
    handle.remove()
    seen.clear()
    _one_good_step(pair)
    assert not seen


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


IN_PLACE = {"find": {"find_unused_parameters": True}, "static": {"static_graph": True}, "default": {}}


@case(
    63,
    "in-place operations on outputs",
    variants={name: {"options": options} for name, options in IN_PLACE.items()}
    | {f"{name}_alone": {"options": options, "ranks": 1} for name, options in IN_PLACE.items()},
)
def in_place_on_outputs(engine: Engine, options: dict[str, Any]) -> None:
    """https://github.com/pytorch/pytorch/issues/61982 https://github.com/OFA-Sys/OFA/issues/340
    https://github.com/JIA-Lab-research/ECCV22-P3AFormer-Tracking-Objects-as-Pixel-wise-Distributions/issues/13

    Symptom: "_DDPSinkBackward is a view and is being modified inplace", only when wrapped.
    Right: allowed, with right gradients.
    """
    pair = pair_of(engine, TwoOutputs, **options)
    for step in range(4):
        for model in (pair.wrapped, pair.plain):
            left, right = model(rank_data(3, 4, step=step))
            left.div_(2)
            right.add_(left.detach())
            (left.square().sum() + right.square().sum()).backward()
        pair.check()
        pair.update()
        pair.zero()


@case(
    64,
    "outputs that need no gradient",
    variants={"find": {"options": {"find_unused_parameters": True}}, "static": {"options": {"static_graph": True}}},
)
def outputs_without_gradient(engine: Engine, options: dict[str, Any]) -> None:
    """https://github.com/pytorch/pytorch/issues/60733

    Symptom: constants in the output come back with a grad_fn.
    Right: outputs cannot be told from those of the plain module.
    """
    constant = torch.zeros(3)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.layer(x), constant, torch.tensor([1, 2]), x.detach(), x

    pair = pair_of(engine, Mixed, **options)
    for step in range(3):
        x = rank_data(3, 4, step=step)
        wrapped, plain = pair.wrapped(x), pair.plain(x)
        for mine, expected in zip(wrapped, plain, strict=True):
            assert mine.requires_grad == expected.requires_grad, "a constant came back with requires_grad"
            assert (mine.grad_fn is None) == (expected.grad_fn is None), "a constant came back with a grad_fn"
        pointers = [tensor.data_ptr() for tensor in (wrapped[1], wrapped[3], wrapped[4])]
        assert pointers == [constant.data_ptr(), x.data_ptr(), x.data_ptr()], "what forward only passes on was copied"
        wrapped[0].square().sum().backward()
        plain[0].square().sum().backward()
        pair.check()
        pair.zero()
