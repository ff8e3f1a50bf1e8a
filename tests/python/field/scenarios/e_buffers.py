"""Buffers: changed between forwards, re-assigned, constant, different on the ranks, and on the wrong device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from field.kit import assert_told_once, close, coded, collectives, in_turns, pair_of, recorded, refused
from field.registry import Engine, case
from oracle import assert_bit_equal_on_all_ranks, mean_over_ranks, rank_data


def _conv_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


class Scaled(nn.Module):
    """An output that is multiplied with a buffer, which ``moves`` away from the old one in each forward."""

    def __init__(self, moves: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)
        self.moves = moves
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.moves:
            self.scale = self.scale + 1 + dist.get_rank()
        return self.layer(x) * self.scale


SEVERAL = {
    "norm_training": {"how": "train"},
    "norm_evaluation": {"how": "eval"},
    "buffer_in_the_graph": {"how": "buffer"},
    "buffer_really_differs": {"how": "moves"},
    "recurrent": {"how": "recurrent"},
}


@case(
    50,
    "buffers, and several forwards before one backward",
    variants=SEVERAL | {f"{name}_alone": {**given, "ranks": 1} for name, given in SEVERAL.items()},
)
def several_forwards(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/issues/22095 https://github.com/pytorch/pytorch/issues/65907
    https://github.com/pytorch/pytorch/issues/73332 https://github.com/pytorch/pytorch/issues/110363
    https://github.com/pytorch/pytorch/issues/175024 https://github.com/Project-MONAI/GenerativeModels/issues/352
    https://github.com/yl4579/StyleTTS2/issues/7 https://github.com/Mid-Push/Decent/issues/5

    Symptom: "modified by an inplace operation": each forward writes the buffers that the last one saved.
    Right: it works, and gradients are those of the values that were saved.
    """
    if how == "moves":
        _really_differs(engine)
        return
    pair = pair_of(engine, Scaled if how in ("buffer", "recurrent") else _conv_norm)
    for model in (pair.wrapped, pair.plain):
        model.train(how != "eval")
    for step in range(3):
        for model in (pair.wrapped, pair.plain):
            if how == "recurrent":
                state = rank_data(3, 4, step=step)
                for _ in range(3):
                    state = torch.tanh(model(state))
                state.square().sum().backward()
                continue
            shape = (3, 4) if how == "buffer" else (3, 2, 4, 4)
            real = model(rank_data(*shape, step=step))
            fake = model(rank_data(*shape, step=step + 50))
            (real - 2 * fake).square().mean().backward()
        pair.check()
        pair.update()
        pair.zero()


def _really_differs(engine: Engine) -> None:
    """Each forward saves another buffer, on rank 1 another one than on rank 0, and its product must be that one's."""
    model = engine.wrap(Scaled(moves=True))
    for step in range(3):
        xs = [rank_data(3, 4, step=step + 50 * i) for i in range(2)]
        scales = []
        outs = []
        for x in xs:
            outs.append(model(x))
            scales.append(model.module.scale.clone())
        sum(out.sum() for out in outs).backward()
        mine = sum(scale[:, None] * x.sum(0)[None, :] for scale, x in zip(scales, xs, strict=True))
        close(model.module.layer.weight.grad, mean_over_ranks(mine), f"step {step}")
        model.zero_grad()


