"""The checks of a GPU, one a test; without one they are skipped. Their rows make up FOLDER/gpu.md, where REKINDLE_GPU_CHECKS names a folder."""

import os
from pathlib import Path

import pytest
import torch

from tests.gpu import runner, table
from tests.gpu.here import Here


@pytest.fixture(scope="module")
def folder():
    """Where results are left; the table is written when all checks are done."""
    path = Path(os.environ.get("REKINDLE_GPU_CHECKS", "gpu-checks"))
    yield path
    if path.exists():
        text = table.markdown(table.read_all(path, list(runner.CHECKS)), runner.TITLES)
        (path / "gpu.md").write_text(text + "\n")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", runner.CHECKS)
def test_the_check_finds_no_fault(name, folder):
    if not torch.cuda.is_available():
        pytest.skip(f"check {runner.CHECKS[name].title}: no CUDA device here")
    result = runner.run(name, Here.of("cuda", False), folder / f"{name}.log")
    result.write(folder)
    for row in result.rows:
        print(f"{row.result:<20} {row.seen}: {row.figure}")
    assert result.rows
    assert not result.failed, result.failed
