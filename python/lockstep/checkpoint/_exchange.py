"""How the ranks of a checkpoint talk: parts to and from rank 0, and whether rank 0 succeeded."""

from __future__ import annotations

import pickle
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lockstep._ranks import joined
from lockstep.checkpoint._errors import CheckpointError, WriterFailedError

#: In seconds: the longest pause between two looks at the store.
_MAX_PAUSE = 0.1


class Exchange:
    """One save or load. Collective; trivial without a process group.

    Waiting for rank 0 goes through the store and not through the group: a collective would wait as long as the group's
    timeout, which is made for training steps, and breaks the group when it expires.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self._group, self._timeout, self._together = group, timeout, joined()
        self.rank = dist.get_rank(group) if self._together else 0
        self.world_size = dist.get_world_size(group) if self._together else 1
        self._first = dist.get_global_rank(group, 0) if self._together and group is not None else 0
        if self.rank < 0:
            raise CheckpointError("this rank is not in the group of the checkpoint; only its ranks may call.")
        token = [uuid.uuid4().hex]
        if self._together:
            self._collective(dist.broadcast_object_list, token)
        self._key = f"lockstep/checkpoint/{token[0]}"

    def gather(self, part: Any) -> list[Any]:
        """Every rank's part, in the order of ranks, on rank 0; else an empty list."""
        if not self._together:
            return [part]
        parts = [None] * self.world_size if self.rank == 0 else None
        self._collective(dist.gather_object, part, parts, rank_name="dst")
        return parts or []

    def broadcast(self, value: Any) -> Any:
        """What rank 0 passes."""
        box = [value]
        if self._together:
            self._collective(dist.broadcast_object_list, box)
        return box[0]

    def scatter(self, parts: list[Any] | None) -> Any:
        """This rank's item of what rank 0 passes."""
        if not self._together:
            return parts[0]
        box = [None]
        self._collective(dist.scatter_object_list, box, parts)
        return box[0]

    def on_rank_0(self, what: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 while the others wait; its result on rank 0, None elsewhere.

        Raises:
            WriterFailedError: on the other ranks, when rank 0 failed, died, or took longer than the timeout. What rank
                0 itself raises is the CheckpointError of ``work``, or one that wraps any other exception.
        """
        if self.rank != 0:
            return self._wait_for_rank_0(what)
        try:
            result = work()
        except BaseException as error:
            self._announce(f"{type(error).__name__}: {error}")
            if isinstance(error, CheckpointError) or not isinstance(error, Exception):
                raise
            raise CheckpointError(f"[rank 0] could not {what}: {type(error).__name__}: {error}.") from error
        self._announce(None)
        return result

    def _announce(self, problem: str | None) -> None:
        if self.world_size > 1:
            _get_default_store().set(self._key, pickle.dumps(problem))

    def _wait_for_rank_0(self, what: str) -> None:
        deadline, pause = time.monotonic() + self._timeout, 0.001
        store = _get_default_store()
        try:
            # Looking and not `wait`: that would lock the store's connection, which a monitor may share.
            while not store.check([self._key]):
                if time.monotonic() > deadline:
                    raise WriterFailedError(
                        f"[rank {self.rank}] rank 0 did not {what} within {self._timeout:g} s: it died, hangs, or its "
                        "disk is slow. If it is slow, give a larger timeout. An earlier checkpoint is intact."
                    )
                time.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE)
            problem = pickle.loads(store.get(self._key))
        except dist.DistError as error:
            text = f"[rank {self.rank}] rank 0 was lost while the others waited for it to {what}: {error}."
            raise WriterFailedError(f"{text} An earlier checkpoint is intact.") from error
        if problem is not None:
            raise WriterFailedError(f"[rank {self.rank}] rank 0 could not {what}: {problem}.")

    def _collective(self, function: Callable[..., Any], *args: Any, rank_name: str = "src") -> None:
        try:
            function(*args, **{rank_name: self._first}, group=self._group)
        except RuntimeError as error:  # of c10d: a rank is gone, or came to another collective
            text = f"[rank {self.rank}] the ranks could not exchange the checkpoint's parts: {error}."
            raise CheckpointError(f"{text} All ranks must call save and load; a rank may have died.") from error
