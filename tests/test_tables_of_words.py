"""What is said in the words of a table: each row is named by the code beside it, and each name that the code uses has a row."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1] / "rekindle"


def said(path: Path, function: str) -> Iterator[str]:
    """The rows that a module says by this function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.args[0]
        if getattr(node.func, "id", "") == function and isinstance(name, ast.Constant):
            yield name.value


@pytest.mark.parametrize("path", sorted(ROOT.rglob("problems.yaml")), ids=lambda p: p.parent.name)
def test_problems_are_said_by_the_rows_of_their_tables(path: Path) -> None:
    beside = "".join(one.read_text(encoding="utf-8") for one in path.parent.glob("*.py"))
    for stem, rows in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        module = path.with_name(f"{stem}.py")
        source = module.read_text(encoding="utf-8")
        unsaid = [name for name in rows if f'"{name}"' not in beside and not name.isdigit()]
        assert unsaid == [], stem  # a number is a status of HTTP
        if "_problem = problems_in(__file__)" in source:
            assert [name for name in said(module, "_problem") if name not in rows] == []
