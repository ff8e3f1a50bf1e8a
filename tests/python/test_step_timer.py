"""``StepTimer`` puts time where it was spent, on each rank; a clock that only moves when the parts of a step say so."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep import _C
from lockstep.timing import PHASES, StepReport
from lockstep.timing.report import percentile
from lockstep.timing.step_timer import Clock

#: What each part takes, in ticks. Rank 1 takes EXTRA longer in forward.
DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER, OTHER, EXTRA = 3, 5, 7, 11, 2, 4, 13


class Ticks:
    """Stands in for StepTimer's clock."""

    lags = False

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, ticks: float) -> None:
        self.now += ticks

    def mark(self) -> _C.Moment:
        return _C.Moment(int(self.now * 1e9))

    def has_passed(self, moment: _C.Moment) -> bool:
        return not self.lags

    def backward_moments(self) -> _C.BackwardMoments:
        return _C.BackwardMoments(self.mark)

    def synchronize(self) -> None:
        pass


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs: Tensor, ticks: Ticks, forward: float) -> Tensor:
        ctx.ticks = ticks
        ticks.advance(forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.ticks.advance(BACKWARD)
        return grad, None, None


class Net(nn.Module):
    def __init__(self, ticks: Ticks, forward: float = FORWARD) -> None:
        super().__init__()
        self.layer, self.ticks, self.work = nn.Linear(3, 2), ticks, forward

    def forward(self, inputs: Tensor) -> Tensor:
        return _Work.apply(self.layer(inputs), self.ticks, self.work)


class Optimizer(torch.optim.SGD):
    def __init__(self, parameters, ticks: Ticks) -> None:
        super().__init__(parameters, lr=0.1)
        self.ticks = ticks

    def step(self, closure=None):
        self.ticks.advance(OPTIMIZER)
        return super().step(closure)


def _loader(ticks: Ticks, count: int):
    for _ in range(count):
        ticks.advance(DATA)
        yield torch.ones(4, 3)


def _timed(wrap, steps: int, micro: int = 1, forward: float = FORWARD) -> tuple[lockstep.StepTimer, nn.Module]:
    ticks = Ticks()
    model = wrap(Net(ticks, forward))
    optimizer = Optimizer(model.parameters(), ticks)
    timer = lockstep.StepTimer(model, optimizer, warmup=1)
    timer._clock, timer._backward = ticks, ticks.backward_moments()
    for number, batch in enumerate(timer.batches(_loader(ticks, steps * micro)), start=1):
        if number % micro and hasattr(model, "no_sync"):
            with model.no_sync():
                model(batch).sum().backward()
            continue
        if isinstance(model, lockstep.DistributedDataParallel):
            model.reducer.add_final_wait(lambda: ticks.advance(WAIT))
        model(batch).sum().backward()
        ticks.advance(OTHER)  # clipping, say
        optimizer.step()
        optimizer.zero_grad()
    return timer, model


def _expected(**phases: float) -> dict[str, float]:
    usual = {"data": DATA, "forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER, "other": OTHER}
    full = dict.fromkeys(PHASES, 0.0) | usual | phases
    return full | {"step": sum(full.values())}


def _without_host(steps: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in step.items() if key not in ("host", "behind")} for step in steps]


def test_a_bare_module_has_every_phase_but_communication():
    timer, _ = _timed(lambda module: module, steps=4)
    assert _without_host(timer.steps()) == [_expected()] * 3  # the first is warm-up
    timer.close()


def test_a_device_that_has_not_come_as_far_as_the_optimizer_is_behind():
    timer, model = _timed(lambda module: module, steps=2)
    assert [step["behind"] for step in timer.steps()] == [0.0]
    optimizer = Optimizer(model.parameters(), model.ticks)
    optimizer.register_step_pre_hook(timer._begin_optimizer)
    optimizer.register_step_post_hook(timer._end_step)
    model.ticks.lags = True
    optimizer.step()
    assert len(timer.steps()) == 1, "a step is read when the device has passed its end"
    model.ticks.lags = False
    assert [step["behind"] for step in timer.steps()] == [0.0, 1.0]


def _steps_of_rank(kind: str, micro: int) -> list[dict[str, float]]:
    wrap = {"lockstep": lockstep.DistributedDataParallel, "torch": nn.parallel.DistributedDataParallel}[kind]
    timer, _ = _timed(wrap, steps=3, micro=micro)
    return _without_host(timer.steps())


def test_what_the_end_of_backward_waits_for_is_exposed_communication(ranks):
    for steps in ranks.run(_steps_of_rank, "lockstep", 1):
        assert steps == [_expected(communication=WAIT)] * 2


def test_torchs_class_is_timed_as_well(ranks):
    for steps in ranks.run(_steps_of_rank, "torch", 1):
        assert steps == [_expected()] * 2


def test_micro_batches_are_one_step(ranks):
    once = _expected(communication=WAIT, data=2 * DATA, forward=2 * FORWARD, backward=2 * BACKWARD)
    for steps in ranks.run(_steps_of_rank, "lockstep", 2):
        assert steps == [once] * 2


def _report() -> dict:
    rank = dist.get_rank()
    timer, _ = _timed(lockstep.DistributedDataParallel, steps=5, forward=FORWARD + EXTRA * rank)
    report = timer.report()
    assert timer.summary().num_steps == report.num_steps == 4
    text = json.dumps(report.as_dict())
    return {"json": json.loads(text), "split": report.split()[0], "slowest": report.slowest()}


def test_the_report_of_all_ranks_names_the_slow_one(ranks):
    first, second = ranks.run(_report)
    assert first == second
    assert first["slowest"] == (1, "forward", EXTRA)
    forward = first["json"]["phases"]["forward"]
    assert forward["ranks_ms"] == [1e3 * FORWARD, 1e3 * (FORWARD + EXTRA)]
    assert forward["median_ms"] == 1e3 * (FORWARD + EXTRA / 2)
    # Both wait equally in this made-up clock: so half of the extra work is skew, seen as a mean over ranks.
    assert first["split"]["skew"] == EXTRA / 2
    assert first["split"]["step"] == sum(first["split"][part] for part in (*PHASES, "skew"))


def test_waits_beyond_the_shortest_are_skew():
    fast = _expected(communication=20, forward=5)
    slow = _expected(communication=1, forward=24)
    (step,) = StepReport([[fast], [slow]]).split()
    assert step["communication"] == 1 and step["forward"] == 5
    assert step["skew"] == 19  # the fast rank waits 19 beyond the shortest, the slow one works 19 longer
    assert step["step"] == fast["step"] == slow["step"]


def test_percentiles_interpolate():
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 90, 100)] == [1.0, 2.5, 3.7, 4.0]


