"""Times the parts of a training step by hooks, without making the host wait for the device."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lockstep import _C
from lockstep._outputs import tensors_in
from lockstep.timing.report import PHASES, StepReport, gathered

Batch = TypeVar("Batch")

#: Steps whose marks are kept before they are read.
_READ_TOGETHER = 64


class Clock:
    """Marks moments: on a GPU by events that are read later and used again, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device if device.type == "cuda" else torch.device("cpu")

    def mark(self) -> _C.Moment:
        return _C.Moment.here(self.device)

    def has_passed(self, moment: _C.Moment) -> bool:
        return moment.has_passed()

    def backward_moments(self) -> _C.BackwardMoments:
        return _C.BackwardMoments(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Hook:
    """Calls a method of the timer. In a copy of the model, and in a pickled one, it does nothing."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        self._function(*arguments)

    def __reduce__(self) -> tuple[type[_Hook], tuple[Callable[..., None]]]:
        return _Hook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    pass


@dataclasses.dataclass
class _Marks:
    """One step under way: where it began, and the pieces of each phase."""

    start: _C.Moment
    pieces: list[tuple[str, _C.Moment, _C.Moment]] = dataclasses.field(default_factory=list)
    end: _C.Moment | None = None
    behind: bool = False

    def add(self, phase: str, begin: _C.Moment, end: _C.Moment) -> None:
        self.pieces.append((phase, begin, end))


class StepTimer:
    """Times data, forward, backward, exposed communication and optimizer of every step of this rank.

    A step ends with ``optimizer.step()``; what lies between two ends is one step, whatever it holds: accumulation,
    several forwards, clipping. All is found by hooks, so the loop stays as it is except for ``batches``. On a GPU the
    phases are those of its stream: time that the GPU spends, or stands idle, between two marks. Nothing waits for
    the GPU before ``report`` or ``summary``.

    =============  =========================================================================================
    data           in ``next`` of the iterator given to ``batches``; on a GPU, as far as it stood idle
    forward        from the model's forward, with its collectives, to the first gradient: so with the loss
    backward       until all gradients of this rank are there, with the packing of buckets
    communication  exposed: until the means are there; the part of the reduction that backward did not hide
    optimizer      ``optimizer.step()``
    other          the rest of the step
    =============  =========================================================================================

    Works with ``lockstep.DistributedDataParallel``, torch's, and a bare module. It does not see forwards that do not
    go through ``model(...)``, nor a model that was compiled as a whole (compile the module that is wrapped).

    Args:
        model: wrapped or not.
        optimizer: whose ``step`` ends a step. With several, the one that comes last.
        warmup: steps at the start that do not count.
        keep: the newest so many steps are kept.

    Example:
        >>> timer = lockstep.StepTimer(model, optimizer)
        >>> for batch in timer.batches(loader):
        ...     ...                                # forward, backward, optimizer.step() as before
        >>> report = timer.report()                # collective
        >>> report.print()                         # on rank 0
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, warmup: int = 3, keep: int = 10_000
    ) -> None:
        parameter = next(model.parameters(), torch.empty(0))
        self._clock = Clock(parameter.device)
        self._warmup = warmup
        self._steps: deque[dict[str, float]] = deque(maxlen=keep)
        self._pending: deque[_Marks] = deque()
        self._marks: _Marks | None = None
        self._forward: tuple[_C.Moment, _C.Moment] | None = None  # as far as it has come
        self._backward = self._clock.backward_moments()
        self._optimizer_start: _C.Moment | None = None
        self._optimizer_depth = 0  # of an optimizer whose step calls that of its base class, which has hooks of its own
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._handles = [
            # The wrapper's forward begins before that of its module; its engine hooks the end of backward behind us.
            model.register_forward_pre_hook(_Hook(self._begin_forward)),
            inner.register_forward_hook(_Hook(self._end_forward)),
            optimizer.register_step_pre_hook(_Hook(self._begin_optimizer)),
            optimizer.register_step_post_hook(_Hook(self._end_step)),
        ]

    def batches(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of ``loader``; the time spent waiting for each counts as data."""
        iterator = iter(loader)
        while True:
            marks, begin = self._current(), self._clock.mark()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            marks.add("data", begin, self._clock.mark())
            yield batch

    def restart(self) -> None:
        """Begin the next step now: what happened since the last one, an evaluation say, belongs to no step."""
        self._backward.take()
        self._forward = None
        self._marks = None

    def reset(self) -> None:
        """Forget all steps, and begin the next one now."""
        self._pending.clear()
        self._steps.clear()
        self.restart()

    def close(self) -> None:
        """Take the hooks off model and optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each phase of each finished step after the warm-up, with "step" for the whole and "host" for the
        time in which the host was done with it; "behind" is 1 where the GPU had not come as far as the optimizer by
        then, so that more speed of the host would have changed nothing. Waits for the device."""
        self._clock.synchronize()
        self._poll()
        return list(self._steps)

    def summary(self) -> StepReport:
        """This rank's steps. Waits for the device; not collective."""
        return StepReport([self.steps()])

    def report(self, group: dist.ProcessGroup | None = None) -> StepReport:
        """The steps of all ranks of ``group``. Collective; waits for the device."""
        return StepReport(gathered(self.steps(), group))

    # ---- hooks ----

    def _current(self) -> _Marks:
        if self._marks is None:
            self._marks = _Marks(self._clock.mark())
        return self._marks

    def _begin_forward(self, *_: Any) -> None:
        self._collect_backwards()
        marks = self._current()
        self._optimizer_depth = 0  # a step that threw has no end
        if self._forward is not None:  # of a forward without backward
            marks.add("forward", *self._forward)
        now = self._clock.mark()
        self._forward = (now, now)

    def _end_forward(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._forward is None:
            return
        self._forward = (self._forward[0], self._clock.mark())
        self._backward.watch(tensors_in(output))

    def _collect_backwards(self) -> None:
        """Add those that have ended, and the forward before them, which the first gradient ended."""
        for backward in self._backward.take():
            marks = self._current()
            if self._forward is not None:
                marks.add("forward", self._forward[0], backward.begin)
                self._forward = None
            marks.add("backward", backward.begin, backward.gradients)
            marks.add("communication", backward.gradients, backward.means)

    def _begin_optimizer(self, *_: Any) -> None:
        self._collect_backwards()
        self._optimizer_depth += 1
        if self._optimizer_depth == 1:
            self._optimizer_start = self._clock.mark()

    def _end_step(self, *_: Any) -> None:
        self._optimizer_depth -= 1
        if self._optimizer_depth > 0:
            return
        self._collect_backwards()  # of the optimizer's own: a closure
        marks = self._current()
        marks.end = self._clock.mark()
        marks.behind = not self._clock.has_passed(self._optimizer_start)
        marks.add("optimizer", self._optimizer_start, marks.end)
        if self._forward is not None:
            marks.add("forward", *self._forward)
            self._forward = None
        self._marks = _Marks(marks.end)
        if self._warmup > 0:
            self._warmup -= 1
            return
        self._pending.append(marks)
        if len(self._pending) >= _READ_TOGETHER:  # few events are held, and most steps read none
            self._poll()

    def _poll(self) -> None:
        while self._pending and self._clock.has_passed(self._pending[0].end):
            marks = self._pending.popleft()
            step = dict.fromkeys(PHASES, 0.0)
            for phase, begin, piece_end in marks.pieces:
                step[phase] += begin.seconds_to(piece_end)
            step["step"] = marks.start.seconds_to(marks.end)
            step["other"] = max(0.0, step["step"] - sum(step[phase] for phase in PHASES))
            step["host"] = (marks.end.host - marks.start.host) / 1e9
            step["behind"] = float(marks.behind)
            self._steps.append(step)
