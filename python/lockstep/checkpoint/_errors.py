"""What can go wrong with a checkpoint."""

from __future__ import annotations

from lockstep._codes import Code, tagged


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or continued. The same on every rank that is still there."""

    code = Code.CHECKPOINT

    def __init__(self, text: str) -> None:
        super().__init__(text if "[LS-" in text else tagged(self.code, text))


class WriterFailedError(CheckpointError):
    """Rank 0, which reads and writes for all, failed, died, or was too slow. The last checkpoint is intact."""

    code = Code.CHECKPOINT_WRITER
