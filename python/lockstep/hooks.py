"""The comm hooks that come with the engine: how gradients become their mean over ranks.

    model.register_comm_hook(lockstep.hooks.PowerSGD(rank=2, start_iteration=100))
    model.set_comm_hook("bf16")                  # the same hooks by name; replaces whatever was there

Every hook gives the same result on all ranks, and the exact mean in a world of one. Sparse and complex gradients are
never compressed. A hook written in Python, ``hook(state, bucket) -> future``, is registered as with torch.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class NativeHook:
    """A hook of the engine and its arguments. They must be equal on all ranks."""

    #: In the engine's registry.
    name: ClassVar[str]

    def arguments(self) -> dict[str, Value]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class AllReduce(NativeHook):
    """One sum over ranks of the gradients as they are. The default.

    Args:
        division: ``"while_packing"`` multiplies by 1/ranks in the pass that packs a bucket. ``"after_packing"`` divides
            in a pass of its own, which gives the last bit of torch's ``allreduce_hook``.
    """

    name: ClassVar[str] = "allreduce"
    division: str = "while_packing"


@dataclasses.dataclass(frozen=True)
class FP16(NativeHook):
    """Half the bytes: gradients travel as fp16. Overflow becomes infinity on every rank, as GradScaler expects.

    Args:
        order: ``"divide_first"`` divides by the ranks in fp32 and casts then, so that nothing overflows where the mean
            would not; gradients that have two bytes already stay as they are. ``"cast_first"`` gives the bits of
            torch's ``fp16_compress_hook``.
    """

    name: ClassVar[str] = "fp16"
    order: str = "divide_first"


@dataclasses.dataclass(frozen=True)
class BF16(NativeHook):
    """Half the bytes: gradients travel as bf16, with the range of fp32 and 8 bits of precision.

    Args:
        order: as for ``FP16``.
    """

    name: ClassVar[str] = "bf16"
    order: str = "divide_first"


@dataclasses.dataclass(frozen=True)
class Int8(NativeHook):
    """A quarter of the bytes: 8-bit integers with one fp32 scale per 256 elements, summed in fp32.

    The error is at most half a step of the grid in each of two roundings; a step is 1/127 of the largest absolute
    value of the block. Where a block holds infinity or NaN, all of it arrives as NaN.

    Args:
        rounding: ``"nearest"``, or ``"stochastic"``, which is right in the mean.
        error_feedback: what rounding leaves out is added to the next gradient. Costs one fp32 copy of the gradients.
        seed: of stochastic rounding, 0 to 2**32 - 1.

    Source: Wang et al., ZeRO++ (arXiv:2306.10209).
    """

    name: ClassVar[str] = "int8"
    rounding: str = "nearest"
    error_feedback: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class PowerSGD(NativeHook):
    """Matrices travel as two thin factors; what that leaves out is added to the next gradient.

    A parameter counts as a matrix of its first dimension by all others. It is compressed when that saves enough:
    ``(rows + cols) * rank * min_compression_rate < rows * cols``. Everything else travels as it is, together with the
    first factor. A step in which some rank's gradients hold infinity or NaN is not compressed and leaves no trace.
    State is kept in fp32 by parameter: one copy of the compressed gradients, plus the factors.

    Args:
        rank: columns of the factors, 1 to 32; cut to the smaller side of each matrix.
        start_iteration: steps that are not compressed.
        min_compression_rate: a matrix that shrinks by less is not compressed.
        epsilon: added to norms when columns are made orthonormal, with ranks 1 and 2.
        error_feedback: keep what compression leaves out.
        warm_start: start from the factor of the last step.
        batch_same_shape: draw the first factors of equal shapes as one, as torch does with that option. Matrices of
            equal shapes are computed together in any case.
        seed: of the first factor, 0 to 2**32 - 1.

    Source: Vogels et al., PowerSGD (arXiv:1905.13727), in the form of torch's ``powerSGD_hook``.
    """

    name: ClassVar[str] = "power_sgd"
    rank: int = 1
    start_iteration: int = 1000
    min_compression_rate: float = 2.0
    epsilon: float = 0.0
    error_feedback: bool = True
    warm_start: bool = True
    batch_same_shape: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class BatchedPowerSGD(PowerSGD):
    """PowerSGD of one square matrix per bucket: fewer and larger products, a worse approximation.

    The arguments are those of ``PowerSGD``; ``min_compression_rate`` and ``batch_same_shape`` mean nothing here. Errors
    survive a new bucket plan, the factor starts anew.
    """

    name: ClassVar[str] = "batched_power_sgd"
