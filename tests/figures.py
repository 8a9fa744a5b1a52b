"""Figures of the library's structure: `python tests/figures.py [TREE]`, as one JSON object.

For comparing two checkouts by the same measure; test_structure.py holds some of them."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

FOLDERS = ("rekindle", "components", "pipelines")
LONG_FUNCTION, LONG_FILE = 40, 400


def figures(root: Path) -> dict[str, int]:
    """Counts over all Python files of the library below `root`."""
    files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    functions = [node for tree in trees.values() for node in ast.walk(tree) if _is_function(node)]
    late = {
        file: sum(1 for function in _functions(tree) for _ in _imports_of_ours(function))
        for file, tree in trees.items()
    }
    settings = (root / "pyproject.toml").read_text(encoding="utf-8")
    return {
        "files": len(files),
        "lines": sum(text.count("\n") for text in texts.values()),
        f"files over {LONG_FILE} lines": sum(t.count("\n") > LONG_FILE for t in texts.values()),
        "functions": len(functions),
        f"functions over {LONG_FUNCTION} lines": sum(
            _length(function) > LONG_FUNCTION for function in functions
        ),
        "names `Any`": sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for tree in trees.values()
            for node in ast.walk(tree)
        ),
        "imports of rekindle inside functions": sum(late.values()),
        "of these in cli and app": sum(
            count
            for file, count in late.items()
            if file.relative_to(root).parts[:2] in (("rekindle", "cli"), ("rekindle", "app"))
        ),
        "circles, imports inside functions counted": len(_circles(root, trees)),
        "circles, imports for types counted, too": len(_circles(root, trees, types=True)),
        "entries of ignore_imports": len(
            re.findall(r'^\s+"[\w.*]+ -> [\w.*]+",?$', settings, re.M)
        ),
    }


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def _functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The outermost functions, methods included."""
    for node in ast.iter_child_nodes(tree):
        if _is_function(node):
            yield node
        else:
            yield from _functions(node)


def _length(function: ast.AST) -> int:
    """Lines from `def` to the last one, without the docstring."""
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    first = function.body[0]
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    words = (first.end_lineno or 0) - first.lineno + 1 if text else 0
    return (function.end_lineno or 0) - function.lineno + 1 - words


def _imports_of_ours(tree: ast.AST) -> Iterator[ast.stmt]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rekindle":
            yield node
        if isinstance(node, ast.Import) and any(n.name.startswith("rekindle") for n in node.names):
            yield node


def _circles(root: Path, trees: dict[Path, ast.Module], types: bool = False) -> list[set[str]]:
    """Sets of modules that import each other in a loop (Tarjan's strongly connected components);
    imports for types alone count with `types`."""
    names = {
        ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): file
        for file in trees
    }
    # the package itself, of which modules read the version
    aside = {"rekindle"}
    graph = {
        name: targets(trees[file], names, types) - {name} - aside for name, file in names.items()
    }
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            part: set[str] = set()
            while name not in part:
                part.add(stack.pop())
            if len(part) > 1:
                found.append(part)

    sys.setrecursionlimit(10_000)
    for name in graph:
        if name not in index:
            visit(name)
    return found


def targets(tree: ast.Module, names: Mapping[str, Path], types: bool = False) -> set[str]:
    """Those of the modules `names` that a module imports, also inside functions; imports for types
    alone count with `types`."""
    typed = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typed and not types:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            each = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in names else node.module for name in each}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & names.keys()


if __name__ == "__main__":
    where = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]
    sys.stdout.write(json.dumps(figures(where), indent=1) + "\n")
