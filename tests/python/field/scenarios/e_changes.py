"""Models that change after they were wrapped, and calls that go around the wrapper."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from field.kit import LATE, assert_contains, assert_told_once, coded, local_warnings, pair_of, recorded, refused
from field.registry import Engine, case
from oracle import Pair, assert_bit_equal_on_all_ranks, rank_data


class Staged(nn.Module):
    """A backbone that may be frozen, and a head."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Linear(4, 4).requires_grad_(not frozen)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.backbone(x)))

    def compute_loss(self, x: torch.Tensor, power: int = 2) -> torch.Tensor:
        return self.head(torch.tanh(self.backbone(x))).pow(power).sum()


def _two_steps(pair: Pair) -> None:
    for step in range(2):
        pair.backward(lambda step=step: rank_data(3, 4, step=step))
        pair.check()
        pair.update()
        pair.zero()


@case(38, "a parameter unfrozen after wrapping", variants={"all": {}, "one_rank": {"one": True, "own_processes": True}})
def unfrozen_later(engine: Engine, one: bool = False) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/20340
    https://github.com/huggingface/transformers/issues/416 https://github.com/JDAI-CV/fast-reid/issues/178
    https://github.com/NVIDIA/apex/pull/46

    Symptom: gradual unfreezing: the layers that now train drift apart.
    Right: the next forward raises by name (or adopts the parameter); if one rank did it, every rank raises.
    """
    pair = pair_of(engine, lambda: Staged(frozen=True))
    _two_steps(pair)
    if one:
        if dist.get_rank() == 0:
            pair.wrapped.module.backbone.requires_grad_(True)
        with refused(engine, "backbone.weight", "wrap the module again", within=LATE):
            for step in range(2):
                pair.wrapped(rank_data(3, 4, step=step)).sum().backward()
        return
    for model in (pair.plain, pair.wrapped.module):
        model.backbone.requires_grad_(True)
    try:
        _two_steps(pair)
    except RuntimeError as error:
        assert_contains(str(error), "backbone.weight", "wrap the module again")


class Injected(nn.Module):
    """A base to which an adapter is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base(x)
        return out + self.base.adapter(x) if hasattr(self.base, "adapter") else out


@case(
    40,
    "adapters that the wrapper does not know",
    variants={"added_later": {}, "container_only": {"container": True}},
)
def unknown_adapters(engine: Engine, container: bool = False) -> None:
    """https://github.com/huggingface/diffusers/issues/4046 https://github.com/kohya-ss/sd-scripts/issues/924
    https://github.com/kohya-ss/sd-scripts/pull/989 https://github.com/hao-ai-lab/FastVideo/pull/1666

    Symptom: adapters train on each rank by themselves; nobody notices until quality is poor.
    Right: added after wrapping: the next forward raises by name; a container whose forward never runs: said once.
    """
    if container:
        adapters = nn.ModuleList([nn.Linear(4, 4)])
        base = nn.Linear(4, 4)
        wrapped = engine.wrap(adapters)
        with recorded() as records:
            for step in range(2):
                x = rank_data(3, 4, step=step)
                (base(x) + adapters[0](x)).sum().backward()
        assert_told_once(local_warnings(records), "'0.", "forward was not run through the wrapper")
        assert wrapped.module is adapters
        return
    pair = pair_of(engine, Injected)
    _two_steps(pair)
    for model in (pair.plain, pair.wrapped.module):
        torch.manual_seed(5)
        model.base.adapter = nn.Linear(4, 4)
    try:
        _two_steps(pair)
    except RuntimeError as error:
        assert_contains(str(error), "base.adapter.weight", "wrap the module again")


@case(
    41,
    "a method of the wrapped module instead of forward",
    variants={
        "method": {"how": "method"},
        "strict": {"how": "strict"},
        "evaluation_is_quiet": {"how": "evaluation"},
        "routed": {"how": "routed"},
    },
)
def around_the_wrapper(engine: Engine, how: str) -> None:
    """https://github.com/moojink/openvla-oft/issues/160 https://github.com/OpenTSLM/OpenTSLM/pull/49
    https://github.com/bytetriper/RAE/issues/40 https://github.com/pytorch/pytorch/issues/14616
    https://github.com/k2-fsa/icefall/issues/226 https://github.com/intel/e2eAIOK/pull/198
    https://github.com/pytorch/pytorch/pull/60921 https://github.com/pytorch/pytorch/pull/20282

    Symptom: nothing is reduced: N independent models train, and rank 0's is saved.
    Right: torch's meaning, said once; evaluation stays quiet; methods can be routed through the wrapper.
    """
    if how == "routed":
        engine.require("call")
        pair = pair_of(engine, Staged)
        for step in range(3):
            x = rank_data(3, 4, step=step)
            loss = pair.wrapped.call("compute_loss", x, power=4)
            loss.backward()
            pair.plain.compute_loss(x, power=4).backward()
            pair.check()
            pair.update()
            pair.zero()
        _two_steps(pair)
        return
    if how == "strict":
        model = engine.wrap(Staged(), **engine.require(strict=True))
        with refused(engine, "head.", "forward was not run through the wrapper"):
            model.module.compute_loss(rank_data(3, 4)).backward()
            model(rank_data(3, 4))
        return
    pair = pair_of(engine, Staged)
    with recorded() as records:
        if how == "method":
            for step in range(3):
                pair.wrapped.module.compute_loss(rank_data(3, 4, step=step)).backward()
                pair.zero()
        _two_steps(pair)
        with torch.no_grad():
            pair.wrapped.module.compute_loss(rank_data(3, 4))
            pair.wrapped.module.eval()(rank_data(3, 4))
    if how == "evaluation":
        assert not coded(records), coded(records)
        return
    assert_told_once(local_warnings(records), "head.", "forward was not run through the wrapper")
    assert_bit_equal_on_all_ranks(pair.wrapped.parameters(), "parameter")
