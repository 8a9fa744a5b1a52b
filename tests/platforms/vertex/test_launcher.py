"""The launcher of a distributed step against a service with real processes: a dataset goes in, a
model and a bool come out, over as many attempts as the step may have."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.cloud.aiplatform_v1", reason="the service's protos are a developer's")

from rekindle.platforms.vertex import runs
from rekindle.platforms.vertex.secrets import starting
from tests.platforms.vertex.distributed import Task, check_result, ended, ir, only, running, until
from tests.quick import first
from tests.servers.google.vertex import Vertex


@pytest.mark.slow
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
    said = runs._CREATED_JOB.search(told)
    assert said
    assert said[1] == job.name.rpartition("/")[2], "by which its log is found"
    assert "of node" not in told, "`rekindle logs` shows what nodes print"
    (file,) = task.service.folder.rglob("task.json")
    secret = json.loads(file.read_text())["secret"]
    assert len(secret) == 64
    assert secret not in told + str(job.proto), "who reads the job cannot speak as its node"


@pytest.mark.slow
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
    assert not list(task.service.folder.rglob("fit_1/done")), "the launcher alone writes outputs"


@pytest.mark.slow
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


@pytest.mark.slow
def test_faults_of_the_service_are_waited_out(task: Task) -> None:
    for kind in ("token", "run", "list", "log", "create"):
        task.service.failures.append((kind, 503, "UNAVAILABLE", "try again"))
    task.service.failures.append(("list", 429, "RESOURCE_EXHAUSTED", "too many requests"))
    task.service.failures.append(("list", 200, "CUT", ""))
    code, told = ended(task.launcher())
    assert code == 0, told
    assert len(task.service.jobs) == 1
    check_result(task)


@pytest.mark.slow
def test_an_attempt_that_failed_by_itself_is_not_tried_again_unasked(task: Task) -> None:
    task.behave = "fail"
    code, told = ended(task.launcher())
    assert code == 1
    assert "1 of 1 attempts failed" in told
    assert "ended with 1" in told
    assert "exited with a non-zero status of 1" in told
    assert ended(task.launcher("2"))[0] == 1
    assert len(task.service.jobs) == 1, "a retry of the launcher is none of the step"


@pytest.mark.slow
def test_an_attempt_that_failed_is_tried_again_as_often_as_the_step_says(task: Task) -> None:
    task.label, task.behave = "exec-fit-2", "fail,fail,ok"
    code, told = ended(task.launcher())
    assert code == 1
    assert "2 of 2 attempts failed" in told
    labels = [job.proto.labels["rekindle-attempt"] for job in task.service.jobs.values()]
    assert labels == ["1", "2"]


@pytest.mark.slow
def test_what_stopped_after_a_save_goes_on_in_the_next_attempt(task: Task) -> None:
    task.behave = "preempt,ok"
    code, told = ended(task.launcher())
    assert code == 0, told
    assert [job.state for job in task.service.jobs.values()] == ["FAILED", "SUCCEEDED"]
    check_result(task)
    models = [path.read_text() for path in task.service.folder.rglob("model")]
    assert sorted(models)[1] == "half a model", "each attempt has a place of its own"


@pytest.mark.slow
def test_a_node_that_is_ended_before_it_could_save_too_hides_no_save(task: Task) -> None:
    task.behave = "alone,ok"  # the service ends node 1 when node 0 has ended
    code, told = ended(task.launcher())
    assert code == 0, told
    assert [job.state for job in task.service.jobs.values()] == ["FAILED", "SUCCEEDED"]


@pytest.mark.slow
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


@pytest.mark.slow
def test_spot_machines_are_asked_for_so_often_and_no_more(task: Task) -> None:
    task.label, task.behave, task.place = "exec-fit-2", "preempt,preempt,ok", {"max_preemptions": 1}
    code, told = ended(task.launcher())
    assert code == 75
    assert "its machines were taken away 2 times" in told
    assert "max_preemptions" in told
    assert len(task.service.jobs) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "says"),
    [
        ("EXPIRED", "raise platforms.vertex.max_wait_hours"),
        ("CANCELLED", "another user or process cancelled it"),
    ],
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


@pytest.mark.slow
def test_a_quota_that_is_used_up_is_said_at_once(task: Task) -> None:
    said = "The following quota metrics exceed quota limits: custom_model_training_nvidia_h100_gpus"
    task.service.failures.append(("create", 429, "RESOURCE_EXHAUSTED", said))
    code, told = ended(task.launcher())
    assert code == 1
    assert said in told
    assert "ask for more of this quota" in told


@pytest.mark.slow
@pytest.mark.parametrize("call", first(1, ["run", "list", "create"]))
def test_a_permission_that_lacks_is_said_with_where_to_look(call: str, task: Task) -> None:
    task.service.denied.add(call)
    code, told = ended(task.launcher())
    assert code == 1
    assert "rekindle doctor --platform vertex" in told
    assert not task.service.jobs


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_secret_that_cannot_be_read_fails_the_step_by_name(task: Task) -> None:
    task.place = {"secrets": {"HF_TOKEN": TOKEN}}
    code, told = ended(task.launcher())
    assert code == 1
    assert "cannot read the secret HF_TOKEN" in told
    assert TOKEN in told


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_starts_with_its_secrets(service: Vertex, ours: bool) -> None:
    service.secrets[TOKEN] = "hf_very_secret"

    words = [sys.executable, *starting({"HF_TOKEN": TOKEN}, ours)[1:]]
    if not ours:  # an image without rekindle, or anything else that is installed
        words[1:1] = ["-I", "-S"]
    script = 'echo "$HF_TOKEN $0 $1"; exit 7'
    done: subprocess.CompletedProcess[Any] = subprocess.run(
        [*words, "sh", "-c", script, "a b", "c"],
        env=service.environment(),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (7, "hf_very_secret a b c\n"), done.stderr
    service.secrets.clear()
    done = subprocess.run(
        [*words, "true"], env=service.environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "HF_TOKEN" in done.stderr


@pytest.mark.slow
def test_a_launcher_may_end_with_signals_of_its_own_only(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task) and running(task, 1))
    only(task.service).replicas[1].send_signal(signal.SIGTERM)
    code, told = ended(launcher)
    assert code == 1, "a worker that was told to end fails the job"
    assert "node 1 ended with 143" in told
