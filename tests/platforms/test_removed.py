"""A platform is its folder: with each of ours removed in turn, everything else imports, and the tests of the others pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
