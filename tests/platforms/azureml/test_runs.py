"""Jobs looked at, read, cancelled and gone on with: azure-ai-ml itself, over TLS, against a workspace
whose steps this file says."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.catalog.prices import Price, PriceBook
from rekindle.errors import PlatformError, UnreachableError
from rekindle.platforms.azureml import runs
from rekindle.platforms.azureml.client import steps, submit
from rekindle.platforms.snapshot import RunSnapshot
from rekindle.records import ArtifactRecord, RunRecord, StepRecord, StepStatus, Submission
from rekindle.report.costs import cost_of, stays
from tests.platforms.marks import mark
from tests.report.homes import training
from tests.servers.azure.rest import Workspace
from tests.servers.troubles import Fault
from tests.support.azureml_client import PLACE, definition

NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PAUSE_SECONDS", 0)


def ago(seconds: float) -> datetime.datetime:
    return NOW - datetime.timedelta(seconds=seconds)


def there(service: Workspace, name: str = "two-steps-1") -> str:
    """A job as one finds it, whoever made it."""
    service.jobs[name] = {"resource": service.resource(f"jobs/{name}", {"status": "Running"})}
    return name


def step(seen: RunSnapshot, name: str) -> StepRecord:
    return next(one for one in seen.steps if one.name == name)


def over(service: Workspace, id: str, status: str = "Completed") -> None:
    service.jobs[id]["resource"]["properties"]["status"] = status


def result(**more: Any) -> dict[str, bytes]:
    """What mounted.py leaves."""
    told = {"parameters": {}, "artifacts": {}, **more}
    return {"result.json": json.dumps(told).encode()}


def test_children_of_a_job_are_the_steps_that_were_planned(service: Workspace) -> None:
    made = definition()
    id = submit(made, PLACE, mark("a")).id
    assert runs.describe(PLACE, id) == RunSnapshot("running")
    service.history.step(id, "make", "Queued")
    (queued,) = runs.describe(PLACE, id).steps
    assert (queued.status, queued.reason, queued.started_at) == (
        "pending",
        "waits for a machine",
        "",
    )
    run = service.history.step(id, "make", "Running", start_time_utc=ago(60))
    (making,) = runs.describe(PLACE, id).steps
    assert (making.name, making.status, making.attempts, making.log) == ("make", "running", 1, run)
    assert making.started_at == ago(60).isoformat(timespec="seconds")
    assert making.seconds is not None
    assert making.seconds >= 60

    service.history.step(id, "make", "Completed", end_time_utc=ago(20))
    service.history.left(run, "rekindle_result", result())
    used = service.history.step(
        id, "condition_1_use", "Completed", start_time_utc=ago(9), end_time_utc=ago(8)
    )
    service.history.left(used, "rekindle_result", result(skipped=True))
    assert step(runs.describe(PLACE, id), "condition_1_use").status == "succeeded", (
        "nobody looks yet"
    )
    over(service, id)
    seen = runs.describe(PLACE, id)
    assert seen.status == "succeeded"
    assert seen.ended_at == datetime.datetime(2026, 11, 22, 12, tzinfo=datetime.UTC)
    planned = [one.step for one in steps(made)]
    assert planned == ["make", "condition_1_use"], "one that reads another one follows it"
    assert {one.name for one in seen.steps} == {*planned}
    assert (step(seen, "make").status, step(seen, "make").seconds) == ("succeeded", 40.0)
    used_one = step(seen, "condition_1_use")
    assert (used_one.status, used_one.reason) == ("skipped", "its condition does not hold")
    service.history.denied = True
    assert step(runs.describe(PLACE, id), "condition_1_use").status == "succeeded"


STATES: dict[str, StepStatus] = {
    "NotStarted": "pending",
    "Queued": "pending",
    "Starting": "running",
    "Preparing": "running",
    "Provisioning": "running",
    "Running": "running",
    "Finalizing": "running",
    "CancelRequested": "running",
    "NotResponding": "running",
    "Paused": "running",
    "Completed": "succeeded",
    "Failed": "failed",
    "Canceled": "cancelled",
}


def test_every_status_of_a_step_has_a_word(service: Workspace) -> None:
    from azure.ai.ml.operations._run_history_constants import RunHistoryConstants

    assert STATES.keys() == {"Finalizing", *RunHistoryConstants.ALL_STATUSES}
    id = there(service)
    for at, state in enumerate(STATES):
        service.history.step(id, f"step-{at}", state)
    assert [one.status for one in runs.describe(PLACE, id).steps] == [*STATES.values()]


def test_a_job_that_failed_says_why_once(service: Workspace) -> None:
    id = there(service)
    service.history.step(id, "make", "Failed", why="Execution failed. ValueError: n")
    over(service, id, "Failed")
    seen = runs.describe(PLACE, id)
    assert (seen.status, seen.error) == ("failed", "")
    assert step(seen, "make").error == "Execution failed. ValueError: n"
    other = there(service, "another")
    over(service, other, "Failed")
    assert runs.describe(PLACE, other).error == "a step of the job failed"


@pytest.mark.slow
def test_a_step_that_was_reused_has_the_log_and_the_outputs_of_that_one(service: Workspace) -> None:
    first, second = (there(service, name) for name in ("first", "second"))
    run = service.history.step(first, "make", "Completed", start_time_utc=ago(9))
    service.history.left(run, "rekindle_result", result())
    reused = {"azureml.isreused": "true", "azureml.reusedrunid": run}
    service.history.step(second, "make", "Completed", properties=reused, start_time_utc=ago(2))
    over(service, second)
    again = step(runs.describe(PLACE, second), "make")
    assert (again.cached, again.reason, again.log, again.attempts) == (
        True,
        "taken from an earlier job",
        run,
        0,
    )


def reader(run: str) -> Callable[..., str]:
    """What one who follows the log gets to see by each call."""
    cursor = [""]

    def more(status: StepStatus = "running") -> str:
        one = StepRecord(name="make", log=run, status=status)
        piece = runs.read_log(PLACE, "any", one, cursor[0])
        cursor[0] = piece.cursor
        return piece.text

    return more


def test_a_log_is_read_once_whatever_comes_in_between(service: Workspace) -> None:
    id = there(service)
    run = service.history.step(id, "make", "Running")
    more = reader(run)
    assert more() == ""
    service.history.printed(run, "grüße\nand h".encode())
    service.history.printed(run, b"of no interest\n", "system_logs/lifecycler/lifecycler.log")
    service.faults = [
        Fault("GET history details", 503),
        Fault("GET blob", 503),
        Fault("GET blob", 0),
    ]
    assert more() == "grüße\n", "half a line waits for the rest of it"
    assert service.faults == []
    service.history.printed(run, b"alf\nthe last word")
    assert more() == "and half\n"
    assert more() == ""
    assert more("failed") == "the last word\n"
    assert more("failed") == ""
    assert runs.read_log(PLACE, "any", StepRecord(name="make"), "") == runs.LogPiece("", "")


def test_a_log_of_several_machines_says_whose_line_it_is(service: Workspace) -> None:
    id = there(service)
    run = service.history.step(id, "make", "Running")
    more = reader(run)
    for node in (1, 0):
        service.history.printed(run, b"hello\n", f"user_logs/std_log_process_{node:02d}.txt")
    assert more() == "[node 0] hello\n[node 1] hello\n"
    service.history.printed(run, b"bye\n", "user_logs/std_log_process_01.txt")
    assert more() == "[node 1] bye\n"


def test_what_a_step_left_is_listed_and_read(service: Workspace) -> None:
    id = there(service)
    run = service.history.step(id, "make", "Completed")
    told = {"Data-1": {"uri": "/tmp/x", "metadata": {"record": "training"}}, "lost": {}}
    one = StepRecord(name="make", log=run)
    assert runs.artifacts(PLACE, id, one) == {}
    service.history.left(run, "rekindle_result", result(artifacts=told))
    service.history.left(run, "data_1", {"data/training.json": b"{}", ".rekindle": b"{}"})
    service.faults = [
        Fault("POST history", 503),
        Fault("GET blob", 503),
        Fault("GET datastores", 0),
    ]
    (found,) = runs.artifacts(PLACE, id, one).items()
    assert service.faults == []
    assert found[0] == "Data-1"
    assert found[1].metadata == {"record": "training"}
    assert found[1].uri.endswith(f"/datastores/workspaceblobstore/paths/azureml/{run}/data_1/data")
    assert runs.read(PLACE, f"{found[1].uri}/training.json") == b"{}"
    for missing in (found[1].uri, f"{found[1].uri}/nothing", "hf://somebody/model"):
        with pytest.raises(FileNotFoundError):
            runs.read(PLACE, missing)
    service.history.denied = True
    with pytest.raises(PlatformError, match="`Storage Blob Data Contributor`"):
        runs.read(PLACE, f"{found[1].uri}/training.json")


@pytest.mark.slow
def test_a_job_is_cancelled_as_often_as_one_likes(service: Workspace) -> None:
    id = submit(definition(), PLACE, mark("a")).id
    service.faults = [Fault("POST jobs cancel", 0, after=True)]
    for _ in range(2):
        runs.cancel(PLACE, id)
    assert runs.describe(PLACE, id).status == "cancelled"
    with pytest.raises(PlatformError, match="az ml job list"):
        runs.describe(PLACE, "nothing")


def test_what_failed_is_gone_on_with_by_one_new_job(service: Workspace) -> None:
    made = definition()
    id = submit(made, PLACE, mark("a")).id
    with pytest.raises(PlatformError, match="the job is NotStarted"):
        runs.resume(made, PLACE, id, mark("a-1"))
    over(service, id, "Failed")
    service.faults = [Fault("PUT jobs", 0, after=True)]
    again = runs.resume(made, PLACE, id, mark("a-1"))
    assert again.id != id
    assert runs.resume(made, PLACE, id, mark("a-1")).id == again.id
    assert len(service.jobs) == 2
    sent = [job["asked"]["properties"]["jobs"] for job in service.jobs.values()]
    assert sent[0] == sent[1]
    over(service, again.id)
    with pytest.raises(PlatformError, match="the job is Completed"):
        runs.resume(made, PLACE, again.id, mark("a-2"))


def test_a_service_that_does_not_answer_may_be_asked_later(service: Workspace) -> None:
    id = there(service)
    for call, status in (("GET history", 503), ("GET history", 0), ("GET ", 429)):
        service.faults = [Fault(call, status) for _ in range(20)]
        with pytest.raises(UnreachableError):
            runs.describe(PLACE, id)
    run = service.history.step(id, "make", "Running")
    service.history.printed(run, b"x")
    service.faults = [Fault("GET blob", 503) for _ in range(9)]
    with pytest.raises(UnreachableError):
        reader(run)()
    service.faults = [Fault(f"GET history {id}", 403)]
    with pytest.raises(PlatformError, match="AzureML Data Scientist") as caught:
        runs.describe(PLACE, id)
    assert not isinstance(caught.value, UnreachableError)


def test_the_ledger_counts_what_the_run_history_tells_of_each_step(service: Workspace) -> None:
    """To the second and the cent: two machines for six minutes, of which the model's steps took five, and a step that
    failed; a step that was reused costs nothing."""
    id = there(service)
    service.history.step(
        id, "finetune", "Completed", start_time_utc=ago(500), end_time_utc=ago(140)
    )
    service.history.step(id, "score", "Failed", start_time_utc=ago(100), end_time_utc=ago(80))
    reused = {"azureml.isreused": "true", "azureml.reusedrunid": "another"}
    service.history.step(
        id, "ingest", "Completed", properties=reused, start_time_utc=ago(9), end_time_utc=ago(8)
    )
    kept = ArtifactRecord(uri="azureml://x", metadata={"record": "training"})
    told = [
        one.model_copy(update={"artifacts": {"training": kept}}) if one.name == "finetune" else one
        for one in runs.describe(PLACE, id).steps
    ]
    machines = {"finetune": ("big", 2), "score": ("big", 1), "ingest": ("big", 1)}
    record = RunRecord(
        run_id="r",
        name="n",
        platform="azureml",
        status="failed",
        started_at=ago(600).isoformat(),
        spec={"platforms": {"azureml": {}}},
        steps=tuple(told),
        submission=Submission(definition="d", token="t", id=id, machines=machines),
    )
    summary = training("digits", "image_classification", 100, 1_000, 10_000)
    trained = summary.model_copy(update={"train_seconds": 300.0})
    price = Price("big", "", 36.0, None, "ours", NOW.date())
    cost = cost_of("r", "azureml", "2026-11", stays(record, trained), PriceBook((price,)))
    assert cost.hours * 3600 == pytest.approx(2 * 360 + 20)
    assert cost.lost_hours * 3600 == pytest.approx(2 * 60 + 20)
    assert (cost.usd, cost.lost_usd) == pytest.approx((7.40, 1.40))
