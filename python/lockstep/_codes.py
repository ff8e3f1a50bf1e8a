"""Stable numbers of the errors and warnings raised in Python, and the one warning class. docs/errors.md explains them.

Numbers below 101 belong to the C++ engine (csrc/core/error.h).
"""

from __future__ import annotations

import enum
import warnings


class LocalGradientWarning(UserWarning):
    """Gradients stayed on this rank although the user probably expects means over ranks."""


class Code(enum.IntEnum):
    """A number is never given to another meaning."""

    UNANNOUNCED = 24  # of the engine
    BUCKET_CAP = 101
    MIXED_PRECISION = 102
    DEVICE = 103
    HOOK_TWICE = 104
    NO_MANUAL_FINALIZATION = 105
    SAMPLE_RATE = 106
    ADDED_PARAMETER = 107
    OUTPUT_TYPE = 108
    WRAPPED_TWICE = 109
    INITIAL_BUFFERS = 110
    UNKNOWN_NAME = 111
    DEFAULT_GROUP_ONLY = 112
    NO_SUCH_ATTRIBUTE = 113
    BAD_OPTION = 114
    BAD_ARGUMENT = 115
    WRONG_BUILD = 116
    WRONG_DEVICES = 117
    SYNC_BATCHNORM = 118
    SPARSE_METADATA = 119
    BAD_SAMPLER = 140
    SAMPLER_STATE = 141
    REPEATED_EPOCH = 142
    BAD_MEAN = 143
    CHECKPOINT = 144
    CHECKPOINT_WRITER = 145
    MISSING_EXTRA = 146
    RECIPE = 147
    NOTHING_TIMED = 148
    BAD_WEIGHT = 149
    SHARED_HOOK_STATE = 150


#: Of the engine's warnings, those about gradients that stayed local; the others are plain UserWarnings.
_ABOUT_LOCAL_GRADIENTS = {23, 24, 25, 30, 31, 40}


def tagged(code: Code, text: str) -> str:
    """``text`` with its code behind it."""
    return f"{text} [LS-{code.value:03}]"


def warn(code: int, text: str) -> None:
    """Pass a warning of the engine, which carries its code already, to Python's ``warnings``."""
    category = LocalGradientWarning if code in _ABOUT_LOCAL_GRADIENTS else UserWarning
    warnings.warn(text, category, stacklevel=2)
