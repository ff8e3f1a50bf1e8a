"""Outputs of every shape, and losses that use only some of them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

import lockstep
from field.kit import (
    CODE,
    assert_contains,
    assert_told_once,
    local_warnings,
    pair_of,
    recorded,
    refused,
)
from field.registry import Engine, NotOffered, case
from models import Branches
from oracle import assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data


class UsedAndSpare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.spare = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@case(1, "one unused parameter leaves its bucket local", variants={"default": {}, "strict": {"strict": True}})
def unused_parameter_in_the_only_step(engine: Engine, strict: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/112152

    Symptom: ranks end the step with different gradients, and nothing is said in that step.
    Right: said at the end of that backward, with the names of the missing and of the local ones; strict: raised.
    """
    options = engine.require(strict=True) if strict else {}
    model = engine.wrap(UsedAndSpare(), **options)
    if strict:
        with refused(engine, "spare.weight", "spare.bias"):
            model(rank_data(3, 4)).sum().backward()
        return
    with recorded() as records:
        model(rank_data(3, 4)).sum().backward()
    names = ["spare.weight", "spare.bias", "used.weight", "used.bias"]
    assert_told_once(local_warnings(records), *names, "unreachable from the outputs of forward")
    with refused(engine, "Expected to have finished reduction", "spare.weight"):
        model(rank_data(3, 4))


class Heads(nn.Module):
    """Two outputs, from a trunk of their own or a shared one."""

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4) if shared else nn.Identity()
        self.left = nn.Linear(4, 2)
        self.right = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.trunk(x)
        return self.left(x), self.right(x)


