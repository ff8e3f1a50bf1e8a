"""How long the parts of a training step take, on each rank: ``StepTimer``, and what became of each bucket."""

from lockstep.timing.report import PHASES, StepReport
from lockstep.timing.step_timer import StepTimer

__all__ = ["PHASES", "StepReport", "StepTimer"]
