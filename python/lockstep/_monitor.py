"""Where all ranks stand, on demand."""

from __future__ import annotations

import signal
import weakref
from typing import Any

from lockstep import _C
from lockstep._codes import Code, tagged

#: Every wrapped model of this process, in the order of wrapping.
_models: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(model: Any) -> None:
    """Have ``dump_state`` report about ``model``."""
    _models[max(_models.keys(), default=-1) + 1] = model


def dump_state() -> dict[str, dict[int, dict[str, Any] | None]]:
    """Where every rank stands, for every wrapped model of this process.

    Reads what the ranks say about themselves in the process group's store, so it works while a collective is stuck. Not
    collective. A line is at most a second old.

    Returns:
        "0: ClassName" -> rank -> {"stage", "step", "since" (seconds), "detail", "sentence"}, or None for a rank that has
        not been heard of. Only this rank is known when the group has no store, or one written in Python.
    """
    return {
        f"{number}: {type(model.module).__name__}": model.reducer.standings()
        for number, model in sorted(_models.items())
    }


def install_signal_handler(number: int = signal.SIGUSR1) -> None:
    """Print to stderr where all ranks stand whenever this process gets signal ``number``.

    Works while Python is stuck in a collective: a thread of the engine prints. Call it on every rank; replaces what was
    installed for that signal before.

    Raises:
        ValueError: there is no such signal, or it cannot be handled.
    """
    if number not in signal.valid_signals() or number in (signal.SIGKILL, signal.SIGSTOP):
        text = f"signal {number} does not exist or cannot be handled; use signal.SIGUSR1"
        raise ValueError(tagged(Code.BAD_ARGUMENT, text))
    _C.install_signal_handler(int(number))
