"""What tests share with cli/test_submit.py."""

from __future__ import annotations

import pytest

from tests.platforms.azureml.conftest import service as service
from tests.servers.azure.rest import SUBSCRIPTION

WORKSPACE = [
    f"platforms.azureml.subscription={SUBSCRIPTION}",
    "platforms.azureml.resource_group=rg",
    "platforms.azureml.workspace=forge",
]


WEEKLY = "schedule={cron: 0 3 * * 1, timezone: Europe/Berlin}"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """The records of submissions."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here" / ".rekindle"
