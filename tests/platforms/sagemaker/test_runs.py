"""Executions looked at, read, stopped and tried again: jobs really run, in a played account."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import PlatformError, UnreachableError
from rekindle.platforms.sagemaker import runs
from rekindle.platforms.sagemaker.client import submit
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.snapshot import ENDED_RUN, RunSnapshot
from rekindle.records import StepRecord
from tests.platforms.local.runs import module
from tests.platforms.marks import mark
from tests.platforms.sagemaker.conftest import service as service
from tests.servers.aws.rest import Account, Run
from tests.servers.aws.sagemaker import Turn
from tests.servers.troubles import Fault
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_compile import PLACE as KWARGS
from tests.support.sagemaker_compile import compiled
from tests.support.sagemaker_watch import account as account

PLACE = SageMakerSpec(**KWARGS)
MOST_SECONDS = 60


def until(id: str, wanted: Any) -> RunSnapshot:
    end = time.monotonic() + MOST_SECONDS
    while not wanted(seen := runs.describe(PLACE, id)):
        assert time.monotonic() < end, seen
        time.sleep(0.05)
    return seen


def step(seen: RunSnapshot, name: str) -> StepRecord | None:
    return next((one for one in seen.steps if one.name == name), None)


def printed(id: str, one: StepRecord) -> str:
    return runs.read_log(PLACE, id, one, "").text


@pytest.mark.slow
def test_an_execution_fails_is_tried_again_read_and_stopped(
    account: Account, tmp_path: Path
) -> None:
    flag, stay = tmp_path / "flag", tmp_path / "stay"
    stay.touch()
    made = compiled(module("watched").watched, {"flag": str(flag), "stay": str(stay)})
    id = submit(made, PLACE, mark("a")).id

    failed = until(id, lambda seen: seen.status in ENDED_RUN)
    counted = step(failed, "count")
    assert counted is not None
    assert (failed.status, counted.status, len(failed.steps)) == ("failed", "failed", 1)
    assert "there is no flag" in counted.error
    assert counted.started_at.endswith("+00:00")
    assert "ValueError: there is no flag" in printed(id, counted)

    flag.touch()
    account.faults = [Fault("RetryPipelineExecution", 0, after=True)]
    assert runs.resume(made, PLACE, id, mark("a-1")).id == id
    assert runs.resume(made, PLACE, id, mark("a-1")).anew is False
    seen_run = until(id, lambda seen: (one := step(seen, "tell")) and one.log)
    assert (seen_run.status, step(seen_run, "count").status, step(seen_run, "tell").status) == (
        "running",
        "succeeded",
        "running",
    )
    telling = step(seen_run, "tell")
    assert telling is not None
    end, text, cursor = time.monotonic() + MOST_SECONDS, "", ""
    while "line 6" not in text:
        piece = runs.read_log(PLACE, id, telling, cursor)
        text, cursor = text + piece.text, piece.cursor
        assert time.monotonic() < end, text
    assert text.count("line 3\n") == 1, "what was read is not read again"
    runs.cancel(PLACE, id)
    runs.cancel(PLACE, id)
    stopped = until(id, lambda seen: seen.status in ENDED_RUN)
    assert (stopped.status, step(stopped, "tell").status) == ("cancelled", "cancelled")
    runs.cancel(PLACE, id)
    assert account.calls["StopPipelineExecution"] == 1

    stay.unlink()
    runs.resume(made, PLACE, id, mark("a-2"))
    done = until(id, lambda seen: seen.status in ENDED_RUN)
    assert {one.name: one.status for one in done.steps} == {
        "count": "succeeded",
        "tell": "succeeded",
    }
    left = runs.artifacts(PLACE, id, step(done, "count"))
    assert left["model"].metadata == {"record": "none of ours"}
    assert runs.read(PLACE, left["model"].uri) == b"seven"
    with pytest.raises(FileNotFoundError):
        runs.read(PLACE, f"{left['model'].uri}/nothing")
    assert len(account.runs) == 1
    with pytest.raises(PlatformError, match="the execution is Succeeded"):
        runs.resume(made, PLACE, id, mark("a-3"))

    again = submit(made, PLACE, mark("b")).id
    cached = until(again, lambda seen: seen.status in ENDED_RUN)
    assert (step(cached, "count").cached, step(cached, "tell").cached) == (True, False)
    assert (
        runs.read(PLACE, runs.artifacts(PLACE, again, step(cached, "count"))["model"].uri)
        == b"seven"
    )
    expected = ("there is no pipeline", "log group does not exist")
    assert [line for line in account.refused if not any(e in line for e in expected)] == []


def test_a_service_that_does_not_answer_may_be_asked_later(account: Account) -> None:
    account.faults = [Fault("DescribePipelineExecution", 0) for _ in range(5)]
    with pytest.raises(UnreachableError):
        runs.describe(PLACE, "arn:aws:sagemaker:eu-central-1:123456789012:pipeline/x/execution/y")
    with pytest.raises(PlatformError, match="aws sagemaker list-pipelines") as caught:
        runs.describe(PLACE, "arn:aws:sagemaker:eu-central-1:123456789012:pipeline/x/execution/y")
    assert not isinstance(caught.value, UnreachableError)


def test_what_every_job_of_a_step_that_was_retried_is_billed_is_counted(account: Account) -> None:
    """Three jobs of one step on spot machines, whose names differ in their ends; another step is named alike."""
    id = "arn:aws:sagemaker:eu-central-1:123456789012:pipeline/p/execution/0123456789ab"
    account.runs[id] = run = Run(id, "p", "n", "", 1, status="Succeeded", ended=1_001_000.0)
    spot = {"EnableManagedSpotTraining": True}
    for number, seconds in enumerate((100, 1_000, 500)):
        run.execution.before.append(
            Turn(
                "train",
                "Training",
                1e6,
                1e6 + seconds,
                "Failed",
                "",
                False,
                f"pipelines-1-train-{number}",
                spot,
            )
        )
    run.execution.turns["train"] = run.execution.before.pop()
    run.execution.turns["train"].status = "Succeeded"
    other = Turn(
        "train-2", "Training", 1e6, 1e6 + 50, "Succeeded", "", False, "pipelines-1-train-2-0", spot
    )
    run.execution.turns["train-2"] = other
    found = {one.name: one for one in runs.describe(PLACE, id).steps}
    assert (found["train"].on_demand_seconds, found["train"].billed_seconds) == (
        1_600,
        30 + 300 + 150,
    )
    assert (found["train"].attempts, found["train-2"].on_demand_seconds) == (3, 50)
    account.faults = [Fault("ListTrainingJobs", 400, "AccessDeniedException")] * 2
    assert runs.describe(PLACE, id).steps[0].on_demand_seconds == 500, "the last one is known"
