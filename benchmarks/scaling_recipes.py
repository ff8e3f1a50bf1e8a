"""The four models of step_tax.py as recipes, for ``lockstep bench scaling`` and ``lockstep tune``.

Whole training steps in bf16 autocast with fused AdamW. The global batch is that of four ranks in step_tax.py
(ResNet-50: 256 images; GPT-small, GPT-medium, GPT-xl: 32, 16, 8 x 1024 tokens) and stays as ranks are added. Data are
synthetic and held on the device, so that loading costs nothing: the data set is numbers, and the loss looks up their
samples.

    lockstep bench scaling benchmarks/scaling_recipes.py:gpt_small --json > gpt_small.json
    python benchmarks/scaling_table.py *.json
"""

from __future__ import annotations

from functools import partial

import torch
from _models import loss as cross_entropy
from _models import models
from torch import Tensor, nn

from lockstep.tools.align import Recipe

#: Of step_tax.py's batches, which are those of one rank.
BATCHES = 4
#: Batches until the numbers begin again. The samples do so with every batch.
STEPS_OF_AN_EPOCH = 1000


def _recipe(name: str, scale: str) -> Recipe:
    model = models(scale)[name]
    # Drawing a billion weights takes the host half a minute. The tool moves the model where it wants it.
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        columns = zip(*(model.batch() for _ in range(BATCHES)), strict=True)
        samples = Samples(*(torch.cat(column) for column in columns))
        net = model.build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    numbers = range(STEPS_OF_AN_EPOCH * len(samples))
    return Recipe(net, numbers, samples.loss, optimizer, batch_size=len(samples), shuffle=False)


class Samples:
    """Inputs and targets, held where they are asked for."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.targets)

    def loss(self, model: nn.Module, numbers: Tensor) -> Tensor:
        """Mean loss of the samples with these numbers, in bf16 autocast."""
        if self.inputs.device != numbers.device:
            self.inputs, self.targets = self.inputs.to(numbers.device), self.targets.to(numbers.device)
        rows = numbers % len(self)
        with torch.autocast(numbers.device.type, torch.bfloat16):
            return cross_entropy(model(self.inputs[rows]), self.targets[rows])


resnet50 = partial(_recipe, "resnet50", "full")
gpt_small = partial(_recipe, "gpt-small", "full")
gpt_medium = partial(_recipe, "gpt-medium", "full")
gpt_xl = partial(_recipe, "gpt-xl", "full")

# The same code with next to no work: does it run?
tiny_resnet50 = partial(_recipe, "resnet50", "tiny")
tiny_gpt = partial(_recipe, "gpt-small", "tiny")
