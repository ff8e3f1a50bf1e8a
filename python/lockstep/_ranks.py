"""This process's rank and the number of ranks, also where there is no process group."""

from __future__ import annotations

import os

import torch.distributed as dist


def joined() -> bool:
    """Whether a process group exists."""
    return dist.is_available() and dist.is_initialized()


def rank_and_world(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Rank and number of ranks: of ``group``, else of the default group, else of torchrun's environment, else 0 and 1.

    The environment counts too, so that what runs before ``init_process_group`` does not take every rank for the first.
    """
    if joined():
        return dist.get_rank(group), dist.get_world_size(group)
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
