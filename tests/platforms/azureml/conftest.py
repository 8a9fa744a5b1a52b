"""A workspace over TLS, as azure-ai-ml finds one, and what lies around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.azure.facts import HOSTS, RESOURCES, Facts
from tests.servers.azure.rest import Workspace, token_for
from tests.servers.tls_hosts import Hosts, identity


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """The workspace that this process and its children find, logged in by an identity of the
    machine; nothing else is asked, and nothing that the service would refuse without a reason."""
    pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")
    from rekindle.platforms import reads
    from rekindle.platforms.azureml import client

    made = Facts(Workspace(compute=("cpus",)))
    (tmp_path / "tls").mkdir()
    tokens = {resource: token_for(resource) for resource in RESOURCES}
    with Hosts(tmp_path / "tls", HOSTS, made.answer) as hosts, identity(tokens) as msi:
        for name, value in {**hosts.environment, **msi}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AZURE_ML_DISABLE_ON_DISK_CACHE", "True")  # of other workspaces
        monkeypatch.setitem(client.PATIENCE, "retry_backoff_factor", 0.01)
        monkeypatch.setattr(client, "_PAUSES_SECONDS", (0.0, 0.0))
        monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)
        yield made.workspace
        assert hosts.strangers == []


@pytest.fixture
def facts(service: Workspace) -> Facts:
    """The workspace with what lies around it."""
    return service.around
