"""``lockstep doctor``: what this machine is, and what stands in the way of training with several processes on it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lockstep.tools.doctor.finding import Finding, Status

__all__ = ["Finding", "Status", "examine"]


def examine(timeout: float | None = 60.0, environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Look at everything.

    Args:
        timeout: in seconds, for the two-process all-reduce; None: leave it out.
        environment: default: this process's variables.
    """
    from lockstep.tools.doctor import gpus, interfaces, limits, pair, variables, versions

    given = os.environ if environment is None else environment
    found = [*versions.check(), *variables.check(given), *gpus.check(), *interfaces.check(given), *limits.check()]
    if timeout is not None:
        found += pair.check(timeout)
    return found
