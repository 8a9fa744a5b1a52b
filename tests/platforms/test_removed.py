"""A platform is its folder: with each of ours removed in turn, everything else imports, and the tests of the others pass."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLATFORMS = ("azureml", "kubeflow", "sagemaker", "vertex")
# imports all modules, and asks what is installed
IMPORT_ALL = """\
import importlib, pkgutil
import rekindle
names = [m.name for m in pkgutil.walk_packages(rekindle.__path__, "rekindle.") if ".shipped" not in m.name]
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rekindle"):
            raise
from rekindle.spec.installed import installed_platforms, platform_names
print(len(names), *platform_names(), *(str(one) for one in installed_platforms().left_out))
"""


def imported_when_loaded(file: Path) -> Iterator[str]:
    """The modules, and the names in modules, that a file imports outside of functions."""
    nodes: list[ast.AST] = [ast.parse(file.read_text("utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def file_of(name: str) -> Path | None:
    """Where a module of the tests lies, given its name or that of something in it."""
    for dotted in (name, name.rpartition(".")[0]):
        file = ROOT.joinpath(*dotted.split(".")).with_suffix(".py")
        if file.is_file():
            return file
    return None


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_test_of_another_platform_loads_its_folders(platform):
    unread_files = []
    for other in (*PLATFORMS, "local"):
        if other != platform:
            unread_files += (ROOT / "tests" / "platforms" / other).rglob("*.py")
    assert len(unread_files) > 50
    its_folders = (f"rekindle.platforms.{platform}.", f"tests.platforms.{platform}.")
    read_files: set[Path] = set()
    imports_of_its_folders: list[str] = []
    while unread_files:
        file = unread_files.pop()
        read_files.add(file)
        for name in imported_when_loaded(file):
            if f"{name}.".startswith(its_folders):
                imports_of_its_folders.append(f"{file.relative_to(ROOT)} imports {name}")
                continue
            imported_file = file_of(name) if name.startswith("tests.") else None
            if imported_file is not None and imported_file not in read_files:
                unread_files.append(imported_file)
    assert not imports_of_its_folders


@pytest.fixture(params=PLATFORMS)
def without(request, tmp_path):
    """A copy of the repository that lacks a platform: its name, and where."""
    name = request.param
    ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    shutil.rmtree(copy / "rekindle" / "platforms" / name)
    shutil.rmtree(copy / "tests" / "platforms" / name)
    return name, copy


def run(copy: Path, *words: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_everything_else_imports_and_it_is_named_as_left_out(without):
    name, copy = without
    done = run(copy, "-P", "-c", IMPORT_ALL, seconds=250)
    assert done.returncode == 0, done.stderr
    count, _, rest = done.stdout.strip().partition(" ")
    assert int(count) > 350
    names, _, left_out = rest.partition(" the platform ")
    assert names.split() == [other for other in PLATFORMS if other != name]
    assert left_out.startswith(f"`{name}` of rekindle is left out: No module named")
    words = ["-P", "-m", "rekindle.cli.main", "compile", "a.py:a", "--platform", name, "-o", "b"]
    refused = run(copy, *words, seconds=60)
    assert refused.returncode == 2
    assert f"the platform `{name}` of rekindle is left out" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_of_the_others_pass(without):
    name, copy = without
    others = [f"tests/platforms/{other}" for other in (*PLATFORMS, "local") if other != name]
    quiet = ("-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short")
    done = run(copy, "-m", "pytest", *quiet, *others, seconds=1700)
    assert done.returncode == 0, done.stdout[-3000:]