@case(2, "two backwards that cover the parameters together", variants={"disjoint": {}, "shared": {"shared": True}})
def two_losses(engine: Engine, shared: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/47260 https://github.com/deepspeedai/DeepSpeed/pull/8135

    Symptom: with one backward for each head, some wrappers break or reduce early.
    Right: means after the second, no alarm after the first; a shared trunk: sums of means, or an error naming it.
    """
    pair = pair_of(engine, lambda: Heads(shared))
    for step in range(3):
        x = rank_data(3, 4, step=step)
        left, right = pair.plain(x)
        (left.square().sum() + right.square().sum()).backward()
        with recorded() as records:
            left, right = pair.wrapped(x)
            left.square().sum().backward(retain_graph=shared)
            try:
                right.square().sum().backward()
            except RuntimeError as error:
                assert shared, error
                assert_contains(str(error), "trunk.")
                return
        assert not local_warnings(records), "a false alarm"
        pair.check()
        pair.update()
        pair.zero()


class Language(nn.Module):
    """A head that trains, and another that forward never uses or only returns."""

    def __init__(self, returned: bool) -> None:
        super().__init__()
        self.decoder = nn.Module()
        self.decoder.body = nn.Linear(4, 4)
        self.decoder.lm_head = nn.Linear(4, 4)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.decoder.body(x)
        return (x, self.decoder.lm_head(x)) if self.returned else (x,)


@case(
    3,
    "'Expected to have finished reduction' says what to do",
    variants={"unreachable": {"returned": False}, "left_out": {"returned": True}},
)
def unfinished_message(engine: Engine, returned: bool) -> None:
    """https://github.com/pytorch/pytorch/issues/57473 https://github.com/pytorch/pytorch/issues/68862
    https://github.com/open-mmlab/mmagic/issues/419 https://github.com/Megvii-BaseDetection/YOLOX/issues/885
    https://github.com/facebookresearch/detectron2/issues/4191 https://github.com/NVIDIA/Isaac-GR00T/pull/351

    Symptom: indices instead of names, and find_unused_parameters switched on blindly.
    Right: qualified names, the rank, whether the output was left out of the loss, and three remedies.
    """
    model = engine.wrap(Language(returned))
    with recorded():
        model(rank_data(3, 4))[0].sum().backward()
    reason = "not part of the loss" if returned else "unreachable from the outputs of forward"
    names = ["decoder.lm_head.weight", "decoder.lm_head.bias", f"rank {dist.get_rank()}"]
    with refused(engine, *names, "requires_grad", "find_unused_parameters=True", "static_graph=True", reason):
        model(rank_data(3, 4))


@case(
    4,
    "a parameter used nowhere keeps its gradient and is not moved",
    variants={
        "none": {},
        "kept": {"set_to_none": False},
        "views_none": {"views": True},
        "views_kept": {"views": True, "set_to_none": False},
    },
)
def globally_unused(engine: Engine, views: bool = False, set_to_none: bool = True) -> None:
    """https://github.com/pytorch/pytorch/pull/28883

    Symptom: unused parameters get zeros, so that momentum and weight decay still move them.
    Right: untouched, exactly as with the local model.
    """
    pair = pair_of(engine, Branches, find_unused_parameters=True, gradient_as_bucket_view=views)
    models = (pair.wrapped, pair.plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for m in models]
    for step, branches in enumerate(["ab", "a", "ab", "a"]):
        pair.backward(lambda step=step, branches=branches: (rank_data(3, 4, step=step), branches))
        for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), f"step {step}"
            if theirs.grad is not None:
                theirs.grad.copy_(mean_over_ranks(theirs.grad))
                torch.testing.assert_close(ours.grad, theirs.grad)
        before = pair.wrapped.module.b.weight.detach().clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        if set_to_none and branches == "a":
            assert torch.equal(pair.wrapped.module.b.weight, before), "an unused parameter was moved"
        for ours, theirs in zip(pair.wrapped.parameters(), pair.plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


@case(5, "used on one rank only", variants={"default": {}, "views": {"views": True}})
def locally_unused(engine: Engine, views: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/41101 https://github.com/pytorch/pytorch/issues/22049
    https://github.com/pytorch/pytorch/pull/32612

    Symptom: nobody knows what the rank that did not use a parameter gets.
    Right: the sum over its users, divided by the number of ranks, on every rank.
    """
    pair = pair_of(engine, Branches, find_unused_parameters=True, gradient_as_bucket_view=views)
    for step in range(3):
        branch = "ab"[dist.get_rank()]
        pair.backward(lambda step=step, branch=branch: (rank_data(3, 4, step=step), branch))
        pair.check()
        mine = getattr(pair.plain, branch).weight.grad / 2
        torch.testing.assert_close(getattr(pair.wrapped.module, branch).weight.grad, mine)
        pair.update()
        pair.zero()
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")


@dataclass
class Out:
    main: torch.Tensor
    aux: torch.Tensor


class Slots:
    __slots__ = ("tensors",)

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)


class ModelOutput(OrderedDict):
    """As in transformers: a dict whose entries are attributes too."""


class Ticket:
    """Holds nothing; the tensors lie elsewhere."""

    __slots__ = ()
    kept: ClassVar[list[torch.Tensor]] = []


class Holder:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.inner = {"deep": [tensors]}


Named = namedtuple("Named", ["main", "aux"])


def _generator(main: torch.Tensor, aux: torch.Tensor) -> Iterator[torch.Tensor]:
    yield main
    yield aux


def _ticket(main: torch.Tensor, aux: torch.Tensor) -> Ticket:
    Ticket.kept[:] = [main, aux]
    return Ticket()


#: How forward dresses its two tensors, and how the loss finds the first again.
DRESSES: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "dataclass": (Out, lambda out: out.main),
    "slots": (Slots, lambda out: out.tensors[0]),
    "object": (Holder, lambda out: out.inner["deep"][0][0]),
    "namedtuple": (Named, lambda out: out.main),
    "dict_in_list": (lambda main, aux: [{"main": main, "aux": aux}], lambda out: out[0]["main"]),
    "model_output": (lambda main, aux: ModelOutput(main=main, aux=aux), lambda out: out["main"]),
    "generator": (_generator, next),
    "ticket": (_ticket, lambda out: Ticket.kept[0]),
}


