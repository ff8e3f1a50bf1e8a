"""``python -m lockstep``, and the command ``lockstep``: see ``lockstep --help``.

``python -m lockstep --cmake-prefix-path`` prints where CMake finds the package of the C++ side, and needs no extra.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the command line; without its libraries, say which extra is missing and return 2."""
    if sys.argv[1:] == ["--cmake-prefix-path"]:
        print(Path(__file__).resolve().parent)
        return 0
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"lockstep: the command line needs {error.name}, which is not installed. Install the extra 'tools': "
            "pip install --no-build-isolation 'torch-lockstep[tools]' (or: pip install click rich) [LS-146]",
            file=sys.stderr,
        )
        return 2
    from lockstep.tools.cli import commands

    return commands.main(prog_name="lockstep", standalone_mode=True) or 0


if __name__ == "__main__":
    sys.exit(main())