@case(51, "a buffer re-assigned in forward")
def reassigned_buffer(engine: Engine) -> None:
    """https://github.com/pytorch/pytorch/issues/63916 https://github.com/pytorch/pytorch/pull/64472

    Symptom: `self.buf = self.buf + 1` leaves the engine with the old tensor, which is then sent.
    Right: buffers are looked up by name at each synchronisation.
    """
    seen: list[torch.Tensor] = []

    class Reassigns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("noise", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(self.noise.clone())
            self.noise = self.noise + rank_data(3, step=len(seen))
            return self.layer(x)

    model = engine.wrap(Reassigns())
    for step in range(4):
        model(rank_data(3, 4, step=step)).sum().backward()
    assert_bit_equal_on_all_ranks(seen, "buffer at the beginning of forward")
    assert seen[3].any()


@case(53, "constant buffers are not sent again")
def constant_buffers(engine: Engine) -> None:
    """https://github.com/ultralytics/ultralytics/issues/24410 https://github.com/jingyaogong/minimind/pull/855
    https://github.com/facebookresearch/detectron2/issues/1297

    Symptom: tables that never change are sent at the start of every forward.
    Right: only what rank 0 has changed is sent; int64 values beyond 2**53 are exact.
    """
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module.register_buffer("table", torch.full((100_000,), float(dist.get_rank())))
    module.register_buffer("big", torch.tensor([2**53 + 1 + dist.get_rank()] * 10))
    module.register_buffer("flags", torch.tensor([dist.get_rank() == 0] * 10))
    model = engine.wrap(module)
    sent = []
    for step in range(4):
        sent.append(sum(collectives(lambda step=step: model(rank_data(3, 4, step=step)).sum().backward())))
        module.zero_grad()
    assert not module.table.any() and module.flags.all() and (module.big == 2**53 + 1).all()
    model(rank_data(3, 4))
    if dist.get_rank() == 0:
        module.table.add_(3)  # no constant after all
    with torch.no_grad():
        model(rank_data(3, 4))
    assert (module.table == 3).all(), "a change on rank 0 must arrive"
    assert max(sent[1:]) < 10_000, f"elements sent in each step: {sent}"


@case(54, "broadcast_buffers=False, and buffers that differ from the start")
def different_buffers(engine: Engine) -> None:
    """https://github.com/pytorch/pytorch/issues/111138

    Symptom: buffers of a random start, or of a checkpoint loaded on one rank, stay different.
    Right: torch's meaning, and one warning that names them; none when they are equal.
    """

    def make(value: float) -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        module[1].register_buffer("start", torch.full((4,), value))
        return module

    with recorded() as records:
        engine.wrap(make(0.0), broadcast_buffers=False)
        assert not coded(records), coded(records)
        module = make(float(dist.get_rank()))
        engine.wrap(module, broadcast_buffers=False)
    assert (module[1].start == dist.get_rank()).all()
    told = [text for texts in in_turns(lambda: coded(records)) for text in texts if "1.start" in text]
    assert told, "nothing was said about buffers that differ"
    if dist.get_rank() == 0:
        assert_told_once(coded(records), "1.start", "rank 1")
        assert "running_mean" not in told[0], told[0]


@case(
    56,
    "mistakes with device_ids",
    variants={
        "module_on_cpu": {"options": {"device_ids": [0]}, "phrase": "cpu"},
        "output_device_only": {"options": {"output_device": 0}, "phrase": "output_device"},
        "several": {"options": {"device_ids": [0, 1]}, "phrase": "single element"},
    },
)
def wrong_devices(engine: Engine, options: dict[str, Any], phrase: str) -> None:
    """https://github.com/pytorch/pytorch/issues/46821 https://github.com/facebookresearch/detectron2/issues/5146
    https://github.com/yuanzhoulvpi2017/zero_nlp/issues/131 https://github.com/shibing624/MedicalGPT/issues/3
    https://github.com/laekov/fastmoe/issues/202 https://github.com/pytorch/pytorch/issues/80420

    Symptom: one sentence with a set of devices for different mistakes, and output_device is ignored.
    Right: each mistake in a sentence of its own, with the first parameters it is about.
    """
    module = nn.Sequential(nn.Linear(4, 4))
    if "output_device" in options:
        with recorded() as records:
            try:
                engine.wrap(module, **options)
            except ValueError:
                return
        assert any(phrase in str(record.message) for record in records), "output_device was ignored without a word"
        return
    names = ["0.weight"] if phrase == "cpu" else []
    with refused(engine, phrase, *names, kinds=ValueError, coded_too=False):
        engine.wrap(module, **options)
