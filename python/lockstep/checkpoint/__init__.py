"""Checkpoints of a data-parallel run: whole or not at all, and a resumed run repeats the uninterrupted one.

For models too large for one rank's memory use ``torch.distributed.checkpoint``, which takes Lockstep's models as it
takes torch's.
"""

from lockstep.checkpoint._errors import CheckpointError, WriterFailedError
from lockstep.checkpoint._save_load import load, save

__all__ = ["CheckpointError", "WriterFailedError", "load", "save"]
