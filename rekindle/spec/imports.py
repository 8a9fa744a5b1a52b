"""Which files a piece of Python needs beside itself: the modules that it imports, and
that they import, as far as those lie under given folders and are not installed.

Read off the syntax, so nothing is executed; imports inside functions count, names put
together at run time do not (`image.include` is for those)."""

import ast
import contextlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import rekindle
from rekindle.errors import RequestError
from rekindle.spec.identity import large_file_sha256

_OURS = frozenset({"rekindle", "kfp"})
_INSTALLED = frozenset({*sys.stdlib_module_names, *_OURS})
# what pip and Debian call the folders that packages are installed in
_PACKAGES = frozenset({"site-packages", "dist-packages"})


# the variable of a step's environment with a hash of the files that `image.include` names
INCLUDED = "REKINDLE_INCLUDED"


def as_import(module: str) -> str:
    """Python that needs what `python -m MODULE` runs."""
    return f"import {module}, {module}.__main__"


def folders_of(file: Path) -> tuple[Path, ...]:
    """Where the user's own modules lie, for a file of theirs: its folder, and the one above."""
    return tuple(dict.fromkeys((file.parent, file.parent.parent)))


def own_folders() -> tuple[Path, ...]:
    """The folders that this process imports from and nothing is installed in, by their names."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [Path(sysconfig.get_path(name)) for name in names]
    installed += [Path(sys.prefix), Path(rekindle.__file__).parents[1]]
    folders = []
    for entry in sys.path:
        if entry.endswith(".zip"):  # of the standard library
            continue
        folder = Path(entry or ".").absolute()  # "" is the working directory
        is_installed = any(folder.is_relative_to(place) for place in installed)
        if not is_installed and not _PACKAGES.intersection(folder.parts):
            folders.append(folder)
    return tuple(folders)


def closure(
    files: Iterable[Path],
    sources: Mapping[str, str],
    folders: Sequence[Path],
    *,
    everywhere: bool = False,
) -> dict[Path, Path]:
    """The `files` and all modules that they and the `sources` (code by what it is called)
    import, with the folder each is imported from: the first of several, or `everywhere`
    each, since a process's own path decides. RequestError for what is not Python."""
    folder_of = {file.absolute(): file.absolute().parent for file in files}
    waiting: list[tuple[Path | None, ast.AST]] = []
    waiting += [(file, _read(file)) for file in folder_of if file.suffix == ".py"]
    waiting += [(None, _parsed(text, name)) for name, text in sources.items()]
    while waiting:
        file, tree = waiting.pop()
        for module, folder in _modules(tree, file, folder_of, folders, everywhere):
            if module in folder_of:
                continue
            folder_of[module] = folder
            # of several of one name, one that is never imported may not be Python of this version
            may_fail = contextlib.suppress(RequestError) if everywhere else contextlib.nullcontext()
            with may_fail:
                waiting.append((module, _read(module)))
    return folder_of


def contents(files: Mapping[Path, Path]) -> list[list[str]]:
    """What stands for the files that `closure` found: their names when imported, and hashes."""
    rows = []
    for file, folder in files.items():
        name = file.relative_to(folder).as_posix()
        rows.append([name, large_file_sha256(file)])
    return sorted(rows)


def _modules(
    tree: ast.AST,
    file: Path | None,
    folder_of: Mapping[Path, Path],
    folders: Sequence[Path],
    everywhere: bool,
) -> Iterator[tuple[Path, Path]]:
    """The files behind the imports of a tree, each with its folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _under(folders, alias.name.split("."), everywhere)
        elif isinstance(node, ast.ImportFrom):
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                name = [*parts, alias.name]
                if not node.level:
                    yield from _under(folders, name, everywhere)
                elif file is not None:
                    package = file.parents[node.level - 1]
                    for module in _files(package, name):
                        yield module, folder_of[file]


def _under(
    folders: Sequence[Path], parts: Sequence[str], everywhere: bool
) -> Iterator[tuple[Path, Path]]:
    """A module, and the packages around it, in the first folder that has any of it, or in each."""
    if parts[0] in (_OURS if everywhere else _INSTALLED):
        return
    for folder in folders:
        files = list(_files(folder, parts))
        for file in files:
            yield file, folder
        if files and not everywhere:
            return


def _files(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Packages have an `__init__.py`, or are a folder on the way; the last part may be a name."""
    part_path = folder
    for part in parts:
        part_path = part_path / part
        module = part_path.with_name(f"{part}.py")
        package = part_path / "__init__.py"
        if package.is_file():
            yield package
        elif module.is_file():
            yield module
            return
        elif not part_path.is_dir():
            return


def _read(file: Path) -> ast.AST:
    try:
        return _parsed(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {file}: {error}", fix="check the file") from None


def _parsed(text: str, name: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        where = f"{name}:{error.lineno}"
        message = f"this is not valid Python: {error.msg}"
        raise RequestError(message, where=where, fix="correct the syntax") from None
