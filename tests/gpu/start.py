"""The first check: does the engine import with nothing but what a training needs, and does the selftest pass?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from containers import selftest
from tests.gpu.here import ROOT, Here, Row

# packages of the control plane, of tracking and of data sources, which a machine that only trains need not have
UNNEEDED = (
    "kfp",
    "mlflow",
    "datasets",
    "pandas",
    "google.cloud",
    "boto3",
    "azure",
    "kubernetes",
    "moto",
    "IPython",
)
_BLOCK = """
import sys
from importlib.machinery import PathFinder
class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in {unneeded!r}):
            return None
        return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Without if one is PathFinder else one for one in sys.meta_path]
"""


def without_unneeded(folder: Path) -> dict[str, str]:
    """An environment in which no Python process can import what a training does not need."""
    (folder / "sitecustomize.py").write_text(_BLOCK.format(unneeded=UNNEEDED))
    path = [
        str(folder),
        str(ROOT),
        *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)),
    ]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def check_start(here: Here) -> Iterator[Row]:
    """Imports the worker, and asks the selftest for what concerns training."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import {selftest.WORKER}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    seconds = time.perf_counter() - began
    said = done.stderr.strip().splitlines()[-1:] or [f"{seconds:.1f} s"]
    yield here.judged(f"import {selftest.WORKER}", said[0], done.returncode == 0)
    for check in (
        selftest.check_temporary(Path("/tmp")),
        *selftest.check_torch(),
        selftest.check_ranks(),
    ):
        yield here.judged(f"selftest: {check.name}", f"{check.what} {check.fix}".strip(), check.ok)
