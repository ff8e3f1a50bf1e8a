"""The version of lockstep: the only place that says it. CMake and pyproject.toml read it here."""

__version__ = "0.1.0"
