"""Calls CMake and copies what it installs: CMakeLists.txt is the one description of the build.

Environment: CMAKE_ARGS (added to the configure step), MAX_JOBS or CMAKE_BUILD_PARALLEL_LEVEL (parallel compilers),
LOCKSTEP_BUILD_DIR (default build/release; kept, so that the next build is incremental), and what CMake itself reads
(CXX, CXXFLAGS, CMAKE_PREFIX_PATH).
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
MINIMUM_TORCH = (2, 11)
# A translation unit with torch's headers takes up to 2 GB; the linker and the rest of the machine want some too.
BYTES_PER_JOB = 3 * 1024**3


def check_torch() -> str:
    """Returns the version of the torch to build for; ends with one sentence when there is none, or it is too old."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "lockstep: torch was not found by the Python that builds lockstep: install torch>=2.11 first, "
            "then run pip install with --no-build-isolation so that lockstep is built for that torch."
        ) from None
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    if (int(major), int(minor)) < MINIMUM_TORCH:
        raise SystemExit(f"lockstep: needs torch 2.11 or newer, but torch {version} is installed.")
    return version


def find_tool(name: str, hint: str) -> str:
    # The scripts folder last: `.venv/bin/pip install` finds tools from pip without an activated environment.
    path = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")]))
    if path is None:
        raise SystemExit(f"lockstep: {name} was not found; install it: {hint}.")
    return path


def parallel_jobs() -> str:
    for variable in ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL"):
        if os.environ.get(variable):
            return os.environ[variable]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return str(max(1, min(cores, memory // BYTES_PER_JOB)))


class CMakeBuild(build_ext):
    """Configures, builds and installs into the package folder; in place for an editable install."""

    def run(self) -> None:
        torch_version = check_torch()
        cmake = find_tool("cmake", "pip install cmake, or Debian's cmake; 3.25 or newer")
        ninja = find_tool("ninja", "pip install ninja, or Debian's ninja-build")
        build_dir = Path(os.environ.get("LOCKSTEP_BUILD_DIR", ROOT / "build" / "release")).resolve()
        print(f"lockstep: building for torch {torch_version} in {build_dir}", flush=True)

        configure = [cmake, "-S", ROOT, "-B", build_dir, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        configure += ["-DCMAKE_BUILD_TYPE=Release", "-DLOCKSTEP_TESTS=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
        self.cmake(configure + shlex.split(os.environ.get("CMAKE_ARGS", "")))
        self.cmake([cmake, "--build", build_dir, "--parallel", parallel_jobs()])
        for component in ("cpp", "python"):
            self.cmake([cmake, "--install", build_dir, "--prefix", self.package_dir(), "--component", component])

    def cmake(self, command: list) -> None:
        try:
            subprocess.run([str(word) for word in command], check=True)
        except subprocess.CalledProcessError as error:
            # CMake has said what is wrong; a Python traceback below would only hide it.
            raise SystemExit(f"lockstep: the build stopped (exit status {error.returncode}); see above.") from None

    def package_dir(self) -> Path:
        return ROOT / "python" / "lockstep" if self.inplace else Path(self.build_lib).resolve() / "lockstep"

    # setuptools asks these to place and list the files of an extension; `run` has placed them.
    def get_outputs(self) -> list[str]:
        return []

    def get_output_mapping(self) -> dict[str, str]:
        return {}


# The one entry makes setuptools tag the wheel with this platform and Python.
setup(ext_modules=[Extension("lockstep._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