def test_the_table_and_tensorboard_show_every_phase():
    report = _timed(lambda module: module, steps=3)[0].summary()
    table = report.table()
    assert [*table.columns[0].cells] == [
        *("data", "forward", "backward", "exposed comm.", "optimizer", "other", "step"),
    ]
    written = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name] = (value, step)

    report.write_tensorboard(Writer(), 7)
    assert written["step_time/backward_ms"] == (1e3 * BACKWARD, 7) and len(written) == len(PHASES) + 2


def test_tensorboard_can_read_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        _timed(lambda module: module, steps=3)[0].summary().write_tensorboard(writer, 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (scalar,) = events.Scalars("step_time/backward_ms")
    assert (scalar.step, scalar.value) == (7, 1e3 * BACKWARD)


def test_no_step_is_said_with_its_reason():
    model = nn.Linear(2, 2)
    timer = lockstep.StepTimer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"no step has been timed.*LS-148"):
        timer.summary()


def test_a_step_after_restart_begins_there():
    timer, model = _timed(lambda module: module, steps=3)
    timer._clock.advance(100)  # an evaluation
    timer.restart()
    model(torch.ones(4, 3)).sum().backward()
    timer._clock.advance(OTHER)
    optimizer = Optimizer(model.parameters(), model.ticks)
    timer.close()
    optimizer.register_step_pre_hook(timer._begin_optimizer)
    optimizer.register_step_post_hook(timer._end_step)
    optimizer.step()
    assert _without_host(timer.steps())[-1] == _expected(data=0)


def test_a_backward_that_threw_is_forgotten():
    timer, model = _timed(lambda module: module, steps=2)
    output = model(torch.ones(4, 3))
    output.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    model(torch.ones(4, 3)).sum().backward()
    optimizer = Optimizer(model.parameters(), model.ticks)
    optimizer.register_step_pre_hook(timer._begin_optimizer)
    optimizer.register_step_post_hook(timer._end_step)
    optimizer.step()
    (_, last) = _without_host(timer.steps())
    assert (last["forward"], last["backward"]) == (2 * FORWARD, BACKWARD)


def test_a_copy_of_a_timed_model_is_not_timed():
    timer, model = _timed(lambda module: module, steps=2)
    model.ticks.now = 0.0
    averaged = copy.deepcopy(model)
    averaged(torch.ones(4, 3)).sum().backward()
    assert timer._forward is None and not timer._backward.take()


def test_an_evaluation_before_restart_is_in_no_step():
    timer, model = _timed(lambda module: module, steps=2)
    with torch.no_grad():
        model(torch.ones(4, 3))
    timer.restart()
    assert timer._forward is None


def test_a_backward_within_which_the_optimizer_steps_is_counted_with_the_next_step():
    timer, model = _timed(lambda module: module, steps=2)
    optimizer = Optimizer(model.parameters(), model.ticks)
    optimizer.register_step_pre_hook(timer._begin_optimizer)
    optimizer.register_step_post_hook(timer._end_step)
    model.layer.bias.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
    assert timer.steps()[-1]["backward"] > 0


def test_the_clock_of_the_host_counts_seconds():
    clock = Clock(torch.device("cpu"))
    begin = clock.mark()
    end = clock.mark()
    assert begin.has_passed() and 0 <= begin.seconds_to(end) < 60
    assert begin.seconds_to(end) == pytest.approx((end.host - begin.host) / 1e9)
