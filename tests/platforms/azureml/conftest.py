"""A workspace over TLS, as azure-ai-ml finds one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.azure_rest import HOSTS, RESOURCES, Workspace, token_for
from tests.servers.tls_hosts import Hosts, identity


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """The workspace that this process and its children find, logged in by an identity of the
    machine; nothing else is asked, and nothing that the service would refuse without a reason."""
    pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")
    from rekindle.platforms.azureml import client

    made = Workspace(compute=("cpus",))
    (tmp_path / "tls").mkdir()
    tokens = {resource: token_for(resource) for resource in RESOURCES}
    with Hosts(tmp_path / "tls", HOSTS, made.answer) as hosts, identity(tokens) as msi:
        for name, value in {**hosts.environment, **msi}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AZURE_ML_DISABLE_ON_DISK_CACHE", "True")  # of other workspaces
        monkeypatch.setitem(client._PATIENCE, "retry_backoff_factor", 0.01)
        monkeypatch.setattr(client, "_PAUSES_SECONDS", (0.0, 0.0))
        yield made
        assert hosts.strangers == []
