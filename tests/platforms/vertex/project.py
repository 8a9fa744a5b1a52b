"""A project over TLS, as Google's own client finds one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.platforms.vertex import client
from tests.servers.google.project import HOSTS, Facts
from tests.servers.google.rest import Project, key_file
from tests.servers.tls_hosts import Answer, Asked, Hosts


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A project that this process finds, logged in with a key; nothing else is asked."""
    made = Project()
    facts = Facts(made)

    def answer(asked: Asked) -> Answer:
        kept = asked.host == "storage.googleapis.com" and "/o/" in asked.path
        ours = kept or asked.host in ("logging.googleapis.com", "iamcredentials.googleapis.com")
        return (made if ours else facts).answer(asked)

    (tmp_path / "tls").mkdir()
    with Hosts(tmp_path / "tls", HOSTS, answer) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file(tmp_path)))
        monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
        yield made
        assert hosts.strangers == []
