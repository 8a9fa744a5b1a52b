"""Jobs looked at, read, cancelled and gone on with: Google's own clients, over TLS, against a project
whose tasks and lines this file says."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("google.cloud.aiplatform_v1", reason="the service's protos are a developer's")

from google.cloud import aiplatform_v1 as api

from rekindle.errors import PlatformError, UnreachableError
from rekindle.ir.edit.rewrite import launched
from rekindle.platforms.snapshot import RunSnapshot
from rekindle.platforms.submission import Definition, RunTag
from rekindle.platforms.vertex import client, runs
from rekindle.platforms.vertex.client import labels_of, submit
from rekindle.platforms.vertex.compile import LAUNCHER
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.records import StepRecord
from tests.platforms.local.runs import module
from tests.platforms.marks import mark
from tests.platforms.vertex.distributed import PLACE as DISTRIBUTED
from tests.platforms.vertex.project import project as project
from tests.servers.google.rest import PARENT, PROJECT, REGION, Project
from tests.servers.troubles import Fault

PLACE = VertexSpec(project=PROJECT, region=REGION, artifact_root="gs://lake/rekindle")
NOW = datetime.datetime.now(datetime.UTC)


def definition(pipeline: Any = None, place: VertexSpec = PLACE, **arguments: Any) -> Definition:
    from rekindle.ir.compile import compile_function
    from rekindle.ir.read.pipeline import read
    from rekindle.platforms.vertex.compile import compile

    text = compile_function(pipeline or module("watched").watched)
    return compile(text, read(text), arguments or {"flag": "f", "stay": "s"}, place)


def ago(seconds: float) -> datetime.datetime:
    return NOW - datetime.timedelta(seconds=seconds)


def ran(*numbers: int, failed: tuple[int, ...] = ()) -> dict[str, Any]:
    """The jobs of a task's containers."""
    name = f"{PARENT}/customJobs/"
    main = {"main_job": f"{name}{numbers[0]}"} if numbers else {}
    detail = {**main, "failed_main_jobs": [f"{name}{number}" for number in failed]}
    return {"executor_detail": {"container_detail": detail}}


def step(seen: RunSnapshot, name: str) -> StepRecord:
    return next(one for one in seen.steps if one.name == name)


def test_the_tasks_of_a_job_are_the_steps_that_were_planned(project: Project) -> None:
    made = definition()
    id = submit(made, PLACE, mark("a")).id
    assert runs.describe(PLACE, id) == RunSnapshot("running")
    project.task(id, "count", "RUNNING", start_time=ago(60), **ran(12, failed=(11,)))
    around = project.task(id, "condition-1", "PENDING")
    seen = runs.describe(PLACE, id)
    (counted,) = seen.steps
    assert (counted.name, counted.status, counted.attempts) == ("count", "running", 2)
    assert counted.log == f"{PARENT}/customJobs/12"
    assert counted.started_at == ago(60).isoformat(timespec="seconds")
    assert counted.seconds is not None
    assert counted.seconds >= 60

    project.task(id, "count", "SUCCEEDED", end_time=ago(20))
    project.task(id, "tell", "SKIPPED", start_time=ago(20), end_time=ago(19))
    project.task(id, "condition-1", "NOT_TRIGGERED")
    project.task(id, "never", "NOT_TRIGGERED", around)
    project.end(id, "SUCCEEDED")
    seen = runs.describe(PLACE, id)
    assert (seen.status, seen.ended_at) == ("succeeded", project.jobs[id].end_time)
    assert {one.name for one in seen.steps} == {one.step for one in client.steps(made)}
    assert (step(seen, "count").seconds, step(seen, "tell").seconds) == (40.0, 1.0)
    told = {one.name: (one.status, one.cached, one.reason) for one in seen.steps}
    assert told == {
        "count": ("succeeded", False, ""),
        "tell": ("succeeded", True, "taken from the cache"),
        "condition-1/never": ("skipped", False, "its condition does not hold"),
    }


STATES = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "CANCEL_PENDING": "running",
    "CANCELLING": "running",
    "CANCELLED": "cancelled",
    "FAILED": "failed",
    "SKIPPED": "succeeded",
    "NOT_TRIGGERED": "skipped",
    "STATE_UNSPECIFIED": "pending",
}


def test_every_state_of_a_task_has_a_word(project: Project) -> None:
    assert STATES.keys() == {state.name for state in api.PipelineTaskDetail.State}
    id = submit(definition(), PLACE, mark("a")).id
    for batch in zip(*[iter(STATES)] * 2, strict=True):
        for name, state in zip(("count", "tell"), batch, strict=True):
            project.task(id, name, state)
        seen = runs.describe(PLACE, id)
        assert [one.status for one in seen.steps] == [STATES[state] for state in batch]


