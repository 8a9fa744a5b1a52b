"""Which names of torch rekindle uses that a version of torch does not have: `python tests/train/oldest_torch.py FOLDER`.

FOLDER holds an unpacked wheel (or is the site-packages of an environment). Nothing of it is imported: its Python files and its type
stubs are parsed, so that a build for any machine will do. Checked are names that are imported from torch, chains of attributes of its
modules and classes, the keyword arguments of functions that can be followed to their definition, and what fakes.py replaces by name.
Methods of values, and torch.ops, need a run: `make test-oldest`. One line a missing name, exit code 1 if there is any.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The one file that may ask for names which only some versions have: it says what to do without them
COMPAT = ROOT / "rekindle" / "train" / "compat.py"
Names = dict[str, tuple[ast.AST | str, ...]]
ANYTHING = (
    "*"  # what cannot be followed: the target of a name that is computed when torch is imported
)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a dotted name stands for: a `module` by its dotted name, or a definition in one."""

    module: str
    nodes: tuple[ast.AST, ...] = ()


class Wheel:
    """The modules of an unpacked wheel, parsed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._names = cache(self._read)

    def is_module(self, dotted: str) -> bool:
        return bool(self._files(dotted)) or (self.folder / Path(*dotted.split("."))).is_dir()

    def find(self, dotted: str) -> Found | None:
        """The definition of a dotted name; None where there is none."""
        here: Found | None = Found(dotted.split(".")[0])
        for part in dotted.split(".")[1:]:
            here = self._step(here, part)
            if here is None or here.module == ANYTHING:
                return here
        return here

    def _step(self, here: Found, part: str) -> Found | None:
        if not here.nodes:
            names = self._names(here.module)
            if part in names:
                return self._followed(here.module, names[part])
            if self.is_module(f"{here.module}.{part}"):
                return Found(f"{here.module}.{part}")
            # a module that makes its names when it is imported; the stubs of torch._C list the rest
            return Found(ANYTHING) if "__getattr__" in names and here.module != "torch" else None
        classes = [node for node in here.nodes if isinstance(node, ast.ClassDef)]
        return self._of_class(here.module, classes[0], part) if classes else Found(ANYTHING)

    def _of_class(self, module: str, node: ast.ClassDef, part: str) -> Found | None:
        own = tuple(n for n in ast.walk(node) if name_of(n) == part)
        if own:
            return Found(module, own)
        if any(keyword.arg == "metaclass" for keyword in node.keywords):
            return Found(
                ANYTHING
            )  # such as torch.distributed.group, whose WORLD is a property of its metaclass
        for base in node.bases:
            dotted = dotted_name(base)
            found = self._local(module, dotted) if dotted else Found(ANYTHING)
            if found is None or not any(isinstance(n, ast.ClassDef) for n in found.nodes):
                return Found(ANYTHING)
            kind = next(n for n in found.nodes if isinstance(n, ast.ClassDef))
            inherited = self._of_class(found.module, kind, part)
            if inherited is not None:
                return inherited
        return None

    def _local(self, module: str, dotted: str) -> Found | None:
        head, _, rest = dotted.partition(".")
        here = self._names(module).get(head)
        found = self._followed(module, here) if here else None
        for part in filter(None, rest.split(".")):
            found = self._step(found, part) if found else None
        return found

    def _followed(self, module: str, nodes: tuple[ast.AST | str, ...]) -> Found | None:
        """The definition behind names that a module may only have imported."""
        target = nodes[-1]
        if isinstance(target, str):
            return Found(target) if self.is_module(target) else self.find(target)
        return Found(module, tuple(n for n in nodes if isinstance(n, ast.AST)))

    def _files(self, dotted: str) -> list[Path]:
        path = self.folder / Path(*dotted.split("."))
        tried = [
            path / "__init__.py",
            path / "__init__.pyi",
            path.with_suffix(".py"),
            path.with_suffix(".pyi"),
        ]
        return [file for file in tried if file.is_file()]

    def _read(self, module: str) -> Names:
        """Names at the top level of a module: its definitions, or the dotted name they are imported from."""
        found: Names = {}
        if module == "torch":  # copies what its C modules hold
            for other in ("torch._C", "torch._C._VariableFunctions"):
                found |= {n: v for n, v in self._names(other).items() if v != (f"torch.{n}",)}
        for file in self._files(module):
            package = module if file.stem == "__init__" else module.rpartition(".")[0]
            for node in top_level(ast.parse(file.read_text())):
                stub = file.suffix == ".pyi"
                if isinstance(node, ast.ImportFrom):
                    here = self._imported(module, package, node)
                    weaker = stub or node.names[0].name == "*"
                    found |= {n: v for n, v in here.items() if n not in found or not weaker}
                elif isinstance(node, ast.Import):
                    found |= imported_modules(node)
                else:
                    for name in names_of(node):
                        overloads = (
                            found.get(name, ())
                            if stub and isinstance(node, ast.FunctionDef)
                            else ()
                        )
                        found[name] = (*overloads, node)
        return found

    def _imported(self, module: str, package: str, node: ast.ImportFrom) -> Names:
        source = absolute(node, package)
        if not source.startswith("torch"):
            return {(a.asname or a.name): (node,) for a in node.names}
        if node.names[0].name == "*":
            return {n: v for n, v in self._names(source).items() if v != (f"{module}.{n}",)}
        here = {(a.asname or a.name): f"{source}.{a.name}" for a in node.names}
        # `from . import x` names a submodule, which is found by its file
        return {n: (t,) for n, t in here.items() if t != f"{module}.{n}"}


def imported_modules(node: ast.Import) -> Names:
    found: Names = {}
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        whole = alias.name if alias.asname else name
        found[name] = (whole if whole.startswith("torch") else node,)
    return found


def top_level(tree: ast.AST) -> Iterator[ast.stmt]:
    """Statements of a module, those inside `if`, `try` and `with` as well."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler | ast.For):
            yield from top_level(node)
        elif isinstance(node, ast.stmt):
            yield node


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [n.id for t in targets if t is not None for n in ast.walk(t) if isinstance(n, ast.Name)]


