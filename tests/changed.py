"""Run the tests that a change can break: `python -m tests.changed BASE [PYTEST ARGUMENTS]`.

A change is what differs between the commit where this branch left BASE and the files as they are
now, new files included. What it can break is found in a graph of imports over the repository, in
which a module that is named in a string (a table of modules, a script for another process) counts
as imported. Tests are of two kinds:

- near: they lie in the folder of tests that mirrors a changed file's, they import a changed module
  themselves or through one module between, or they name the platform whose folder changed. All of
  them run, the slow ones too.
- far: they reach a changed module through others. Those that are not slow run.

`--list` prints both without running them. What has effects that no import shows (the suite's own
settings, dependencies) runs every test that is not slow beside those."""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.figures import targets

ROOT = Path(__file__).parents[1]
CODE = ("rekindle", "components", "pipelines", "tools", "containers", "tests")
# a change of these may break anything
EVERYTHING = (
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "tests/conftest.py",
    "tests/quick.py",
)
# chosen by a name in a config: what chooses them does not depend on any one of them
CHOSEN_BY_NAME = re.compile(r"rekindle\.platforms\.(azureml|kubeflow|local|sagemaker|vertex)\b")
# folders that are tested as a whole wherever a page or an example changes
ALSO = {
    "docs": ("tests/docs",),
    "notebooks": ("tests/docs",),
    "configs": ("tests/docs", "tests/spec"),
    "components": ("tests/docs", "tests/e2e"),
    "pipelines": ("tests/docs", "tests/e2e"),
    "containers": ("tests/containers",),
    "README.md": ("tests/docs",),
    "CHANGELOG.md": ("tests/docs", "tests/test_words.py"),
    "DECISIONS.md": ("tests/docs", "tests/test_words.py"),
    "CONTRIBUTING.md": ("tests/docs", "tests/test_words.py"),
}
NAMED = re.compile(r"\b(?:rekindle|components|pipelines|tools|containers|tests)(?:\.\w+)+")


def changed_files(base: str) -> set[str]:
    """Paths relative to the repository of what differs from where this branch left `base`.

    Raises CalledProcessError, with git's words on stderr, where there is no such commit."""
    merge_base = _git("merge-base", base, "HEAD").strip()
    tracked = _git("diff", "--name-only", "--no-renames", merge_base).splitlines()
    untracked = _git("ls-files", "--others", "--exclude-standard").splitlines()
    return {*tracked, *untracked}


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """What each module of the repository imports, or names in a string."""
    files = {_module(file): file for folder in CODE for file in (ROOT / folder).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        imported = targets(tree, files) | _named_in_strings(tree, files)
        # pytest gives a test the fixtures of each folder above it
        for folder in _packages(module):
            if f"{folder}.conftest" in files:
                imported.add(f"{folder}.conftest")
        # importing a module runs the packages that hold it
        for name in set(imported):
            imported |= {package for package in _packages(name) if package in files}
        graph[module] = imported - {module}
    return graph


def _module(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _packages(module: str) -> Iterable[str]:
    """The packages that hold a module, innermost last: `a` and `a.b` for `a.b.c`."""
    parts = module.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _named_in_strings(tree: ast.Module, modules: Mapping[str, Path]) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for name in NAMED.findall(node.value):
                # `rekindle.data.shard.shard` names a function of the module before the last dot
                module = name if name in modules else name.rpartition(".")[0]
                if module in modules and not CHOSEN_BY_NAME.match(module):
                    names.add(module)
    return names


def distances(graph: Mapping[str, set[str]], changed: Iterable[str]) -> dict[str, int]:
    """Of each module that reaches a changed one: over how many imports."""
    importers = collections.defaultdict(set)
    for module, imported in graph.items():
        for name in imported:
            importers[name].add(module)
    reached = dict.fromkeys(changed, 0)
    queue = collections.deque(reached)
    while queue:
        module = queue.popleft()
        for importer in importers[module]:
            if importer not in reached:
                reached[importer] = reached[module] + 1
                queue.append(importer)
    return reached


def affected(changed: set[str]) -> tuple[list[str], list[str]]:
    """Files of tests near a change, and those further away, as paths for pytest."""
    tests = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "tests").rglob("test_*.py"))
    may_break_all = bool(changed & set(EVERYTHING))
    graph = import_graph()
    reached = distances(graph, _changed_modules(changed, graph))
    folders = _tested_folders(changed)
    platforms = _changed_platforms(changed)
    near: list[str] = []
    far: list[str] = []
    for test in tests:
        distance = reached.get(_module(ROOT / test))
        mirrors = any(test == folder or test.startswith(f"{folder}/") for folder in folders)
        if mirrors or (distance is not None and distance <= 2) or _names_any(test, platforms):
            near.append(test)
        elif may_break_all or distance is not None:
            far.append(test)
    return near, far


