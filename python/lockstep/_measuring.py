"""What of the measuring tools belongs to the wrapped model: weights of micro-batches, and the times of buckets."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch.distributed as dist

from lockstep import _C
from lockstep._codes import Code, tagged
from lockstep.timing import clocks
from lockstep.timing.comm_report import CommReport, pass_of, shifted


class Measuring:
    """Mixed into ``DistributedDataParallel``, in front of torch's class."""

    _guards: bool

    def set_step_weight(self, weight: float | None) -> None:
        """Let the gradients of the coming micro-batches of this rank count ``weight`` times.

        The reduced gradient is sum(w g) / sum(w) over ranks and, under ``no_sync``, over micro-batches. With losses
        that are means over the samples or tokens of this rank, and their number as the weight, ranks with unequal
        numbers equal one process that has seen them all. Every rank sets a weight, or none does. It holds until it is
        set again, so call it before each forward. A micro-batch of weight 0 does not count, whatever its gradients
        are, NaN included; where all weights are 0, the gradient is 0.

        The weights travel with the guards' exchange: no further collective, and no wait for a device. Gradients are
        multiplied where they are packed; dividing by the sum is one pass more over the means. With "fp16", w g must
        not overflow: give tokens in units of the usual number, say.

        Args:
            weight: not negative; None: plain means again.

        Raises:
            ValueError: it is negative or no finite number.
            RuntimeError: a backward is running, or the model was built with ``guards=False``.
        """
        if weight is not None:
            if not isinstance(weight, Real) or not math.isfinite(weight) or weight < 0:
                text = f"set_step_weight: a weight is how many samples or tokens count, but is {weight!r}."
                raise ValueError(tagged(Code.BAD_WEIGHT, text))
            weight = float(weight)
            if not self._guards:
                text = "set_step_weight needs the guards, by which weights travel: construct without guards=False."
                raise RuntimeError(tagged(Code.BAD_WEIGHT, text))
        self.reducer.set_step_weight(weight)

    def record_comm(self, on: bool = True) -> None:
        """Keep the times of every bucket of the coming passes, for ``comm_report``; the newest 64 of them.

        Costs some clock readings a bucket, and on a GPU some events that nobody waits for (and NVTX ranges with the
        names of buckets and parameters). Waits for the GPU once.

        Raises:
            RuntimeError: a backward is running.
        """
        self.reducer.record(_C.RecordLevel.BUCKETS if on else _C.RecordLevel.OFF)

    def comm_report(self) -> CommReport:
        """The passes recorded since ``record_comm`` or the last report. Collective.

        Raises:
            RuntimeError: there is none. On a GPU, passes count once the GPU has left them behind: synchronise first
                to have the last one.
        """
        names, members = self.reducer.param_names, self.reducer.bucket_params()
        sizes = self.reducer.bucket_payload_bytes()
        plan = [([names[i] for i in bucket], size) for bucket, size in zip(members, sizes, strict=True)]
        own = [pass_of(times, plan) for times in self.reducer.take_recorded()]
        ranks: list[Any] = [None] * dist.get_world_size(self.process_group)
        dist.all_gather_object(ranks, own, group=self.process_group)
        behind = clocks.offsets(self.process_group)
        return CommReport(
            [
                passes if offset == 0 else [shifted(one, offset) for one in passes]
                for passes, offset in zip(ranks, behind, strict=True)
            ]
        )