class Dressed(nn.Module):
    def __init__(self, dress: str) -> None:
        super().__init__()
        self.main = nn.Linear(4, 4)
        self.aux = nn.Linear(4, 4)
        self.dress = dress

    def forward(self, x: torch.Tensor) -> Any:
        return DRESSES[self.dress][0](self.main(x), self.aux(x))


def _dressed_steps(engine: Engine, dress: str, options: dict[str, Any]) -> None:
    pair = pair_of(engine, lambda: Dressed(dress), **options)
    types: list[type] = []
    for step in range(4):
        x = rank_data(3, 4, step=step)
        for model in (pair.wrapped, pair.plain):
            out = model(x)
            types.append(type(out))
            DRESSES[dress][1](out).square().sum().backward()
        assert types[-1] is types[-2], "forward's own type must come back"
        pair.check()
        pair.update()
        pair.zero()


@case(
    6,
    "outputs hidden in a class",
    variants={
        f"{dress}_{mode}": {"dress": dress, "options": {option: True}}
        for dress in DRESSES
        for mode, option in [("find", "find_unused_parameters"), ("static", "static_graph")]
    }
    | {"registered": {"dress": "ticket", "options": {"find_unused_parameters": True}, "registered": True}},
)
def hidden_outputs(engine: Engine, dress: str, options: dict[str, Any], registered: bool = False) -> None:
    """https://github.com/pytorch/pytorch/issues/124666 https://github.com/pytorch/pytorch/pull/92334

    Symptom: nobody looks into unknown classes, so the book-keeping of backward is skipped without a word.
    Right: tensors are found in anything with fields; where none are, TypeError names the type. The type is kept.
    """
    if registered:
        if not engine.ours or not hasattr(lockstep, "register_output_type"):
            raise NotOffered(f"{engine.name} has no register_output_type()")
        lockstep.register_output_type(Ticket, lambda ticket: ticket.kept)
        _dressed_steps(engine, dress, options)
        return
    if dress not in ("generator", "ticket"):
        _dressed_steps(engine, dress, options)
        return
    try:
        _dressed_steps(engine, dress, options)  # right gradients are as good as a refusal
    except TypeError as error:
        assert_contains(str(error), "Ticket" if dress == "ticket" else "generator")
        assert not engine.ours or CODE.search(str(error)), error


@case(8, "static_graph with an output that never enters the loss", variants={"one_rank": {"ranks": 1}, "two": {}})
def static_with_an_unused_output(engine: Engine) -> None:
    """https://github.com/pytorch/pytorch/issues/97030 https://github.com/pytorch/pytorch/issues/79171
    https://github.com/pytorch/pytorch/pull/98084

    Symptom: a truly static model fails in the second or third step: "the graph has changed".
    Right: clean steps; the gradient of what the loss never uses stays None.
    """
    pair = pair_of(engine, Heads, static_graph=True)
    for step in range(6):
        pair.backward(lambda step=step: rank_data(3, 4, step=step), loss=lambda out: out[0].square().sum())
        pair.check()
        assert pair.wrapped.module.right.weight.grad is None
        pair.update()
        pair.zero()


@case(
    11,
    "find_unused_parameters with two forwards before one backward",
    variants={"same": {"plan": "same"}, "branches": {"plan": "branches"}, "detached": {"plan": "detached"}},
)
def two_forwards(engine: Engine, plan: str) -> None:
    """https://github.com/pytorch/pytorch/issues/105723 https://github.com/pytorch/pytorch/issues/175024

    Symptom: siamese, contrastive and adversarial loops fail only when wrapped: "marked ready twice".
    Right: the union of both graphs, equal to the reference.
    """
    pair = pair_of(engine, Branches, find_unused_parameters=True)
    first, second = ("a", "b") if plan == "branches" else ("ab", "ab")
    for step in range(3):
        for model in (pair.wrapped, pair.plain):
            one = model((rank_data(3, 4, step=step), first))
            other = model((rank_data(3, 4, step=step + 50), second))
            if plan == "detached":
                one = one.detach()
            (one.square().sum() + other.square().sum()).backward()
        pair.check()
        pair.update()
        pair.zero()