def test_a_job_that_failed_says_why_once(project: Project) -> None:
    id = submit(definition(), PLACE, mark("a")).id
    why = "The replica workerpool0-0 exited with a non-zero status of 1."
    project.task(id, "count", "FAILED", error={"code": 9, "message": why}, **ran(failed=(11, 12)))
    project.end(id, "FAILED", "The DAG failed because some tasks failed.")
    seen = runs.describe(PLACE, id)
    failed = step(seen, "count")
    assert (seen.status, seen.error) == ("failed", "")
    assert (failed.error, failed.attempts, failed.log[-2:]) == (why, 2, "12")
    other = submit(definition(), PLACE, mark("b")).id
    project.end(other, "FAILED", "There is no image")
    assert runs.describe(PLACE, other).error == "There is no image"


def names(project: Project, id: str) -> list[str]:
    return sorted(one.name for one in runs.describe(PLACE, id).steps)


def test_turns_of_a_loop_have_names_of_their_own(project: Project) -> None:
    made = definition(module("behaviour").one_turn_fails, folder="x")
    inside = next(one.step for one in client.steps(made) if "for-loop" in one.step)
    outer, name, last = inside.split("/")
    turns = submit(made, PLACE, mark("a")).id
    around = project.task(turns, name, "RUNNING", project.task(turns, outer, "RUNNING"))
    for turn, state in ((1, "FAILED"), (0, "SUCCEEDED")):
        inner = project.task(turns, f"{name}-{turn}", "RUNNING", around)
        project.task(turns, last, state, inner)
    assert names(project, turns) == [f"{outer}/{name}/{turn}/{last}" for turn in range(2)]
    assert step(runs.describe(PLACE, turns), f"{outer}/{name}/1/{last}").status == "failed"
    flat = submit(made, PLACE, mark("b")).id
    around = project.task(flat, name, "RUNNING", project.task(flat, outer, "RUNNING"))
    project.task(flat, last, "RUNNING", around)
    details = project.jobs[flat].job_detail.task_details
    details.append(
        api.PipelineTaskDetail(
            task_id=9,
            parent_task_id=around.task_id,
            task_name=last,
            state="RUNNING",
        )
    )
    assert names(project, flat) == [f"{outer}/{name}/{turn}/{last}" for turn in range(2)]


def reader(job: str, began: float = 3_600) -> Callable[[], str]:
    """What one who follows the log gets to see by each call."""
    # lines are printed so long before now, and NOW may be an hour old when this test has its turn
    start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=began)
    one = StepRecord(name="count", log=f"{PARENT}/customJobs/{job}", started_at=start.isoformat())
    cursor = [""]

    def more() -> str:
        piece = runs.read_log(PLACE, "any", one, cursor[0])
        cursor[0] = piece.cursor
        return piece.text

    return more


def test_a_log_is_read_once_whatever_comes_late_or_in_between(project: Project) -> None:
    more = reader("12")
    assert more() == ""
    for i in range(5):
        project.printed("12", f"line {i}", ago=9 - i)
    project.printed("13", "of another job")
    project.printed("12", "the service's own word", machine="service")
    project.printed("12", "a run of long ago", ago=9_000)
    project.faults = [
        Fault("POST entries", 429),
        Fault("POST entries", 503),
        Fault("POST entries", 0),
    ]
    assert more() == "".join(f"line {i}\n" for i in range(5))
    assert more() == ""
    project.printed("12", "came late", ago=12)
    project.printed("12", "line 5\nof two", ago=0)
    assert more() == "came late\nline 5\nof two\n"
    assert more() == ""
    assert runs.read_log(PLACE, "any", StepRecord(name="count"), "") == runs.LogPiece("", "")


def test_a_launchers_log_is_shown_with_what_its_nodes_print(project: Project) -> None:
    more = reader("12")
    project.printed("12", "attempt 1 is 4711", ago=40)
    project.printed("4711", "loading", ago=39)
    project.printed("4711", "loading too", machine="workerpool1-0", ago=38)
    assert more() == "attempt 1 is 4711\n[node 0] loading\n[node 1] loading too\n"
    project.printed("12", "attempt 2 is 4712", ago=4)
    project.printed("4712", "again", ago=3)
    project.printed("4711", "the last of the first", machine="workerpool1-1", ago=6)
    assert more() == "[node 2] the last of the first\nattempt 2 is 4712\n[node 0] again\n"
    assert more() == ""


