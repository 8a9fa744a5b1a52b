"""A service that takes a call, keeps the connection and says nothing: nobody waits for it for ever,
and there is one run."""

from __future__ import annotations

import json

import pytest

from rekindle.cli.main import invoke
from tests.cli.world import World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.servers.troubles import SILENCE, Fault
from tests.support.cli_killed import account as account
from tests.support.cli_killed import service_of
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3

pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")
CREATES = {
    "kubeflow": "POST runs",
    "vertex": "POST pipelineJobs",
    "sagemaker": "StartPipelineExecution",
    "azureml": "PUT jobs",
}


@pytest.mark.slow
@pytest.mark.parametrize("platform", CREATES)
def test_a_call_that_is_never_answered_is_one_run(
    platform: str,
    world: World,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from rekindle.platforms.azureml import client as azureml
    from rekindle.platforms.kubeflow import client as kubeflow
    from rekindle.platforms.sagemaker import client as sagemaker
    from rekindle.platforms.vertex import client as vertex

    for module in (kubeflow, sagemaker, vertex):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 1.0)
    monkeypatch.setitem(azureml.PATIENCE, "read_timeout", 1.0)
    service, runs = service_of(platform, world, request)
    service.faults = [Fault(CREATES[platform], SILENCE, after=True)]
    assert invoke(["submit", "c.yaml", "--platform", platform, "--yes", "--json"]) == 0
    assert runs() == {json.loads(capsys.readouterr().out)["id"]}
    assert service.faults == []
