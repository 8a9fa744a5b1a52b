"""What tests share with cli/test_following.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.app import follow
from rekindle.cli.main import invoke
from rekindle.platforms.kubeflow import client
from tests.servers.kubeflow.rest import TOKEN, Server, serving

PIPELINES = Path(__file__).parents[1] / "platforms" / "pipelines"


class Here:
    """A folder with a config, and the server that it names."""

    def __init__(self, folder: Path, server: Server, url: str) -> None:
        self.folder, self.server, self.home = folder, server, folder / "home"
        self.flag, self.stay, self.config = (
            folder / "flag",
            folder / "stay",
            folder / "watched.yaml",
        )
        self.config.write_text(
            f"name: watched\npipeline: {PIPELINES}/watched.py:watched\n"
            f"arguments: {{flag: {self.flag}, stay: {self.stay}}}\n"
            f"platforms: {{kubeflow: {{host: '{url}', token: 'env:KFP_TOKEN'}}}}\n"
        )

    def say(self, *words: str) -> int:
        return invoke([*words, "--home", str(self.home)])

    def submit(self, *words: str) -> int:
        return self.say("submit", str(self.config), "--platform", "kubeflow", "--yes", *words)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    server = Server(tmp_path / "workflows")
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(follow, "PAUSE_SECONDS", 0.05)
    with serving(server) as url:
        yield Here(tmp_path, server, url)
        for workflow in server.workflows.values():
            workflow.terminate()
