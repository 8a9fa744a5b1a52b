"""How the tests hang together: what several share is in support/, servers/ or a conftest.py."""

from __future__ import annotations

import ast
from pathlib import Path

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
