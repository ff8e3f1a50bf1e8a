"""Refuses to load an extension that was built for another torch: it would import and then crash.

Must run before anything imports ``lockstep._C``, and never imports it itself.
"""

from __future__ import annotations

import re

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps ."


def build_info() -> dict[str, str | None]:
    """Versions this copy was built for: lockstep, torch, cuda, nccl, compiler, build_type; None: built without it.

    Raises:
        ImportError: if the extension was never built.
    """
    try:
        from lockstep._build import BUILD_INFO
    except ModuleNotFoundError as error:
        raise ImportError(
            "lockstep's extension is not built: this folder holds its sources only. "
            f"Run, in the source folder of lockstep: {REBUILD} [LS-116]"
        ) from error
    return dict(BUILD_INFO)


def check_build() -> None:
    """Compares the torch minor version of the build with that of the torch that is imported.

    Raises:
        ImportError: if they differ, or if the extension was never built.
    """
    import torch

    built_for = build_info()["torch"]
    if _minor(built_for) != _minor(torch.__version__):
        raise ImportError(
            f"lockstep was built for torch {built_for}, but torch {torch.__version__} is imported. "
            "The two do not fit together and would crash. "
            f"Build again, in the source folder of lockstep: {REBUILD} [LS-116]"
        )


def _minor(version: str) -> tuple[str, ...]:
    return re.match(r"(\d+)\.(\d+)", str(version)).groups()
