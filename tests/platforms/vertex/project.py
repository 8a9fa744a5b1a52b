"""A project over TLS, as Google's own client finds one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
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
    with found(made, tmp_path, monkeypatch):
        yield made


@contextlib.contextmanager
def found(
    made: Project, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Mapping[str, str]]:
    """How other processes find it, too: as an environment."""
    facts = Facts(made)

    def answer(asked: Asked) -> Answer:
        kept = asked.host == "storage.googleapis.com" and "/o/" in asked.path
        ours = kept or asked.host.partition(".")[0] in ("logging", "iamcredentials", "monitoring")
        return (made if ours else facts).answer(asked)

    (folder / "tls").mkdir()
    with Hosts(folder / "tls", HOSTS, answer) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file(folder)))
        monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
        yield hosts.environment
        assert hosts.strangers == []
