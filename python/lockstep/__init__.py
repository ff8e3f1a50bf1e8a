"""Lockstep: data-parallel training on torch, with an engine of its own.

``lockstep.DistributedDataParallel`` stands in for ``torch.nn.parallel.DistributedDataParallel``: change the import,
keep the script.
"""

import torch  # first: its libraries must be in the process before ours

# Its functions keep the process group of the moment it is imported as a default argument. Torch imports it when a model
# is wrapped; that group's threads would then outlive `destroy_process_group` and could abort the process at its end.
import torch.distributed.nn  # noqa: F401

from lockstep._build_check import build_info, check_build
from lockstep._version import __version__

check_build()

from lockstep import checkpoint, data, hooks  # noqa: E402
from lockstep._codes import LocalGradientWarning  # noqa: E402
from lockstep._communicators import Nccl  # noqa: E402
from lockstep._install import install, uninstall  # noqa: E402
from lockstep._mean import mean  # noqa: E402
from lockstep._monitor import dump_state, install_signal_handler  # noqa: E402
from lockstep._outputs import register_output_type  # noqa: E402
from lockstep._print import flush0, log0, print0  # noqa: E402
from lockstep.ddp import DistributedDataParallel  # noqa: E402
from lockstep.timing import StepTimer  # noqa: E402

__all__ = [
    "DistributedDataParallel",
    "LocalGradientWarning",
    "Nccl",
    "StepTimer",
    "__version__",
    "build_info",
    "checkpoint",
    "data",
    "dump_state",
    "flush0",
    "hooks",
    "install",
    "install_signal_handler",
    "log0",
    "mean",
    "print0",
    "register_output_type",
    "uninstall",
]
