"""Lockstep: data-parallel training on torch, with an engine of its own.

``lockstep.DistributedDataParallel`` stands in for ``torch.nn.parallel.DistributedDataParallel``: change the import,
keep the script.
"""

import torch  # noqa: F401  # first: its libraries must be in the process before ours

from lockstep._build_check import build_info, check_build
from lockstep._version import __version__

check_build()

from lockstep._install import install, uninstall  # noqa: E402
from lockstep.ddp import DistributedDataParallel  # noqa: E402

__all__ = ["DistributedDataParallel", "__version__", "build_info", "install", "uninstall"]