def test_a_distributed_step_has_the_attempts_of_its_launcher(project: Project) -> None:
    place = VertexSpec(**{**DISTRIBUTED, "project": PROJECT, "region": REGION})
    made = definition(module("behaviour").gathered, place, folder="x")
    id = submit(made, place, mark("a")).id
    project.task(id, "gather", "RUNNING", start_time=ago(60), **ran(12))
    name = launched(client.job_of(made)["pipelineSpec"], LAUNCHER)["gather"]["job"]["displayName"]
    labels = labels_of(mark("a"))
    ended = [
        api.CustomJob(display_name=name, labels=given, state=f"JOB_STATE_{state}", **times)
        for given, state, times in (
            (labels, "FAILED", {"start_time": ago(50), "end_time": ago(40)}),
            (labels, "CANCELLED", {"end_time": ago(40)}),
            (labels_of(mark("b")), "FAILED", {"start_time": ago(90), "end_time": ago(40)}),
            (labels, "FAILED", {"start_time": ago(30), "end_time": ago(25)}),
            (labels, "RUNNING", {"start_time": ago(5)}),
        )
    ]
    assert step(runs.describe(place, id), "gather").attempts == 1
    project.custom_jobs = lambda: ended
    seen = step(runs.describe(place, id), "gather")
    assert (seen.attempts, seen.reason) == (3, "failed 2 x before")
    since = (datetime.datetime.now(datetime.UTC) - NOW).total_seconds()
    assert 20 <= seen.machine_seconds <= 20 + since, "waiting for machines costs nothing"
    calls = project.calls["GET customJobs"]
    runs.describe(PLACE, submit(definition(), PLACE, mark("a")).id)
    assert project.calls["GET customJobs"] == calls, "nobody asks where no step is distributed"


def test_what_a_step_made_is_listed_and_read(project: Project) -> None:
    id = submit(definition(), PLACE, mark("a")).id
    made = api.Artifact(
        uri="gs://lake/run/model", schema_title="system.Model", metadata={"record": "training"}
    )
    listed = api.PipelineTaskDetail.ArtifactList(artifacts=[made])
    project.task(id, "count", "SUCCEEDED", outputs={"model": listed}, **ran(12))
    (found,) = runs.artifacts(PLACE, id, StepRecord(name="count")).items()
    assert found[0] == "model"
    assert (found[1].uri, found[1].schema_title) == (made.uri, "system.Model")
    assert found[1].metadata == {"record": "training"}
    assert runs.artifacts(PLACE, id, StepRecord(name="tell")) == {}

    project.objects["gs://lake/run/model/training.json"] = b"{}"
    project.faults = [Fault("GET objects", 503), Fault("GET objects", 0)]
    assert runs.read(PLACE, "gs://lake/run/model/training.json") == b"{}"
    for missing in ("gs://lake/run/model", "gs://lake", "hf://somebody/model"):
        with pytest.raises(FileNotFoundError):
            runs.read(PLACE, missing)
    assert project.calls["GET objects"] == 4


def test_a_job_is_cancelled_as_often_as_one_likes(project: Project) -> None:
    id = submit(definition(), PLACE, mark("a")).id
    project.faults = [Fault("POST pipelineJobs:cancel", 0, after=True)]
    for _ in range(2):
        runs.cancel(PLACE, id)
    assert runs.describe(PLACE, id).status == "cancelled"
    assert project.calls["POST pipelineJobs:cancel"] == 2
    with pytest.raises(PlatformError, match="what is there"):
        runs.describe(PLACE, f"{id}9")


def test_what_failed_is_gone_on_with_by_one_new_job(project: Project) -> None:
    made = definition()
    id = submit(made, PLACE, mark("a")).id
    with pytest.raises(PlatformError, match="the job is running"):
        runs.resume(made, PLACE, id, mark("a-1"))
    project.end(id, "FAILED")
    project.faults = [Fault("POST pipelineJobs", 0, after=True)]
    again = runs.resume(made, PLACE, id, mark("a-1"))
    assert again.id != id
    assert runs.resume(made, PLACE, id, mark("a-1")).id == again.id
    assert len(project.jobs) == 2
    bodies = [type(job).to_dict(job) for job in project.jobs.values()]
    assert bodies[0]["pipeline_spec"] == bodies[1]["pipeline_spec"]
    project.end(again.id, "SUCCEEDED")
    with pytest.raises(PlatformError, match="the job is succeeded"):
        runs.resume(made, PLACE, again.id, mark("a-2"))


def test_a_mark_fits_into_labels_whatever_it_holds() -> None:
    assert RunTag.of(labels_of(mark("a"))) == mark("a")
    odd = RunTag("Digits.of-" + "x" * 80, "0123456789abcdef", "t" * 63 + "-1")
    labels = labels_of(odd)
    assert len(set(labels.values())) == 3
    assert all(len(value) <= 63 and value.islower() for value in labels.values())
    assert RunTag.of({"rekindle": "true"}) is None


def test_a_service_that_does_not_answer_may_be_asked_later(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_PATIENCE_SECONDS", 0.1)
    project.faults = [Fault("GET pipelineJobs", 503) for _ in range(99)]
    with pytest.raises(UnreachableError, match="as the test wants it"):
        runs.describe(PLACE, f"{PARENT}/pipelineJobs/x")
    project.faults = [Fault("POST entries", 0) for _ in range(99)]
    with pytest.raises(UnreachableError):
        reader("12")()
    project.faults = [Fault("POST entries", 403)]
    with pytest.raises(PlatformError, match="rekindle doctor CONFIG --platform vertex") as caught:
        reader("12")()
    assert not isinstance(caught.value, UnreachableError)
