"""What is said in the words of a table: each row is named by the code beside it, each name that the code uses has a row, and what a row asks for in braces is given."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Formatter

import pytest
import yaml

ROOT = Path(__file__).parents[1] / "rekindle"
PARTS = {"data", "train", "gate"}  # of a config, which `_findings` gives to each row
Rows = Mapping[str, list[str]]


def fields(row: list[str]) -> set[str]:
    """The names in braces, without what is asked of them."""
    names = (name for text in row for _, name, _, _ in Formatter().parse(text) if name)
    return {name.partition(".")[0].partition("[")[0] for name in names}


def calls(tree: ast.Module, *names: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            yield from [node] if called in names else []


def said(path: Path, *names: str) -> Iterator[tuple[str, set[str] | None]]:
    """The rows that a module says by these functions, and what it gives to each; None for what is not known."""
    for call in calls(ast.parse(path.read_text(encoding="utf-8")), *names):
        name = call.args[0] if call.args else None
        given = {word.arg for word in call.keywords if word.arg}
        for one in (name.body, name.orelse) if isinstance(name, ast.IfExp) else (name,):
            if isinstance(one, ast.Constant):
                yield one.value, given if len(given) == len(call.keywords) else None


def wrong(rows: Rows, uses: list[tuple[str, set[str] | None]]) -> list[str]:
    found = [f"no row `{name}`" for name, _ in uses if name not in rows]
    found += [f"`{name}` is not said" for name in rows.keys() - dict(uses).keys()]
    for name, given in uses:
        if given is not None and (lacking := fields(rows.get(name, [])) - given):
            found.append(f"`{name}` is not given {lacking}")
    return found


def test_contradictions_of_a_config_are_said_by_the_rows_of_their_table() -> None:
    path = ROOT / "spec/checks.py"
    rows = yaml.safe_load(path.with_suffix(".yaml").read_text(encoding="utf-8"))
    uses = list(said(path, "_finding"))
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            given = {word.arg for call in calls(function, "_findings") for word in call.keywords}
            for node in ast.walk(function):
                if isinstance(node, ast.Dict):
                    keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                    uses += [(key, PARTS | given) for key in keys if key in rows]
    assert wrong(rows, uses) == []


def test_refusals_of_the_planner_are_said_by_the_rows_of_their_table() -> None:
    paths = sorted((ROOT / "plan").glob("*.py"))
    rows = yaml.safe_load((ROOT / "plan/refusals.yaml").read_text(encoding="utf-8"))
    uses = [use for path in paths for use in said(path, "problem")]
    sources = "".join(path.read_text(encoding="utf-8") for path in paths)
    # a script and a task are told apart where they are named
    uses += [(name, None) for name in ("script", "task") if f'"{name}"' in sources]
    assert wrong(rows, uses) == []


@pytest.mark.parametrize("path", sorted(ROOT.rglob("problems.yaml")), ids=lambda p: p.parent.name)
def test_problems_are_said_by_the_rows_of_their_tables(path: Path) -> None:
    beside = "".join(one.read_text(encoding="utf-8") for one in path.parent.glob("*.py"))
    for stem, rows in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        module = path.with_name(f"{stem}.py")
        source = module.read_text(encoding="utf-8")
        unsaid = [name for name in rows if f'"{name}"' not in beside and not name.isdigit()]
        assert unsaid == [], stem  # a number is a status of HTTP
        if "_problem = problems_in(__file__)" in source:
            assert [name for name, _ in said(module, "_problem") if name not in rows] == []
