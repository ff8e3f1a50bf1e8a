"""Gradients that are views of their bucket."""

from __future__ import annotations

import torch
from torch import nn

from field.kit import pair_of
from field.registry import Engine, case
from models import Reversed
from oracle import rank_data


def _zero(model: nn.Module, how: str) -> None:
    for i, p in enumerate(model.parameters()):
        if how == "detach":
            p.grad.detach_()
            p.grad.zero_()
        elif how == "none" or (how == "subset" and i % 2):
            p.grad = None
        elif how == "subset":
            p.grad.zero_()
        else:
            p.grad = torch.zeros_like(p)


@case(
    30,
    "detach_() on a gradient that is a view",
    variants={how: {"how": how} for how in ("detach", "none", "new", "subset")},
)
def zeroing_views(engine: Engine, how: str) -> None:
    """https://github.com/pytorch/pytorch/pull/43557 https://github.com/pytorch/pytorch/pull/44344
    https://github.com/facebookresearch/fairscale/issues/354

    Symptom: zero_grad code of third parties detaches gradients in place and crashes on views.
    Right: every way to clear a gradient is legal; after each backward it shares storage with its bucket again.
    """
    pair = pair_of(engine, Reversed, gradient_as_bucket_view=True)
    for step in range(5):
        pair.backward(lambda step=step: rank_data(3, 6, step=step))
        pair.check()
        storages = {p.grad.untyped_storage().data_ptr() for p in pair.wrapped.parameters()}
        assert step == 0 or len(storages) == 1, f"gradients lie in {len(storages)} storages instead of one bucket"
        pair.update()
        for model in (pair.wrapped, pair.plain):
            _zero(model, how)


@case(31, "set_to_none in every step keeps the memory saving")
def views_save_memory(engine: Engine) -> None:
    """https://github.com/pytorch/pytorch/pull/96439 https://github.com/pytorch/pytorch/pull/41954

    Symptom: autograd allocates fresh gradients in each step, so the peak is as if there were no views.
    Right: beside the buckets, at most one bucket's worth of fresh gradients is alive at any time.
    """

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))

    one = 64 * 64 * 4
    pair = pair_of(engine, make, gradient_as_bucket_view=True, bucket_cap_mb=2 * one / 2**20)
    fresh: list[int] = []
    buckets: set[int] = set()

    def measure(parameter: torch.Tensor) -> None:
        grads = [p.grad.untyped_storage() for p in pair.wrapped.parameters() if p.grad is not None]
        fresh.append(sum(storage.nbytes() for storage in grads if storage.data_ptr() not in buckets))

    for p in pair.wrapped.parameters():
        p.register_post_accumulate_grad_hook(measure)
    for step in range(5):
        fresh.clear()
        pair.backward(lambda step=step: rank_data(3, 64, step=step) / 8)
        pair.check()
        pointers = {p.grad.untyped_storage().data_ptr() for p in pair.wrapped.parameters()}
        if step >= 2:  # the plan is final
            assert pointers == buckets, "gradients have left their buckets"
            assert max(fresh) <= 3 * one, f"{max(fresh) // one} of 16 gradients are held twice"
        buckets = pointers
        pair.update()
        pair.zero(set_to_none=True)
