"""Whoever submits is killed, at every call, before and after it takes effect: the same command goes
on with the submission, and there is one run of each."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import rekindle
from rekindle.cli.main import invoke
from tests.cli.world import World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.support.cli_killed import account as account
from tests.support.cli_killed import service_of
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3

pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")
MOST_CALLS = 60


slow = pytest.mark.slow
# of each platform that is quick to play, one side of its calls
QUICK = {("kubeflow", False), ("vertex", True)}


@pytest.mark.parametrize(
    ("platform", "after"),
    [
        pytest.param(platform, after, marks=() if (platform, after) in QUICK else slow)
        for platform in ("kubeflow", "vertex", "sagemaker", "azureml")
        for after in (False, True)
    ],
)
def test_killed_at_any_call_a_submission_is_gone_on_with(
    platform: str,
    after: bool,
    world: World,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    service, runs = service_of(platform, world, request)
    words = ["submit", "c.yaml", "--platform", platform, "--yes", "--json"]
    killed = 0
    for call in range(MOST_CALLS):
        before = runs()
        service.kill_at = (call, after)
        if ended_by_itself(words, service):
            assert len(runs() - before) == 1
            break
        killed += 1
        assert invoke(words) == 0
        id = json.loads(capsys.readouterr().out)["id"]
        assert runs() - before == {id}, f"killed at call {call}"
    else:
        raise AssertionError("it never got through")
    assert killed
    capsys.readouterr()
    records = [run.record for run in rekindle.runs(Path(".rekindle"))]
    assert sorted(r.submission.id for r in records if r.submission) == sorted(runs())


def ended_by_itself(words: list[str], service: Any) -> bool:
    """Say `words` in a process of its own: whether nobody killed it."""
    pid = os.fork()
    if pid == 0:
        os._exit(invoke(words))
    service.whom = pid
    _, status = os.waitpid(pid, 0)
    service.kill_at = None
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        return True
    assert os.WTERMSIG(status) == signal.SIGKILL
    return False
