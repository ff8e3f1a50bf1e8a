"""What one check has found."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Status(str, enum.Enum):
    """How a finding is meant. Only PROBLEM says that training will fail or be wrong."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    PROBLEM = "problem"
    UNCHECKED = "unchecked"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. ``detail``: why it matters and what to do; empty where there is nothing to say."""

    area: str
    name: str
    status: Status
    value: str
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"status": self.status.value}
