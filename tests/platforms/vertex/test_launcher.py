"""The launcher of a distributed step against a service with real processes: a dataset goes in, a
model and a bool come out; killed anywhere, drained or cancelled there is one job, never two, never
an orphan, and a healthy one is not lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.aiplatform_v1", reason="the service's protos are a developer's")

from tests.platforms.vertex.distributed import RUN, Task, ir
from tests.servers.vertex import Job, Vertex


def can_mount() -> bool:
    """Whether this machine lets us give a container a /gcs of its own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    try_it = 'mkdir -p /gcs && mount --bind "$0" /gcs'
    done = subprocess.run(["unshare", "-m", "sh", "-c", try_it, "/tmp"], capture_output=True)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="this machine lets us mount no /gcs")


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Vertex]:
    (tmp_path / "gcs").mkdir()
    with Vertex(tmp_path / "gcs") as running:
        running.runs[RUN] = {"name": RUN, "state": "PIPELINE_STATE_RUNNING"}
        yield running


@pytest.fixture
def task(service: Vertex, tmp_path: Path) -> Task:
    (tmp_path / "notes").mkdir()
    return Task(service, tmp_path / "notes")


def ended(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it said."""
    _, told = launcher.communicate(timeout=60)
    return launcher.returncode, told


def until(holds: Callable[[], object]) -> None:
    """Wait until it holds; a minute at most."""
    for _ in range(6_000):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never held")


def only(service: Vertex) -> Job:
    (job,) = service.jobs.values()
    return job


def running(task: Task, rank: int = 0, attempt: int = 1) -> bool:
    return (task.folder / f"attempt-{attempt}-node-{rank}").exists()


def check_result(task: Task, attempt: str = "1", made_by: str = "1") -> None:
    """The model of the one job, as the output of this attempt of the task."""
    left = task.left(attempt)
    uri = left["artifacts"]["model"]["artifacts"][0]["uri"]
    assert re.fullmatch(rf"gs://bucket/pipeline/12/fits-1/fit_{made_by}/[0-9a-f]{{12}}/model", uri)
    model = {"name": f"projects/12/artifacts/{attempt}", "uri": uri, "metadata": {"nodes": 2}}
    assert left == {
        "parameterValues": {"Output": True},
        "artifacts": {"model": {"artifacts": [model]}},
    }
    content = (task.service.folder / uri.removeprefix("gs://")).read_text()
    assert content == "3 rows, heard of [1]"


def test_a_dataset_goes_in_and_a_model_and_a_bool_come_out(task: Task) -> None:
    code, told = ended(task.launcher())
    assert code == 0, told
    check_result(task)
    job = only(task.service)
    assert job.states == ["QUEUED", "PENDING", "RUNNING", "SUCCEEDED"]
    assert {"team", "rekindle", "rekindle-task", "vertex-ai-pipelines-run-billing-id"} <= set(
        job.proto.labels
    )
    assert job.proto.labels["rekindle-attempt"] == "1"
    assert "https://console.cloud.google.com/vertex-ai/locations/europe-west4/training/" in told
    assert "node 0: attempt 1 of node 0 is told: ok" in told
    assert "of node 1" not in told


def test_a_container_of_anybody_has_its_paths_and_only_node_rank_0_has_the_outputs(
    task: Task,
) -> None:
    task.label = "exec-shell"
    code, told = ended(task.launcher())
    assert code == 0, told
    assert task.left()["parameterValues"] == {"done": True}
    place = task.left()["artifacts"]["model"]["artifacts"][0]["uri"].replace("gs://", "/gcs/")
    assert (task.service.folder / place.removeprefix("/gcs/")).read_text() == "1\n2\n3\n"
    places = (task.folder / "places").read_text().split()
    assert len([p for p in places if p == place]) == 1
    assert "node 0: run fits-1" in told
    assert not list(task.service.folder.rglob("fit_1/done")), "the launcher alone writes outputs"


def test_what_a_component_put_elsewhere_is_brought_to_its_place(task: Task) -> None:
    task.behave = "elsewhere"
    code, told = ended(task.launcher())
    assert code == 0, told
    check_result(task)


@pytest.mark.slow
def test_torchrun_joins_the_ranks_of_all_nodes(task: Task) -> None:
    task.text = ir(f"{Path(__file__).parents[1] / 'pipelines' / 'behaviour.py'}:summed")
    task.label = "exec-sum-of-ranks"
    code, told = ended(task.launcher())
    assert code == 0, told
    assert task.left()["parameterValues"] == {"Output": 3.0}


STAGES = [
    "before token", "before run", "before list", "after list", "before create", "after create",
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_launcher_killed_at_any_call_leaves_one_job(stage: str, task: Task) -> None:
    gate = task.service.hold(stage)
    first = task.launcher()
    assert gate.reached.wait(30)
    first.kill()
    first.wait()
    gate.open.set()
    if "create" in stage:  # the service had the request
        until(lambda: task.service.jobs)
    code, told = ended(task.launcher("2"))
    assert code == 0, told
    assert only(task.service).state == "SUCCEEDED"
    check_result(task, "2", made_by="1" if "create" in stage else "2")


@pytest.mark.parametrize("state", ["QUEUED", "RUNNING", "SUCCEEDED"])
def test_a_launcher_killed_while_it_follows_is_followed_by_another(state: str, task: Task) -> None:
    task.behave = "wait" if state == "RUNNING" else "ok"
    if state == "QUEUED":
        task.service.capacity.clear()
    first = task.launcher(poll=60 if state == "SUCCEEDED" else 0.1)
    until(lambda: task.service.jobs and only(task.service).state == state)
    until(lambda: state != "RUNNING" or running(task))
    first.kill()
    first.wait()
    second = task.launcher("2")
    lists = task.service.calls["list"]
    until(lambda: task.service.calls["list"] > lists)
    task.service.capacity.set()
    (task.folder / "go").touch()
    code, told = ended(second)
    assert code == 0, told
    assert only(task.service).state == "SUCCEEDED"
    check_result(task, "2", made_by="1")


def test_two_launchers_at_once_share_the_older_job(task: Task) -> None:
    task.behave = "wait"
    gate = task.service.hold("after list")
    first = task.launcher()
    assert gate.reached.wait(30)  # it knows of no job, and does not hear of the second's
    second = task.launcher("2")
    until(lambda: running(task))
    gate.open.set()
    until(lambda: len(task.service.jobs) == 2)
    younger = list(task.service.jobs.values())[1]
    younger.wait_for("CANCELLED")
    (task.folder / "go").touch()
    assert [ended(first)[0], ended(second)[0]] == [0, 0]
    assert [job.state for job in task.service.jobs.values()] == ["SUCCEEDED", "CANCELLED"]
    check_result(task, "1", made_by="2")
    check_result(task, "2", made_by="2")


def test_a_create_that_arrives_after_its_launcher_died_gives_way(task: Task) -> None:
    task.behave = "wait,wait"
    gate = task.service.hold("before create")
    first = task.launcher()
    assert gate.reached.wait(30)
    first.kill()
    second = task.launcher("2")
    until(lambda: running(task))
    gate.open.set()
    until(lambda: len(task.service.jobs) == 2)
    list(task.service.jobs.values())[1].wait_for("CANCELLED")
    (task.folder / "go").touch()
    assert ended(second)[0] == 0
    assert [job.state for job in task.service.jobs.values()] == ["SUCCEEDED", "CANCELLED"]


def test_a_job_that_is_not_listed_yet_is_not_made_twice(task: Task) -> None:
    task.service.unlisted = 6
    code, told = ended(task.launcher())
    assert code == 0, told
    assert len(task.service.jobs) == 1
    assert task.service.calls["get"] > 0


def test_a_create_whose_answer_is_lost_is_looked_for_before_it_is_made_again(task: Task) -> None:
    task.service.failures.append(("create", 503, "LOST", "no answer"))
    code, told = ended(task.launcher())
    assert code == 0, told
    assert "looking whether it is there" in told
    assert len(task.service.jobs) == 1


def test_faults_of_the_service_are_waited_out(task: Task) -> None:
    for kind in ("token", "run", "list", "log", "create"):
        task.service.failures.append((kind, 503, "UNAVAILABLE", "try again"))
    task.service.failures.append(("list", 429, "RESOURCE_EXHAUSTED", "too many requests"))
    task.service.failures.append(("list", 200, "CUT", ""))
    code, told = ended(task.launcher())
    assert code == 0, told
    assert len(task.service.jobs) == 1
    check_result(task)


@pytest.mark.parametrize("state", ["QUEUED", "RUNNING"])
def test_a_cancelled_run_takes_its_job_along(state: str, task: Task) -> None:
    task.behave = "wait"
    if state == "QUEUED":
        task.service.capacity.clear()
    launcher = task.launcher()
    until(lambda: task.service.jobs and only(task.service).state == state)
    until(lambda: state == "QUEUED" or running(task))
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    task.service.failures.append(("cancel", 503, "UNAVAILABLE", "try again"))
    launcher.terminate()
    code, told = ended(launcher)
    assert code == 143, told
    only(task.service).wait_for("CANCELLED")
    assert not list(task.service.folder.rglob("executor_output.json"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_cancelled_at_any_call_of_its_launcher_leaves_nothing(stage: str, task: Task) -> None:
    task.behave = "wait"
    gate = task.service.hold(stage)
    launcher = task.launcher()
    assert gate.reached.wait(30)
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    launcher.terminate()
    gate.open.set()
    code, told = ended(launcher)
    assert code == 143, told
    for job in task.service.jobs.values():
        job.wait_for("CANCELLED")


@pytest.mark.parametrize("stage", STAGES)
def test_a_launcher_drained_at_any_call_leaves_one_job(stage: str, task: Task) -> None:
    gate = task.service.hold(stage)
    first = task.launcher()
    assert gate.reached.wait(30)
    first.terminate()
    gate.open.set()
    assert ended(first)[0] == 143
    code, told = ended(task.launcher("2"))
    assert code == 0, told
    assert only(task.service).state == "SUCCEEDED"


def test_a_task_that_is_cancelled_by_itself_takes_its_job_along(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task))
    details = [{"taskName": "fit", "state": "CANCELLING"}, {"taskName": "b", "state": "RUNNING"}]
    task.service.runs[RUN]["jobDetail"] = {"taskDetails": details}
    launcher.terminate()
    assert ended(launcher)[0] == 143
    only(task.service).wait_for("CANCELLED")


@pytest.mark.parametrize("asked", ["the run goes on", "nobody knows"])
def test_a_drained_launcher_leaves_its_job_to_the_next(asked: str, task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task))
    if asked == "nobody knows":
        task.service.denied.add("run")
    launcher.terminate()
    code, told = ended(launcher)
    assert code == 143, told
    assert "goes on" in told
    task.service.denied.clear()
    assert only(task.service).state == "RUNNING"
    (task.folder / "go").touch()
    assert ended(task.launcher("2"))[0] == 0
    check_result(task, "2", made_by="1")


@pytest.mark.parametrize("run", ["failed", "deleted"])
@pytest.mark.parametrize("state", ["QUEUED", "RUNNING"])
def test_a_job_without_a_launcher_ends_with_the_run(state: str, run: str, task: Task) -> None:
    task.behave = "wait"
    if state == "QUEUED":
        task.service.capacity.clear()
    launcher = task.launcher()
    until(lambda: task.service.jobs and only(task.service).state == state)
    launcher.kill()
    launcher.wait()
    if run == "failed":
        task.service.runs[RUN]["state"] = "PIPELINE_STATE_FAILED"
    else:
        task.service.runs.clear()
    task.service.capacity.set()
    only(task.service).wait_for("FAILED")
    until(lambda: any("the run is over" in x["textPayload"] for x in only(task.service).lines))


def test_a_launcher_of_a_run_that_is_being_cancelled_starts_nothing(task: Task) -> None:
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    assert ended(task.launcher())[0] == 143
    assert not task.service.jobs


def test_an_attempt_that_failed_by_itself_is_not_tried_again_unasked(task: Task) -> None:
    task.behave = "fail"
    code, told = ended(task.launcher())
    assert code == 1
    assert "ValueError: attempt 1 is bad" in told, "node 0's log"
    assert "1 of 1 attempts failed" in told
    assert "ended with 1" in told
    assert "exited with a non-zero status of 1" in told
    assert ended(task.launcher("2"))[0] == 1
    assert len(task.service.jobs) == 1, "a retry of the launcher is none of the step"


def test_an_attempt_that_failed_is_tried_again_as_often_as_the_step_says(task: Task) -> None:
    task.label, task.behave = "exec-fit-2", "fail,fail,ok"
    code, told = ended(task.launcher())
    assert code == 1
    assert "2 of 2 attempts failed" in told
    labels = [job.proto.labels["rekindle-attempt"] for job in task.service.jobs.values()]
    assert labels == ["1", "2"]


def test_what_stopped_after_a_save_goes_on_in_the_next_attempt(task: Task) -> None:
    task.behave = "preempt,ok"
    code, told = ended(task.launcher())
    assert code == 0, told
    assert [job.state for job in task.service.jobs.values()] == ["FAILED", "SUCCEEDED"]
    check_result(task)
    models = [path.read_text() for path in task.service.folder.rglob("model")]
    assert sorted(models)[1] == "half a model", "each attempt has a place of its own"


def test_spot_machines_that_were_taken_away_are_asked_for_again(task: Task) -> None:
    task.label, task.behave = "exec-fit-2", "wait,wait,wait,ok"
    launcher = task.launcher()
    for attempt in (1, 2, 3):
        until(lambda n=attempt: running(task, 0, n) and running(task, 1, n))  # type: ignore[misc]
        list(task.service.jobs.values())[-1].take_away(attempt % 2)
    code, told = ended(launcher)
    assert code == 0, told
    assert ended(task.launcher("2"))[0] == 0, "it finds all of them, on several pages"
    jobs = list(task.service.jobs.values())
    assert [job.state for job in jobs] == [*["FAILED"] * 3, "SUCCEEDED"]
    limits = [job.proto.job_spec.scheduling.timeout.total_seconds() for job in jobs]
    assert limits[0] == 168 * 3_600
    assert limits[1] < limits[0], "the time of all attempts is one"
    check_result(task)


def test_spot_machines_are_asked_for_so_often_and_no_more(task: Task) -> None:
    task.label, task.behave, task.place = "exec-fit-2", "preempt,preempt,ok", {"max_preemptions": 1}
    code, told = ended(task.launcher())
    assert code == 75
    assert "its machines were taken away 2 times" in told
    assert "max_preemptions" in told
    assert len(task.service.jobs) == 2


@pytest.mark.parametrize(
    ("state", "says"),
    [("EXPIRED", "raise platforms.vertex.max_wait_hours"), ("CANCELLED", "somebody cancelled it")],
)
def test_a_job_that_expired_or_was_cancelled_by_hand_fails_the_step(
    state: str, says: str, task: Task
) -> None:
    task.service.capacity.clear()
    launcher = task.launcher()
    until(lambda: task.service.jobs)
    only(task.service).end(state)
    code, told = ended(launcher)
    assert code == 1
    assert says in told
    assert len(task.service.jobs) == 1


def test_a_quota_that_is_used_up_is_said_at_once(task: Task) -> None:
    said = "The following quota metrics exceed quota limits: custom_model_training_nvidia_h100_gpus"
    task.service.failures.append(("create", 429, "RESOURCE_EXHAUSTED", said))
    code, told = ended(task.launcher())
    assert code == 1
    assert said in told
    assert "ask for more of this quota" in told


@pytest.mark.parametrize("call", ["run", "list", "create"])
def test_a_permission_that_lacks_is_said_with_where_to_look(call: str, task: Task) -> None:
    task.service.denied.add(call)
    code, told = ended(task.launcher())
    assert code == 1
    assert "rekindle doctor --platform vertex" in told
    assert not task.service.jobs


def test_a_log_that_may_not_be_read_does_no_harm(task: Task) -> None:
    task.service.denied.add("log")
    code, told = ended(task.launcher())
    assert code == 0
    assert "node 0's log is not shown here" in told
    assert task.service.calls["log"] == 1


def test_each_line_of_the_log_is_said_once(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task, 0) and running(task, 1))
    polls = task.service.calls["log"] + 5
    until(lambda: task.service.calls["log"] > polls)
    (task.folder / "go").touch()
    code, told = ended(launcher)
    assert code == 0
    assert told.count("node 0: attempt 1 of node 0 is told: wait") == 1


def test_turns_of_a_loop_with_other_inputs_have_other_jobs(task: Task) -> None:
    other = Task(task.service, task.folder, item="b")
    assert ended(task.launcher())[0] == 0
    assert ended(other.launcher("b"))[0] == 0
    assert len(task.service.jobs) == 2


TOKEN = "projects/p/secrets/hf/versions/latest"


def test_secrets_reach_the_nodes_and_stand_nowhere(task: Task) -> None:
    task.place = {"secrets": {"HF_TOKEN": TOKEN}}
    task.service.secrets[TOKEN] = "hf_very_secret"
    code, told = ended(task.launcher())
    assert code == 0, told
    assert (task.folder / "attempt-1-node-1").read_text() == "hf_very_secret"
    everything = told + "".join(map(str, task.service.jobs.values()))
    everything += json.dumps([str(job.proto) for job in task.service.jobs.values()])
    for path in task.service.folder.rglob("*.json"):
        everything += path.read_text()
    assert TOKEN in everything
    assert "hf_very_secret" not in everything


def test_a_secret_that_cannot_be_read_fails_the_step_by_name(task: Task) -> None:
    task.place = {"secrets": {"HF_TOKEN": TOKEN}}
    code, told = ended(task.launcher())
    assert code == 1
    assert "cannot read the secret HF_TOKEN" in told
    assert TOKEN in told


def test_a_step_of_ours_starts_with_its_secrets(service: Vertex) -> None:
    service.secrets[TOKEN] = "hf_very_secret"
    import sys

    words = [
        sys.executable,
        "-m",
        "rekindle.platforms.vertex.secrets",
        json.dumps({"HF_TOKEN": TOKEN}),
    ]
    script = 'echo "$HF_TOKEN $0 $1"; exit 7'
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [*words, "sh", "-c", script, "a b", "c"], env=service.environment(),
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (7, "hf_very_secret a b c\n"), done.stderr
    service.secrets.clear()
    done = subprocess.run(
        [*words, "true"], env=service.environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "HF_TOKEN" in done.stderr


def test_a_launcher_may_end_with_signals_of_its_own_only(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task) and running(task, 1))
    only(task.service).replicas[1].send_signal(signal.SIGTERM)
    code, told = ended(launcher)
    assert code == 1, "a worker that was told to end fails the job"
    assert "node 1 ended with 143" in told
