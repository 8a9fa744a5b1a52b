"""Another engine and another launcher than rekindle's own, for tests that run a pipeline on a platform with each."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any

import pytest

OTHERWISE: dict[str, dict[str, str]] = {
    "deepspeed": {
        "train.engine": "deepspeed",
        "train.engine_config": "{zero_optimization: {stage: 2}}",
    },
    "mpirun": {"train.launcher": "mpirun"},
}


def skip_without(how: str) -> None:
    """Skip the test where this machine lacks what it needs."""
    if how == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    if how == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("the extra `deepspeed` is not installed")


def words_of(settings: Mapping[str, Any]) -> list[str]:
    """As arguments of a command."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
