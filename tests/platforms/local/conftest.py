"""Where the runs of a test work."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"
