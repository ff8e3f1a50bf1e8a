"""Finds the tensors in whatever a forward returns."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._pytree import tree_leaves


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The tensors in ``output`` that have a graph: in lists, tuples, dicts, dataclasses and registered pytree nodes."""
    if isinstance(output, torch.Tensor):
        found = [output]
    else:
        found = list(_find_tensors(output)) or [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in found if tensor.requires_grad]