def _changed_modules(changed: set[str], graph: Mapping[str, set[str]]) -> set[str]:
    """The modules that changed; all of a folder where a table or template beside them did."""
    modules: set[str] = set()
    for path in changed:
        if not path.startswith(CODE) or path.endswith(".md"):
            continue
        if path.endswith(".py"):
            modules.add(_module(ROOT / path))
            continue
        # of templates in a folder of their own: the modules of the package around it
        for folder in Path(path).parents:
            package = ".".join(folder.parts)
            beside = {name for name in graph if name.rpartition(".")[0] == package}
            if beside:
                modules |= beside
                break
    return modules


def _tested_folders(changed: set[str]) -> set[str]:
    """Folders and files of tests that are about the changed files."""
    folders: set[str] = set()
    for path in changed:
        parts = Path(path).parts
        folders.update(ALSO.get(parts[0], ()))
        if path.endswith(".md") and parts[0] in CODE:
            folders.add("tests/docs")
        elif parts[0] == "tests" and not path.endswith(".py"):
            folders.add(str(Path(path).parent))
        elif parts[0] == "rekindle":
            # the test of a module, or of the innermost package that has a folder of tests
            mirror = Path("tests", *parts[1:-1])
            folders.add(str(mirror / f"test_{Path(path).stem}.py"))
            if len(parts) > 2 and mirror != Path("tests/platforms"):
                folders.add(str(mirror))
    return folders


def _changed_platforms(changed: set[str]) -> set[str]:
    return {
        Path(path).parts[2]
        for path in changed
        if CHOSEN_BY_NAME.match(path.replace("/", ".")) and Path(path).parts[2] != "local"
    }


def _names_any(test: str, words: set[str]) -> bool:
    text = (ROOT / test).read_text(encoding="utf-8")
    return any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in words)


def main() -> int:
    """Print what was found and run it; returns pytest's exit code."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.stderr.write((__doc__ or "").split("\n", 1)[0] + "\n")
        return 2
    base = sys.argv[1]
    arguments = sys.argv[2:]
    try:
        changed = changed_files(base)
    except subprocess.CalledProcessError:
        sys.stderr.write(f"name a branch or a commit that git knows here, not {base}\n")
        return 2
    near, far = affected(changed)
    sys.stderr.write(
        f"{len(changed)} files differ from {base}: {len(near)} files of tests are near,"
        f" {len(far)} further away\n"
    )
    if "--list" in arguments:
        sys.stdout.write("".join(f"near {name}\n" for name in near))
        sys.stdout.write("".join(f"far {name}\n" for name in far))
        return 0
    command = [sys.executable, "-m", "pytest", *arguments]
    code = 0
    if near:
        code = _run([*command, *near])
    if far:
        code = _run([*command, "-m", "not slow", *far]) or code
    return code


def _run(command: list[str]) -> int:
    code = subprocess.run(command, cwd=ROOT).returncode
    # pytest's 5: every test of these files was left out by its marks
    return 0 if code == 5 else code


if __name__ == "__main__":
    sys.exit(main())
