"""A service and a task of it, where a container can have a /gcs of its own."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.platforms.vertex.distributed import Task
    from tests.servers.google.vertex import Vertex


@functools.cache
def can_mount() -> bool:
    """Whether this machine lets us give a container a /gcs of its own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    try_it = 'mkdir -p /gcs && mount --bind "$0" /gcs'
    done = subprocess.run(["unshare", "-m", "sh", "-c", try_it, "/tmp"], capture_output=True)
    return done.returncode == 0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Vertex]:
    if not can_mount():
        pytest.skip("this machine lets us mount no /gcs")
    from tests.platforms.vertex.distributed import RUN
    from tests.servers.google.vertex import Vertex

    (tmp_path / "gcs").mkdir()
    with Vertex(tmp_path / "gcs") as running:
        running.runs[RUN] = {"name": RUN, "state": "PIPELINE_STATE_RUNNING"}
        yield running


@pytest.fixture
def task(service: Vertex, tmp_path: Path) -> Task:
    from tests.platforms.vertex.distributed import Task

    (tmp_path / "notes").mkdir()
    return Task(service, tmp_path / "notes")
