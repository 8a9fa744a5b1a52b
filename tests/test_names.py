"""Names of the library that tests, tools and benchmarks reach as `module.name` exist.

No type checker reads the tests, and some of them run only where there is a GPU or on a night:
a name that moved would be found there, and late."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("tests", "tools", "components", "pipelines")


def file_of(module: str) -> Path | None:
    """The file of a module of rekindle; None where there is none."""
    path = ROOT / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


@functools.cache
def names_in(file: Path) -> frozenset[str]:
    """What the file binds on its first level, also inside of `if` and `try`, and the modules
    beside it, where it is a package."""
    names = {"__file__", "__name__", "__doc__", "__path__"}
    waiting: list[ast.AST] = list(ast.parse(file.read_text(encoding="utf-8")).body)
    while waiting:
        node = waiting.pop()
        match node:
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.AsyncFunctionDef(name):
                names.add(name)
            case ast.Import(aliases) | ast.ImportFrom(_, aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.Name(name, ast.Store()):
                names.add(name)
            case _:
                waiting += ast.iter_child_nodes(node)
    if file.name == "__init__.py":
        names |= {path.stem for path in file.parent.iterdir()}
    return frozenset(names)


def imported_in(tree: ast.AST) -> Iterator[tuple[int, str, ast.alias]]:
    """(Line, module of rekindle, what is imported from it)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rekindle"):
            for alias in node.names:
                yield node.lineno, str(node.module), alias


def modules_in(tree: ast.AST) -> dict[str, str]:
    """Modules of rekindle by what a file calls them, less names that it also gives to a
    variable or an argument."""
    modules = {}
    for _, package, alias in imported_in(tree):
        module = f"{package}.{alias.name}"
        if file_of(module):
            modules[alias.asname or alias.name] = module
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.arg(name):
                modules.pop(name, None)
    return modules


def reached(file: Path) -> Iterator[tuple[int, str, str]]:
    """(Line, module of rekindle, name in it) of all that a file reaches or replaces."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for line, module, alias in imported_in(tree):
        yield line, module, alias.name
    modules = modules_in(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name(module), name) if module in modules:
                yield node.lineno, modules[module], name
            # monkeypatch.setattr(module, "name", ...)
            case ast.Call(ast.Attribute(_, "setattr"), [ast.Name(module), ast.Constant(name), *_]):
                if module in modules:
                    yield node.lineno, modules[module], str(name)


def test_every_name_that_is_reached_exists() -> None:
    missing = []
    count = 0
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for line, module, name in reached(path):
                count += 1
                file = file_of(module)
                if file is None or name not in names_in(file):
                    missing.append(f"{path.relative_to(ROOT)}:{line}: {module} has no {name}")
    assert not missing, "\n".join(missing)
    assert count > 3_000
