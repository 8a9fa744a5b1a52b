"""How the tests hang together: what several share is in support/, servers/ or a conftest.py."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.figures import figures

TESTS = Path(__file__).parent


def test_no_test_imports_another() -> None:
    found = [
        f"{file.relative_to(TESTS)}:{node.lineno}"
        for file in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        and any(part.startswith("test_") for part in (node.module or "").split("."))
    ]
    assert found == []


def test_nothing_imports_in_circles_and_few_commands_import_late() -> None:
    found = figures(TESTS.parent)
    assert found["circles, imports inside functions counted"] == 0
    assert found["of these in cli and app"] < 40
