"""A recipe for ``lockstep align``: the handwritten digits of the example.

lockstep align lockstep.examples.align_digits:make --nproc 3 --picture digits.png
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lockstep.examples._data import load_data
from lockstep.examples.digits import DigitNet
from lockstep.tools.align import Recipe

#: Samples of one step over all ranks; two, three and four ranks divide it.
BATCH_SIZE = 48


def make() -> Recipe:
    """The training of the example: any number of ranks reaches level 2."""
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Recipe(model, load_data()[0], mean_loss, optimizer, BATCH_SIZE)


def make_with_scaled_rate(rank: int, world_size: int) -> Recipe:
    """The same with a common mistake: the rate grows with the ranks although the global batch stays."""
    recipe = make()
    for group in recipe.optimizer.param_groups:
        group["lr"] *= world_size
    return recipe


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of the images of ``batch``."""
    images, labels = batch
    return cross_entropy(model(images), labels)