def name_of(node: ast.AST) -> str:
    """The name that a statement in a class gives to something; `self.x = ...` included."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return ""


def absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def dotted_name(node: ast.AST) -> str:
    """`a.b.c` of such an expression, or ""."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted_name(node.value)):
        return f"{head}.{node.attr}"
    return ""


class Uses(ast.NodeVisitor):
    """The dotted names of torch that one file uses, with the keyword arguments that each is called with."""

    def __init__(self, tree: ast.AST) -> None:
        self.known: dict[str, str] = {}
        self.found: list[tuple[int, str, frozenset[str]]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "torch":
                        self.known[alias.asname or "torch"] = (
                            alias.name if alias.asname else "torch"
                        )
                        self._use(node, alias.name)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                for alias in node.names:
                    dotted = f"{node.module}.{alias.name}"
                    self.known[alias.asname or alias.name] = dotted
                    self._use(node, dotted)
        self.visit(tree)

    def _use(self, node: ast.AST, dotted: str, keywords: frozenset[str] = frozenset()) -> None:
        if not dotted.startswith(("torch.ops", "torch.classes")):
            self.found.append((node.lineno, dotted, keywords))

    def _torch_name(self, node: ast.AST) -> str:
        head, _, rest = dotted_name(node).partition(".")
        origin = self.known.get(head, "")
        return f"{origin}.{rest}".rstrip(".") if origin else ""

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if name := self._torch_name(node):
            self._use(node, name)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function, arguments = node.func, node.args
        if dotted_name(function) == "functools.partial" and arguments:
            function = arguments[0]
        if dotted_name(function) == "replaced" and isinstance(arguments[1], ast.Constant):
            if owner := self._torch_name(arguments[0]):
                self._use(node, f"{owner}.{arguments[1].value}")
        elif name := self._torch_name(function):
            self._use(node, name, frozenset(k.arg for k in node.keywords if k.arg))
        self.generic_visit(node)


def accepts(found: Found, keyword: str, wheel: Wheel) -> bool:
    """Whether a function or the initialiser of a class takes the keyword, as far as it can be seen."""
    functions = []
    for node in found.nodes:
        if isinstance(node, ast.ClassDef):
            made = wheel._of_class(found.module, node, "__init__")
            functions += [n for n in made.nodes if isinstance(n, ast.FunctionDef)] if made else []
        elif isinstance(node, ast.FunctionDef):
            functions.append(node)
    if not functions or len(functions) < len(
        [n for n in found.nodes if not isinstance(n, ast.ClassDef)]
    ):
        return True
    return any(
        f.args.kwarg is not None
        or keyword in {a.arg for a in (*f.args.args, *f.args.kwonlyargs, *f.args.posonlyargs)}
        for f in functions
    )


def missing(wheel: Wheel, files: list[Path]) -> list[str]:
    """`file:line name` for each thing that the wheel does not have."""
    lines = []
    for file in files:
        uses = Uses(ast.parse(file.read_text()))
        for line, dotted, keywords in sorted(uses.found, key=lambda use: (use[0], use[1])):
            found = wheel.find(dotted)
            where = f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}:{line}"
            if found is None:
                lines.append(f"{where} {dotted}")
            elif found.module != ANYTHING and found.nodes:
                lines += [
                    f"{where} {dotted}({k}=)"
                    for k in sorted(keywords)
                    if not accepts(found, k, wheel)
                ]
    return list(dict.fromkeys(lines))


def sources() -> list[Path]:
    """Every file of the library, the components, the images and the trace of memory, but the one that knows of the differences."""
    folders = (
        ROOT / name for name in ("rekindle", "components", "containers", "tests/plan/traced")
    )
    return [f for folder in folders for f in sorted(folder.rglob("*.py")) if f != COMPAT]


def main(folder: str) -> int:
    wheel = Wheel(Path(folder))
    if not wheel.is_module("torch.nn"):
        sys.exit(f"{folder} holds no torch: unpack a wheel there, or name a site-packages")
    found = missing(wheel, sources())
    print("\n".join(found) or "rekindle uses nothing of torch that is not there")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
