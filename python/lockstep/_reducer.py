"""The engine's binding, completed by what only torch's Python code asks of a reducer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lockstep import _C


class Reducer(_C.Reducer):
    """One replica's reducer, with the method names of ``dist.Reducer``."""

    def __init__(self, *, process_group: dist.ProcessGroup, stall_threshold_ms: int, **options: Any) -> None:
        super().__init__(process_group=process_group, stall_threshold_ms=stall_threshold_ms, **options)
        self._process_group = process_group
        self._stall_threshold_ms = stall_threshold_ms
        self.param_names: list[str] = options["names"]

    def _run_allreduce_hook(self, bucket: dist.GradBucket) -> torch.futures.Future:
        """Sum one bucket in place. The future holds a list with the bucket's buffer."""
        return dist.all_reduce(bucket.buffer(), group=self._process_group, async_op=True).get_future()

    def _install_post_backward_futures(self, futures: list[torch.futures.Future]) -> None:
        """Wait for ``futures`` at the end of the backward that is reduced next."""
        self.add_final_wait(lambda: torch.futures.wait_all(futures))

    def _push_all_rebuilt_params(self) -> None:
        """Torch's joined ranks register all parameters here; ``shadow_step`` has done so already."""

    def _reset_state(self) -> None:
        """Forget whatever is under way and make a new plan after the next backward."""
        self.reset(self._process_group, self._stall_threshold_ms)

    def _update_process_group(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group
        self.reset(process_group, self._stall_threshold_ms)
