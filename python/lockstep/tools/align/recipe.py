"""What to train: a recipe, and how one is found by its name."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import lockstep
from lockstep._codes import Code, tagged


class RecipeError(Exception):
    """The recipe cannot be found or run. The text says what is wrong with it."""

    def __init__(self, text: str) -> None:
        super().__init__(text if "[LS-" in text else tagged(Code.RECIPE, text))


@dataclasses.dataclass
class Recipe:
    """A training to compare: what ``make()`` or ``make(rank, world_size)`` returns.

    ``make`` is called once in each process, after torch's global generator was seeded alike in all of them: with (0, 1)
    for the run in one process and with (rank, world_size) for the others. Build there what your script builds for that
    rank; what you leave out is done right.

    Attributes:
        model: not wrapped.
        dataset: with ``__getitem__`` and ``__len__``. Its ``set_epoch`` is called before each epoch if it has one.
        loss: ``loss(model, batch)`` returns the scalar to differentiate.
        optimizer: of the model's parameters.
        batch_size: samples of one optimizer step over all ranks together.
        accumulate: micro-batches of one optimizer step.
        divide_loss: divide each micro-batch's loss by ``accumulate``; False if ``loss`` does so itself.
        batches: index lists, one a micro-batch of this rank; your own sampler, to have it checked. Default: an
            ``OrderPreservingSampler`` over ``batch_size``. Its ``set_epoch`` is called, too.
        shuffle, seed: of the default order.
        scheduler: stepped after each optimizer step.
        num_workers, collate_fn: of the data loader.
        wrap: makes the model data-parallel; for the run on several ranks only.
    """

    model: nn.Module
    dataset: Any
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: torch.optim.Optimizer
    batch_size: int = 32
    accumulate: int = 1
    divide_loss: bool = True
    batches: Iterable[list[int]] | None = None
    shuffle: bool = True
    seed: int = 0
    scheduler: Any = None
    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] = default_collate
    wrap: Callable[[nn.Module], nn.Module] = lockstep.DistributedDataParallel

    def check(self) -> None:
        """Refuse what cannot be run, by name.

        Raises:
            RecipeError: a field has the wrong type or value.
        """
        kinds = {"model": nn.Module, "optimizer": torch.optim.Optimizer, "batch_size": int, "accumulate": int}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                raise RecipeError(f"the recipe's {name} must be a {kind.__name__}, not {type(getattr(self, name))}.")
        for name in ("loss", "collate_fn", "wrap"):
            if not callable(getattr(self, name)):
                raise RecipeError(f"the recipe's {name} cannot be called.")
        if not hasattr(self.dataset, "__getitem__") or not hasattr(self.dataset, "__len__"):
            raise RecipeError("the recipe's dataset has no fixed length or cannot be indexed: which sample is which?")
        if self.accumulate < 1 or self.batch_size < 1 or self.batch_size % self.accumulate:
            text = f"batch_size is {self.batch_size} and accumulate {self.accumulate}: both must be positive, and"
            raise RecipeError(f"{text} batch_size a multiple of accumulate.")


def find(name: str) -> Callable[..., Any]:
    """The function that ``name`` means: "package.module:function" or "path/to/file.py:function".

    Raises:
        RecipeError: there is none.
    """
    place, colon, function = name.partition(":")
    if not (place and colon and function):
        raise RecipeError(f"'{name}' is not of the form module:function or file.py:function.")
    try:
        if place.endswith(".py"):
            folder = str(Path(place).resolve().parent)
            if folder not in sys.path:
                sys.path.insert(0, folder)  # as python does for a script: what lies beside it can be imported
            spec = importlib.util.spec_from_file_location(f"lockstep_recipe_{Path(place).stem}", place)
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # workers and pickle look it up
            spec.loader.exec_module(module)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            module = importlib.import_module(place)
    except Exception as error:
        raise RecipeError(f"'{place}' cannot be imported: {type(error).__name__}: {error}.") from error
    if not callable(getattr(module, function, None)):
        raise RecipeError(f"'{place}' has no function '{function}'.")
    return getattr(module, function)


def build(make: Callable[..., Any], rank: int, world_size: int) -> Recipe:
    """Call ``make`` for one rank, and accept a Recipe or (model, dataset, loss, optimizer, settings).

    Raises:
        RecipeError: it returned something else, or what cannot be run. What ``make`` itself raises passes through.
    """
    made = make(rank, world_size) if inspect.signature(make).parameters else make()
    if isinstance(made, tuple) and len(made) in (4, 5):
        settings = made[4] if len(made) == 5 else {}
        try:
            made = Recipe(*made[:4], **settings)
        except TypeError as error:
            raise RecipeError(f"the recipe's settings do not fit: {error}.") from error
    if not isinstance(made, Recipe):
        raise RecipeError(
            f"the recipe returned a {type(made).__name__}; return lockstep.tools.align.Recipe(...), or a tuple (model, "
            "dataset, loss, optimizer, settings)."
        )
    made.check()
    return made
