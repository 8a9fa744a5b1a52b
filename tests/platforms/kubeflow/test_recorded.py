"""What real KFP answered, given to the client over HTTP: runs, steps, logs and ends are what they were."""

from __future__ import annotations

import base64
import datetime
import gzip
import json

import pytest

from rekindle.errors import PlatformError
from rekindle.platforms.kubeflow import client, runs
from rekindle.records import StepRecord
from tests.support.kubeflow_recorded import STEPS, recorded, replay_of

DONE = [(step, "succeeded", 1, "") for step in STEPS["digits"]]
ENDS = {
    "kfp-success": (
        "hello",
        "succeeded",
        [("greet", "succeeded", 1, ""), ("shout", "succeeded", 1, "")],
    ),
    "kfp-success-without-template-defaults": (
        "hello",
        "succeeded",
        [("greet", "succeeded", 1, ""), ("shout", "succeeded", 1, "")],
    ),
    "kfp-failed-step": ("fail", "failed", [("bad", "failed", 1, "main: Error (exit code 1)")]),
    "kfp-running": ("slow", "running", [("slow", "running", 1, "")]),
    "kfp-terminated": (
        "slow",
        "cancelled",
        [("slow", "cancelled", 1, "main: Error (exit code 143)")],
    ),
    "rekindle-success": ("digits", "succeeded", DONE),
    "rekindle-cancelled": (
        "digits",
        "cancelled",
        [
            *DONE[:5],
            ("evaluate", "cancelled", 1, "Step exceeded its deadline"),
            ("register", "skipped", 0, ""),
        ],
    ),
    "rekindle-launcher-killed": (
        "digits",
        "failed",
        [
            DONE[0],
            ("ingest", "succeeded", 0, ""),  # from the cache
            ("shard", "succeeded", 0, ""),
            ("finetune", "failed", 2, "main: OOMKilled (exit code 137)"),
            ("score", "skipped", 0, ""),
            ("evaluate", "skipped", 0, ""),
            ("register", "skipped", 0, ""),
        ],
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_run_is_what_it_was(name: str) -> None:
    recording = recorded(name)
    pipeline_name, status, steps = ENDS[name]
    with replay_of(recording, STEPS[pipeline_name]).serving() as place:
        snapshot = runs.describe(place, recording["run"]["run_id"])
    assert snapshot.status == status
    found = [(step.name, step.status, step.attempts, step.error) for step in snapshot.steps]
    assert found == steps
    assert [step.cached for step in snapshot.steps] == [
        step.status == "succeeded" and not step.attempts for step in snapshot.steps
    ]
    assert (snapshot.ended_at is None) == (status == "running")
    # a pod's name is made as Argo makes it: these are the ones that pods had
    pods = {step.log for step in snapshot.steps if step.attempts}
    assert len(pods) == sum(step.attempts > 0 for step in snapshot.steps)
    asked_for = {log["GET"].split("/")[-2] for log in recording["logs"]}
    if asked_for:
        assert pods <= asked_for


def test_nodes_that_argo_packed_are_unpacked() -> None:
    recording = recorded("kfp-failed-step")
    nodes = json.dumps(recording["workflow"]["status"].pop("nodes")).encode()
    packed = base64.b64encode(gzip.compress(nodes)).decode()
    recording["workflow"]["status"]["compressedNodes"] = packed
    with replay_of(recording, STEPS["fail"]).serving() as place:
        (step,) = runs.describe(place, recording["run"]["run_id"]).steps
    assert (step.name, step.status) == ("bad", "failed")


def test_a_log_is_read_and_what_stands_in_its_place_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    recording = recorded("kfp-success")
    with replay_of(recording, STEPS["hello"]).serving() as place:
        id = recording["run"]["run_id"]
        greet = runs.describe(place, id).steps[0]
        piece = runs.read_log(place, id, greet, "")
        assert piece.text.startswith("I1129 19:44:33")
        assert runs.read_log(place, id, greet, piece.cursor).text == ""
    recording = recorded("kfp-running")
    with replay_of(recording, STEPS["slow"]).serving() as place:
        id = recording["run"]["run_id"]
        (slow,) = runs.describe(place, id).steps
        refused = runs.read_log(place, id, slow, "7")
        assert (refused.text, refused.cursor) == ("", "7")
        assert runs.read_log(place, id, StepRecord(name="x"), "").text == ""


def test_a_refusal_behind_a_log_that_broke_off_is_not_of_the_log() -> None:
    refusal = '{"error_message":"stream error","error_details":"..."}'
    of_the_step = '{"error_message": "mine"}\n'
    assert runs._without_refusal(f"line\n{refusal}") == "line\n"
    assert runs._without_refusal(f"line\n{of_the_step}") == f"line\n{of_the_step}"
    assert runs._without_refusal(f"{of_the_step}{refusal}") == of_the_step


def test_a_run_that_is_being_cancelled_is_not_cancelled_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    recording = recorded("kfp-running")
    id = recording["run"]["run_id"]
    replay = replay_of(recording, STEPS["slow"])
    terminate = f"POST /apis/v2beta1/runs/{id}:terminate"
    with replay.serving() as place:
        replay.answers[terminate] = (200, "{}")
        runs.cancel(place, id)
        assert replay.asked.count(terminate) == 1
        run = json.loads(replay.answers[f"GET /apis/v2beta1/runs/{id}"][1])
        replay.answers[f"GET /apis/v2beta1/runs/{id}"] = (
            200,
            json.dumps({**run, "state": "CANCELING"}),
        )
        runs.cancel(place, id)
    assert replay.asked.count(terminate) == 1


def test_a_server_without_the_older_api_knows_nothing_of_steps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recording = recorded("kfp-success")
    id = recording["run"]["run_id"]
    replay = replay_of(recording, STEPS["hello"])
    del replay.answers[f"GET /apis/v1beta1/runs/{id}"]
    with replay.serving() as place:
        snapshot = runs.describe(place, id)
    assert snapshot.status == "succeeded"
    assert {step.name: step.reason for step in snapshot.steps} == {
        "greet": "what became of it is not known",
        "shout": "what became of it is not known",
    }
    assert "has no API v1beta1" in caplog.text


@pytest.mark.parametrize(
    ("time", "since"),
    [
        ("2026-11-29T12:00:00.123456789Z", "2026-11-29T12:00:00Z"),
        ("2026-11-29T12:00:00.1+02:00", "2026-11-29T10:00:00Z"),
    ],
)
def test_a_log_goes_on_where_it_broke_off_on_machines_of_any_clock(time: str, since: str) -> None:
    from rekindle.platforms.kubeflow.job import _in_whole_seconds

    assert _in_whole_seconds(time) == since


def test_a_run_that_was_cancelled_retried_and_failed_has_failed() -> None:
    recording = recorded("kfp-terminated")
    recording["run"]["state_history"] += [{"state": "RUNNING"}, {"state": "FAILED"}]
    with replay_of(recording, STEPS["slow"]).serving() as place:
        snapshot = runs.describe(place, recording["run"]["run_id"])
    assert (snapshot.status, snapshot.steps[0].status) == ("failed", "failed")


@pytest.mark.parametrize(("hours", "status"), [(0.5, "running"), (2, "cancelled")])
def test_a_run_whose_workflow_was_deleted_is_cancelled_in_the_end(
    hours: float, status: str
) -> None:
    """KFP stores CANCELING, does not find the Workflow, and hears of no end (TerminateRun in
    resource_manager.go)."""
    recording = recorded("kfp-running")
    moment = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=hours)
    change = {"state": "CANCELING", "update_time": moment.isoformat()}
    recording["run"] |= {"state": "CANCELING"}
    recording["run"]["state_history"] += [change]
    with replay_of(recording, STEPS["slow"]).serving() as place:
        snapshot = runs.describe(place, recording["run"]["run_id"])
    assert (snapshot.status, snapshot.steps[0].status) == (status, status)


NO_RUNS = ["{}", "[]", "null", '{"run_id": "r", "state": "SINGING"}']
NO_WORKFLOWS = [
    "[]",
    '{"metadata": {"name": "w"}, "status": {"nodes": {"a": {"type": "Pod"}}}}',
    '{"metadata": {"name": "w"}, "status": {"nodes": {"a": "b"}}}',
    '{"metadata": {"name": "w"}, "status": {"compressedNodes": "H4sIAAAAAAAA"}}',
    '{"metadata": {"name": "w"}, "status": {"compressedNodes": "no"}}',
    "no JSON",
]


@pytest.mark.parametrize("answer", NO_RUNS)
def test_an_answer_that_is_no_run_is_no_run_that_goes_on(answer: str) -> None:
    recording = recorded("kfp-running")
    id = recording["run"]["run_id"]
    replay = replay_of(recording, STEPS["slow"])
    replay.answers[f"GET /apis/v2beta1/runs/{id}"] = (200, answer)
    with replay.serving() as place:
        for ask in (runs.describe, runs.cancel):
            with pytest.raises(PlatformError, match="answered something that is no run"):
                ask(place, id)


@pytest.mark.parametrize("manifest", NO_WORKFLOWS)
def test_a_workflow_that_cannot_be_read_is_an_error(manifest: str) -> None:
    recording = recorded("kfp-running")
    id = recording["run"]["run_id"]
    replay = replay_of(recording, STEPS["slow"])
    answer = json.dumps({"pipeline_runtime": {"workflow_manifest": manifest}})
    replay.answers[f"GET /apis/v1beta1/runs/{id}"] = (200, answer)
    with replay.serving() as place, pytest.raises(PlatformError, match="Workflow"):
        runs.describe(place, id)


def test_a_run_that_was_deleted_is_said_to_be_gone() -> None:
    recording = recorded("kfp-running")
    replay = replay_of(recording, STEPS["slow"])
    with replay.serving() as place, pytest.raises(PlatformError) as caught:
        runs.describe(place, "other")
    (problem,) = caught.value.problems
    assert problem.what == "KFP has no run other"
    assert "it was deleted there" in problem.fix
