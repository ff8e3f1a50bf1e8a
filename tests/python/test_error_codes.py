"""docs/errors.md and the source name the same errors."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import lockstep
from lockstep._codes import Code

ROOT = Path(__file__).parents[2]
PACKAGE = [path for path in (ROOT / "python/lockstep").rglob("*.py") if "examples" not in path.parts]

#: Exceptions whose constructor adds the code, and one that becomes such.
ADD_THEIR_CODE = ("CheckpointError", "WriterFailedError", "RecipeError", "Failed")


def _engine_codes() -> dict[str, int]:
    text = (ROOT / "csrc/core/error.h").read_text()
    enum = text[text.index("enum class Code") : text.index("};", text.index("enum class Code"))]
    return {name: int(number) for name, number in re.findall(r"(k\w+) = (\d+),", enum)}


def _documented() -> dict[str, int]:
    text = (ROOT / "docs/errors.md").read_text()
    found = re.findall(
        r"^## LS-(\d{3}) .+\n\nName in the source: `(\w+)`\.\n\n- Cause: .+\n- Example: .+\n- Remedy: .+", text, re.M
    )
    assert len(found) == text.count("\n## "), "an entry lacks its name, cause, example or remedy"
    return {name: int(number) for number, name in found}


def test_every_code_has_its_entry_and_every_entry_its_code():
    python = {code.name: code.value for code in Code if code.value > 100}
    assert _documented() == _engine_codes() | python
    assert len(set(_documented().values())) == len(_documented())


def test_every_code_is_raised_somewhere():
    sources = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    assert [name for name in _engine_codes() if f"Code::{name}" not in sources] == []
    package = "".join(path.read_text() for path in PACKAGE)
    unused = [c for c in Code if f"Code.{c.name}" not in package and f"[LS-{c.value:03}]" not in package]
    assert unused == []


def test_no_error_of_the_package_lacks_a_code():
    for path in PACKAGE:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            text = ast.unparse(node.exc)
            if text.startswith(("AssertionError", *ADD_THEIR_CODE)):
                continue
            assert "tagged(" in text or "[LS-" in text, f"{path.name}:{node.lineno}: {text}"


def test_public_names_are_there():
    assert issubclass(lockstep.LocalGradientWarning, UserWarning)
