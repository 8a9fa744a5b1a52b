"""How the tests hang together: what several share is in support/, servers/ or a conftest.py."""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.figures import figures

TESTS = Path(__file__).parent
ROOT = TESTS.parent


@functools.cache
def trees() -> list[tuple[str, ast.Module]]:
    files = sorted(TESTS.rglob("*.py"))
    return [(str(f.relative_to(TESTS)), ast.parse(f.read_text(encoding="utf-8"))) for f in files]


def test_no_test_imports_another() -> None:
    found = [
        f"{name}:{node.lineno}"
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and any(part.startswith("test_") for part in (node.module or "").split("."))
    ]
    assert found == []


def scripts(tree: ast.Module) -> Iterator[tuple[int, ast.Module]]:
    """Python that stands in a string, such as what another process is given to run."""
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "import " in text:
            try:
                yield node.lineno, ast.parse(textwrap.dedent(text))
            except SyntaxError:
                continue


def defines(module: str, name: str) -> bool:
    """Whether the module of ours binds that name at its top, or has a module of that name."""
    path = ROOT.joinpath(*module.split("."))
    if (path / f"{name}.py").exists() or (path / name).is_dir():
        return True
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return False
    bound = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                bound.add(node.name)
            case ast.Name(ctx=ast.Store()):
                bound.add(node.id)
            case ast.Import() | ast.ImportFrom():
                bound |= {alias.asname or alias.name for alias in node.names}
    return name in bound


def test_what_scripts_in_strings_import_from_us_is_there() -> None:
    """Nobody else looks into a string: a name that moves would be missed only when the test runs, and slow ones run rarely."""
    found = [
        f"{name}:{line}: from {node.module} import {alias.name}"
        for name, tree in trees()
        for line, script in scripts(tree)
        for node in ast.walk(script)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").split(".")[0] in ("tests", "rekindle")
        for alias in node.names
        if not defines(node.module or "", alias.name)
    ]
    assert found == []


@pytest.mark.slow  # `make check` finds circles, too
def test_nothing_imports_in_circles_and_few_commands_import_late() -> None:
    found = figures(ROOT)
    assert found["circles, imports inside functions counted"] == 0
    assert found["circles, imports for types counted, too"] == 0
    assert found["of these in cli and app"] < 40
