"""static_graph: recorded in the first reduced backward, held to in all others."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lockstep
from models import Branches, Reversed
from oracle import Pair, rank_data


def _unused_in_every_step() -> None:
    options = {"static_graph": True, "bucket_cap_mb": 1e-6}
    pair = Pair(Branches, lambda module: lockstep.DistributedDataParallel(module, **options))
    for step in range(5):
        pair.backward(lambda step=step: (rank_data(3, 4, step=step), "a"))
        pair.check()
        assert pair.wrapped.module.b.weight.grad is None
        pair.update()
        pair.zero()


def test_the_same_parameter_may_be_unused_in_every_step(ranks):
    ranks.run(_unused_in_every_step)


def _more_used_later() -> str:
    model = lockstep.DistributedDataParallel(Branches(), static_graph=True)
    model((rank_data(3, 4), "a")).sum().backward()
    with pytest.raises(RuntimeError) as error:
        model((rank_data(3, 4, step=1), "ab")).sum().backward()
    return str(error.value)


def _fewer_used_later() -> str:
    model = lockstep.DistributedDataParallel(Branches(), static_graph=True)
    model((rank_data(3, 4), "ab")).sum().backward()
    model((rank_data(3, 4, step=1), "a")).sum().backward()
    with pytest.raises(RuntimeError) as error:
        model((rank_data(3, 4, step=2), "a"))
    return str(error.value)


def test_a_graph_that_grows_is_an_error_in_the_backward_that_shows_it(broken_ranks):
    for text in broken_ranks.run(_more_used_later):
        assert "Your training graph has changed in this iteration" in text and "b." in text


def test_a_graph_that_shrinks_is_an_error_at_the_next_forward_and_names_the_parameters(broken_ranks):
    for rank, text in enumerate(broken_ranks.run(_fewer_used_later)):
        assert "Expected to have finished reduction in the prior iteration" in text
        assert f"Parameters which did not receive grad for rank {rank}: b.weight, b.bias" in text


def _late_declaration() -> None:
    model = lockstep.DistributedDataParallel(Reversed())
    model(rank_data(3, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="before training loop starts"):
        model._set_static_graph()


def test_a_graph_cannot_be_declared_static_after_training_began(ranks):
    ranks.run(_late_declaration)


class Twice(torch.nn.Module):
    """One layer that is checkpointed twice in a forward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def _checkpointed_twice(reentrant: bool, options: dict) -> None:
    pair = Pair(lambda: Twice(reentrant), lambda module: lockstep.DistributedDataParallel(module, **options))
    pair.train(4, lambda step: rank_data(3, 6, step=step).requires_grad_())


@pytest.mark.parametrize("views", [False, True], ids=["default", "views"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["nonreentrant", "reentrant"])
def test_a_layer_may_be_checkpointed_twice(ranks, reentrant, views):
    ranks.run(_checkpointed_twice, reentrant, {"static_graph": True, "gradient_as_bucket_view": views})
