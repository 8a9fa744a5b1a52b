"""What several tests of the documentation share: a shell that knows `rekindle`, and the notebook,
executed once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.blocks import ROOT

NOTEBOOK = ROOT / "notebooks" / "01_first_run.ipynb"
PLANNED = NOTEBOOK.with_name("02_plan.ipynb")
PLATFORMS = NOTEBOOK.with_name("03_platforms.ipynb")
DEPLOYED = NOTEBOOK.with_name("04_deploy.ipynb")
WATCHED = NOTEBOOK.with_name("05_watch.ipynb")


def environment() -> dict[str, str]:
    """This Python's scripts first on PATH, one thread a process."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(scope="session")
def sh():
    """`sh(folder, "rekindle runs")` returns what the line printed; it must end with exit code 0."""

    def run(folder: Path, line: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", line],
            cwd=folder,
            env=environment(),
            timeout=280,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def executed(tmp_path_factory):
    """The folder in which a copy of the first notebook was executed, and the notebook with its
    outputs."""
    return _executed(NOTEBOOK, tmp_path_factory.mktemp("notebook"))


@pytest.fixture(scope="session")
def executed_plan(tmp_path_factory):
    """The same of the notebook that plans."""
    return _executed(PLANNED, tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="session")
def executed_platforms(tmp_path_factory):
    """The same of the notebook that compiles and submits."""
    return _executed(PLATFORMS, tmp_path_factory.mktemp("platforms"))


@pytest.fixture(scope="session")
def executed_watch(tmp_path_factory):
    """The same of the notebook that watches ten months."""
    return _executed(WATCHED, tmp_path_factory.mktemp("watched"))


@pytest.fixture(scope="session")
def executed_deployment(tmp_path_factory):
    """The same of the notebook that deploys."""
    return _executed(DEPLOYED, tmp_path_factory.mktemp("deployed"))


def _executed(path: Path, work: Path) -> tuple[Path, nbformat.NotebookNode]:
    shutil.copytree(ROOT / "configs", work / "configs")
    shutil.copytree(path.parent, work / "notebooks", ignore=shutil.ignore_patterns(".*"))
    (work / "tests").symlink_to(ROOT / "tests")  # where the servers are
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(work / "notebooks")}},
    )
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute(env=environment())
    return work / "notebooks", notebook
