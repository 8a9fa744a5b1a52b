"""What tests share with platforms/kubeflow/test_client.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow import client
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.submission import Definition
from tests.platforms.local.runs import module
from tests.servers.kubeflow.rest import TOKEN, Server, serving

IMAGE = "registry.example.com/train@sha256:" + "0" * 64


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, KubeflowSpec]]:
    """A server, and the config's section for it."""
    made = Server()
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    with serving(made) as url:
        yield made, KubeflowSpec(host=url, token="env:KFP_TOKEN", image=IMAGE)


Served = tuple[Server, KubeflowSpec]


def definition(word: str = "a") -> Definition:
    text = compile_function(module("behaviour").chain)
    return compile(text, read(text), {"folder": "x", "text": word}, KubeflowSpec())
