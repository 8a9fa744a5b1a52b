"""The definition of a pipeline with distributed steps, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.platforms.vertex.distributed import FIT, PLACE
from tests.support.cli import rekindle

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("fits.vertex.json")


def compiled(folder: Path, seed: str) -> str:
    """What the command line writes, in a process with that order of sets if any."""
    words = [
        word
        for key, value in PLACE.items()
        if key != "labels"
        for word in ("--set", f"platforms.vertex.{key}={value}")
    ]
    words += ["--set", 'platforms.vertex.labels={"team": "search"}']
    asked = [
        "compile",
        f"{FIT.relative_to(ROOT)}:fits",
        "--platform",
        "vertex",
        *words,
        "-o",
        folder,
    ]
    if seed:
        subprocess.run(
            [sys.executable, "-m", "rekindle.cli.main", *map(str, asked)],
            cwd=ROOT,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
        )
    else:
        rekindle(*asked, cwd=ROOT)
    return (folder / "fits.vertex.json").read_text()


@pytest.mark.slow
def test_the_golden_file_is_what_compile_writes_every_time(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    first, second = (compiled(tmp_path / seed, seed) for seed in ("1", ""))
    assert first == second
    if pytestconfig.getoption("--regenerate"):
        GOLDEN.write_text(first)
    assert first == GOLDEN.read_text(), "run `make generate` and read the difference"
