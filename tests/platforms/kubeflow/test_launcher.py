"""The launcher against an API server that is strict: a dataset goes in, a model and a bool come
out, and whatever is killed in between, there is one job, never two, none left over, none lost."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from kfp import dsl

import rekindle
from rekindle.ir.edit.uris import PREFIX, read_place
from rekindle.launch import staging
from rekindle.launch.node import installed
from rekindle.platforms.kubeflow.trainjob import job_name
from tests.platforms.kubeflow.launching import (
    PLACE,
    STEP,
    Step,
    compiled,
    kill,
    make,
    pipeline,
    pipeline_retried,
    until,
)
from tests.platforms.local.runs import module
from tests.quick import first
from tests.servers.kubeflow.kubernetes import ACCOUNT, NODES, FakeCluster, Trouble
from tests.servers.kubeflow.trainer import JOBSET


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[FakeCluster]:
    with FakeCluster(tmp_path / "cluster") as cluster:
        cluster.secrets["words", "first"] = "hello"
        cluster.start_run("run")
        yield cluster


def check(step: Step) -> None:
    """One job ran, and what it made is where KFP looks for it."""
    output = step.output()
    assert output["parameterValues"]["Output"] is True
    (model,) = output["artifacts"]["model"]["artifacts"]
    assert model["uri"] == f"file://{step.outputs}/model"
    assert model["type"] == {"schemaTitle": "system.Model", "schemaVersion": "0.0.1"}
    assert model["metadata"] == {"rows": 6}
    assert (step.outputs / "model" / "weights" / "total.txt").read_text() == "6"
    assert (step.outputs / "model" / "word.txt").read_text() == "hello"
    assert step.cluster.active() == []


@pytest.mark.slow
def test_a_dataset_goes_in_and_a_model_and_a_bool_come_out(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster)
    code = step.pod().wait(60)
    assert code == 0, step.said()
    check(step)
    assert len(cluster.created) == 1
    assert "node 0 of 2 begins" in step.said()
    assert "node 1 of 2 begins" not in step.said(), "only node rank 0 is streamed"
    metadata = cluster.jobs[cluster.created[0]].object["metadata"]
    (owner,) = metadata["ownerReferences"]
    assert owner["uid"] == cluster.workflows["run"]["metadata"]["uid"]
    assert owner["kind"] == "Workflow"


def test_several_nodes_share_a_secret_that_no_object_but_its_own_holds_and_that_goes_with_the_job(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster)
    assert step.pod().wait(60) == 0, step.said()
    (name,) = cluster.created
    job = cluster.jobs[name].object
    ((secret, value),) = [(k, v) for k, v in cluster.secrets.items() if k[0].startswith(f"{name}-")]
    assert secret[1] == "secret"
    assert re.fullmatch("[0-9a-f]{64}", value)
    said = "".join(path.read_text() for path in cluster.logs.values())
    assert value not in json.dumps(job) + step.said() + said
    cluster.remove_job(name)
    assert secret not in cluster.secrets


@pytest.mark.slow
def test_a_launcher_killed_before_it_made_the_secret_is_replaced_by_one_that_does(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    trouble = Trouble("POST .*secrets", hold="before")
    cluster.troubles.append(trouble)
    step = Step(tmp_path, cluster)
    first = step.pod(node=f"{STEP}(0)")
    assert trouble.reached.wait(60)
    kill(first)
    second = step.pod(node=f"{STEP}(1)")
    assert second.wait(60) == 0, step.said()
    trouble.go.set()
    check(step)
    assert len(cluster.created) == 1


@pytest.mark.slow
def test_artifacts_in_s3_and_the_credentials_in_secrets(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    pytest.importorskip("moto", reason="moto[server] is a developer's dependency")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    place = PLACE.model_copy(update={"secrets": {name: f"store/{name}" for name in CREDENTIALS}})
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
    ):
        assert server.stderr is not None
        found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stderr)
        values = {**CREDENTIALS, "AWS_ENDPOINT_URL": next(match[0] for match in found if match)}
        for name, value in values.items():  # as KFP sets them in the launcher's pod
            patch.setenv(name, value)
            cluster.secrets["store", name] = value
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("lake")
        step = Step(tmp_path, cluster, place=place, store="s3://lake/kfp")
        assert step.pod().wait(60) == 0, step.said()
        (model,) = step.output()["artifacts"]["model"]["artifacts"]
        assert model["uri"] == "s3://lake/kfp/outputs/model"
        staging.fetch(model["uri"], tmp_path / "model")
        server.terminate()
    assert (tmp_path / "model" / "weights" / "total.txt").read_text() == "6"


CREDENTIALS = {
    "AWS_ENDPOINT_URL": "",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}
STAGES = {
    "before the job is created": Trouble("POST .*trainjobs", hold="before"),
    "after the job was created, before it knows": Trouble("POST .*trainjobs", hold="after"),
    "before it looks for jobs": Trouble("GET .*trainjobs", hold="before"),
    "while it follows": Trouble("GET .*pods[?]", hold="before"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", first(1, STAGES))
def test_a_launcher_killed_at_any_stage_is_replaced_by_one_that_finds_its_job(
    stage: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    trouble = Trouble(STAGES[stage].what, hold=STAGES[stage].hold)
    cluster.troubles.append(trouble)
    step = Step(tmp_path, cluster)
    first = step.pod(node=f"{STEP}(0)")
    assert trouble.reached.wait(60)
    kill(first)
    trouble.go.set()
    second = step.pod(node=f"{STEP}(1)")
    assert second.wait(60) == 0, step.said()
    check(step)
    assert len(cluster.created) == 1


@pytest.mark.slow
def test_a_launcher_killed_after_the_job_succeeded_brings_the_result_back_later(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go))
    first = step.pod(node=f"{STEP}(0)")
    until(lambda: cluster.owned, "the Secret that its nodes wait for")
    kill(first)
    go.touch()
    until(lambda: not cluster.active(), "the end of the job")
    assert not Path(step.executor_input["outputs"]["outputFile"]).exists()
    assert step.pod(node=f"{STEP}(1)").wait(60) == 0, step.said()
    check(step)
    assert len(cluster.created) == 1


@pytest.mark.slow
def test_a_drained_launcher_leaves_the_job_to_the_next_one(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go))
    first = step.pod(node=f"{STEP}(0)")
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 143
    assert "the run goes on: so does the job" in step.said()
    assert cluster.active() == cluster.created
    go.touch()
    assert step.pod(node=f"{STEP}(1)").wait(60) == 0, step.said()
    check(step)
    assert len(cluster.created) == 1


def test_a_run_that_is_terminated_takes_its_job_along(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    processes = next(iter(cluster.jobs.values())).processes
    with cluster.lock:  # so that the launcher does not see it before it is told
        launcher.send_signal(signal.SIGTERM)
        cluster.terminate_run("run")
    assert launcher.wait(30) == 143
    assert "it was terminated" in step.said()
    until(lambda: not cluster.jobs, "the end of the job")
    assert all(process.poll() is not None for process in processes)


@pytest.mark.slow
def test_a_run_that_is_terminated_takes_its_job_along_without_a_signal(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
    launcher = step.pod()
    until(cluster.active, "a job")
    cluster.terminate_run("run")
    assert launcher.wait(30) == 143
    until(lambda: not cluster.jobs, "the end of the job")


@pytest.mark.slow
def test_a_job_whose_launcher_died_with_the_run_ends_itself(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """As KFP's own launcher, our parent, does not wait for us when the run is terminated."""
    step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    (job,) = cluster.jobs.values()
    kill(launcher)
    cluster.terminate_run("run")
    until(lambda: job.condition, "the end of the job")
    assert (job.condition, job.restarts) == ("Failed", 0)
    assert all(process.poll() is not None for process in job.processes)
    asked = [line for line in cluster.requests if line.startswith("DELETE")]
    assert asked == [], "nodes delete nothing"


def test_a_launcher_that_is_killed_leaves_no_node_behind_its_run_also_without_the_first_node(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """A killed container is Failed, which KFP 2.17 does not retry: the run fails with it."""
    step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    (job,) = cluster.jobs.values()
    first_pod = next(pod for pod in cluster.pods if "-node-0-0-" in pod)
    log = next(log for pod, log in cluster.logs.items() if "-node-0-1-" in pod)
    until(lambda: "node 1 of 2 begins" in log.read_text(), "the other node")
    kill(launcher)
    cluster.lose_machine(first_pod)
    cluster.end_run("run", "Failed")
    until(lambda: job.processes[1].poll() is not None, "the end of the other node", 30)
    assert job.processes[1].poll() == 1
    assert "the run ends, it is over (Failed)" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("first_to_end", ["the run", "the other node"])
def test_a_job_ends_with_its_run_also_where_another_node_fails_before_the_first(
    first_to_end: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Ranks lose those of node 0 before that has ended, and the pod that fails first is judged."""
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go), behave="lost")
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    (job,) = cluster.jobs.values()
    kill(launcher)
    if first_to_end == "the run":
        cluster.terminate_run("run")
        go.touch()
    else:
        go.touch()
        until(lambda: job.restarts, "a restart")
        cluster.terminate_run("run")
    until(lambda: job.condition, "the end of the job")
    restarts = [0] if first_to_end == "the run" else [1, 2]
    assert job.condition == "Failed"
    assert job.restarts in restarts


@pytest.mark.slow
def test_what_no_quota_has_room_for_is_said_once_and_waited_for(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.quota = 1
    step = Step(tmp_path, cluster)
    launcher = step.pod()
    until(lambda: "waiting: " in step.said(), "a word")
    until(lambda: len(cluster.events) > 3, "some tries more")
    (line,) = [line for line in step.said().splitlines() if "waiting: " in line]
    assert "forbidden: exceeded quota: proof, requested: pods=1" in line
    cluster.quota = None
    assert launcher.wait(60) == 0
    check(step)


@pytest.mark.slow
def test_controllers_that_are_down_are_said_and_waited_for(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.controllers_are_down = True
    step = Step(tmp_path, cluster)
    launcher = step.pod()
    until(lambda: "no controller makes pods of the job" in step.said(), "a word")
    cluster.controllers_are_down = False
    assert launcher.wait(60) == 0
    check(step)


# Gatekeeper's and Kyverno's words, those of a ValidatingAdmissionPolicy
# (staging/src/k8s.io/apiserver/pkg/admission/plugin/policy/validating/dispatcher.go in
# Kubernetes 1.36), and of a quota
POLICIES = {
    'admission webhook "validation.gatekeeper.sh" denied the request: [gpus] no GPUs here': (
        "a policy of the cluster refuses it for the reason above"
    ),
    "ValidatingAdmissionPolicy 'gpus' with binding 'all' denied request: no GPUs here": (
        "a policy of the cluster refuses it for the reason above"
    ),
    "exceeded quota: team, requested: count/trainjobs=1, used: 2, limited: 2": (
        "wait until others have ended, or have the quota raised"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("words", POLICIES)
def test_a_job_that_a_policy_refuses_is_not_called_a_missing_right(
    words: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.policies = [f'trainjobs "x" is forbidden: {words}']
    step = Step(tmp_path, cluster)
    assert step.pod().wait(60) == 1
    assert words in step.said()
    assert POLICIES[words] in step.said()
    assert "grant it" not in step.said()


@pytest.mark.slow
def test_a_node_that_never_starts_fails_the_step_and_leaves_no_job(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    del cluster.accounts["rekindle-node"]
    step = Step(tmp_path, cluster)
    assert step.pod().wait(60) == 1
    assert "cannot start: Error creating: pods" in step.said()
    assert "error looking up service account kubeflow/rekindle-node" in step.said()
    until(lambda: not cluster.jobs, "the end of the job")


@pytest.mark.slow
def test_a_launcher_that_may_read_no_events_follows_its_job_nevertheless(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    rules = cluster.rules[ACCOUNT]
    cluster.rules[ACCOUNT] = [rule for rule in rules if rule["resources"] != ["events"]]
    cluster.quota = 1
    step = Step(tmp_path, cluster)
    launcher = step.pod()
    until(lambda: sum("/events" in line for line in cluster.requests) > 1, "looks")
    cluster.quota = None
    assert launcher.wait(60) == 0


@pytest.mark.slow
def test_a_machine_that_is_gone_is_named_and_the_job_goes_on_once_it_is_forgotten(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(gate))
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    pods = cluster.pods.items()
    (pod,) = [name for name, made in pods if made.get("spec", {}).get("nodeName") == "machine-1"]
    cluster.lose_machine(pod)
    until(lambda: "the machine machine-1 does not answer" in step.said(), "a word")
    cluster.forget_machines()
    (job,) = cluster.jobs.values()
    until(lambda: job.restarts, "a restart")
    gate.touch()
    assert launcher.wait(60) == 0
    check(step)


@pytest.mark.slow
def test_a_peer_that_fails_for_want_of_a_killed_node_does_not_end_the_job(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """Its exit code 1 within a second of the kill would: the Job controller judges both at once."""
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go), behave="needs its peer")
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    (job,) = cluster.jobs.values()
    log = next(log for pod, log in cluster.logs.items() if "-node-0-1-" in pod)
    until(lambda: "node 1 of 2 begins" in log.read_text(), "the other node")
    job.processes[0].kill()
    go.touch()
    assert launcher.wait(60) == 0
    assert job.restarts == 1
    check(step)


@pytest.mark.slow
def test_an_attempt_waits_for_the_nodes_of_the_one_before(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """After a deadline Trainer reports the end at once, and nodes save for a while."""
    uid = cluster.workflows["run"]["metadata"]["uid"]
    labels = {
        JOBSET: job_name("train", f"{uid}/run.{STEP}", 1),
        "jobset.sigs.k8s.io/replicatedjob-name": "node",
    }
    metadata = {"name": "old", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": labels}
    cluster.pods["old"] = {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}}
    step = Step(tmp_path, cluster)
    launcher = step.pod()
    until(lambda: sum("/pods?" in line for line in cluster.requests) > 3, "looks")
    assert cluster.created == []
    with cluster.lock:
        del cluster.pods["old"]
    assert launcher.wait(60) == 0


@pytest.mark.slow
def test_after_a_deadline_the_next_attempt_waits_for_nodes_that_still_save(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    gate = tmp_path / "saved"
    values = {"gate": str(gate), "behave": "saves for long"}
    step = Step(tmp_path, cluster, source=pipeline_retried, **values)
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    (job,) = cluster.jobs.values()
    job.exceed_deadline()
    looks = len(cluster.requests)
    until(lambda: sum("/pods?" in line for line in cluster.requests[looks:]) > 5, "looks")
    assert len(cluster.created) == 1
    gate.touch()
    assert launcher.wait(60) == 0, step.said()
    assert len(cluster.created) == 2
    assert "TrainJob exceeded its active deadline" in step.said()


@pytest.mark.slow
def test_a_step_with_a_long_source_is_packed_and_runs(cluster: FakeCluster, tmp_path: Path) -> None:
    rows = "\n".join(f'#   row {number}: "{number * 7}",' for number in range(6_000))
    assert len(rows) > 90_000
    step = Step(tmp_path, cluster, comment=f"\n{rows}\n")
    assert len(step.container["args"][0]) < 60_000
    assert step.pod().wait(60) == 0
    check(step)


@pytest.mark.slow
def test_nodes_know_the_run_by_the_name_that_people_gave_it(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """Which KFP's driver tells the launcher; the Workflow has another."""
    place = PLACE.model_copy(update={"pipeline_root": "s3://b/k"})
    step = Step(
        tmp_path,
        cluster,
        source=module("backend").called_on_nodes,
        component="called",
        place=place,
        **{"rekindle-pipeline-job-name": "nightly"},
    )
    assert step.pod().wait(60) == 0
    assert step.output()["parameterValues"]["out"] == "nightly s3://b/k"


def test_nodes_may_look_at_runs_and_nothing_else(cluster: FakeCluster) -> None:
    verbs = ("create", "delete", "get", "list", "patch", "update", "watch")
    resources = ("trainjobs", "pods", "pods/log", "workflows", "secrets", "configmaps", "events")
    groups = ("trainer.kubeflow.org", "", "argoproj.io")
    may = [
        (verb, resource)
        for verb in verbs
        for resource in resources
        for group in groups
        if cluster.allows(NODES, verb, group, resource, "kubeflow")
    ]
    assert may == [("get", "workflows")]


def test_a_terminated_run_begins_nothing(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.terminate_run("run")
    step = Step(tmp_path, cluster)
    assert step.pod().wait(30) == 143
    assert cluster.created == []


@pytest.mark.slow
def test_a_job_goes_with_its_run(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
    launcher = step.pod()
    until(cluster.active, "a job")
    cluster.delete_run("run")
    assert launcher.wait(30) != 0
    assert cluster.jobs == {}


@pytest.mark.slow
def test_a_job_that_somebody_deletes_fails_the_step(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
    launcher = step.pod()
    until(lambda: "node 0 of 2 begins" in step.said(), "the first line")
    (name,) = cluster.jobs
    cluster.remove_job(name)
    assert launcher.wait(30) == 1
    assert f"TrainJob {name} was deleted while it ran" in step.said()


@pytest.mark.slow
def test_a_job_that_fails_fails_the_step_with_the_last_words_of_the_node_that_failed(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster, behave="fail")
    assert step.pod().wait(60) == 1
    said = step.said()
    assert "node 1 ended with exit code 1" in said
    assert "ValueError: the data are all wrong" in said
    assert "| the last words of node 1" in said
    assert len(cluster.created) == 1
    assert not Path(step.executor_input["outputs"]["outputFile"]).exists()


@pytest.mark.slow
def test_a_step_without_retries_is_not_attempted_again_unless_it_is_started_anew(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster, behave="fail")
    assert step.pod(node=f"{STEP}(0)").wait(60) == 1
    assert step.pod(node=f"{STEP}(1)").wait(60) == 1, "KFP starts the pod again"
    assert "ValueError: the data are all wrong" in step.said(), "and it says why it failed before"
    assert len(cluster.created) == 1
    step.executor_input["inputs"]["parameterValues"]["behave"] = ""
    assert step.pod(node=f"{STEP}(0)").wait(60) == 0, "somebody retries the run"
    check(step)
    assert cluster.created == [cluster.created[0], f"{cluster.created[0]}-2"]


@pytest.mark.slow
def test_one_launcher_makes_all_attempts_with_the_pauses_of_the_step(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster, pipeline_retried, behave="fail")
    assert step.pod(node=f"{STEP}(0)").wait(60) == 1
    assert cluster.created == [cluster.created[0], f"{cluster.created[0]}-2"]
    assert "the next attempt begins in 1 s" in step.said()
    began = time.monotonic()
    assert step.pod(node=f"{STEP}(1)").wait(60) == 1, "Argo starts the pod again"
    assert "ValueError: the data are all wrong" in step.said()
    assert "the next attempt" not in step.said()
    assert time.monotonic() - began < 10
    assert len(cluster.created) == 2


@pytest.mark.slow
def test_a_launcher_that_pauses_ends_with_its_run(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster, pipeline_retried, behave="fail")
    definition = json.loads(step.container["args"][0])
    definition["retry"]["pause_seconds"] = 3_600
    step.container["args"][0] = json.dumps(definition)
    launcher = step.pod()
    until(lambda: "begins in 3600 s" in step.said(), "the pause")
    cluster.terminate_run("run")
    assert launcher.wait(30) == 143
    assert len(cluster.created) == 1


@pytest.mark.parametrize("source", [pipeline, pipeline_retried])
def test_tries_in_vain_cost_less_than_a_minute_whatever_the_step_asks_for(source: Any) -> None:
    """Argo waits `duration * factor ** n` before the n-th of them, and starts a pod."""
    (task,) = [
        task for name, task in compiled(source)["root"]["dag"]["tasks"].items() if name == "train"
    ]
    policy = task["retryPolicy"]
    seconds, factor = float(policy["backoffDuration"].rstrip("s")), policy["backoffFactor"]
    tries = range(policy["maxRetryCount"])
    assert len(tries) >= 3, "pods are lost"
    assert sum(seconds * factor**n + POD_SECONDS for n in tries) < 60


POD_SECONDS = 8  # to be scheduled, and to read the state of the job


@pytest.mark.slow
@pytest.mark.parametrize("hours", [0, -7])
def test_a_log_that_breaks_off_again_and_again_is_streamed_whole_and_once(
    hours: int, cluster: FakeCluster, tmp_path: Path
) -> None:
    """Whatever the time zone of the machine is, by which its kubelet writes times."""
    cluster.longest_log = 3
    cluster.log_offset_hours = hours
    step = Step(tmp_path, cluster)
    assert step.pod().wait(60) == 0, step.said()
    (pod,) = [n for n, p in cluster.pods.items() if "-node-0-0-" in n]
    spoken = [line.partition(" ")[2] for line in cluster.logs[pod].read_text().splitlines()]
    assert len(spoken) > 10
    heard = [line for line in step.said().splitlines() if not line.startswith("TrainJob ")]
    assert heard == spoken


@pytest.mark.slow
def test_a_preempted_node_restarts_the_job_and_not_the_launcher(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster, behave="preempted once")
    assert step.pod().wait(60) == 0, step.said()
    check(step)
    (job,) = cluster.jobs.values()
    assert job.restarts == 1
    assert "node 0 knows of" in step.said(), "it follows the new pod, too"


TROUBLES = {
    "500": Trouble("trainjobs|workflows|pods", times=3, status=500),
    "429": Trouble("trainjobs", times=2, status=429),
    "answers lost": Trouble("trainjobs", times=3, lose=True),
    "the answer to the creation lost": Trouble("POST", lose=True),
    "a token that ran out": Trouble("trainjobs", times=1, status=401),
}


@pytest.mark.slow
@pytest.mark.parametrize("trouble", TROUBLES)
def test_troubles_that_pass_are_waited_for(
    trouble: str, cluster: FakeCluster, tmp_path: Path
) -> None:
    one = TROUBLES[trouble]
    cluster.troubles.append(Trouble(one.what, one.times, one.status, one.lose))
    step = Step(tmp_path, cluster)
    assert step.pod().wait(60) == 0, step.said()
    check(step)
    assert len(cluster.created) == 1
    assert cluster.troubles[0].times == 0


@pytest.mark.slow
def test_troubles_that_do_not_pass_end_the_launcher_and_not_the_job(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go))
    launcher = step.pod(node=f"{STEP}(0)", patience=1)
    until(cluster.active, "a job")
    cluster.troubles.append(Trouble(r"GET .*trainjobs[?]", times=10_000, status=503))
    assert launcher.wait(30) == 1
    assert "the API server does not answer: HTTP 503" in step.said()
    assert cluster.active() == cluster.created
    cluster.troubles.clear()
    go.touch()
    assert step.pod(node=f"{STEP}(1)").wait(60) == 0, step.said()
    check(step)
    assert len(cluster.created) == 1


@pytest.mark.slow
def test_turns_of_a_loop_and_other_runs_have_jobs_of_their_own(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go))
    cluster.start_run("other")
    turns = [step.pod(node=f"root.for-loop-1({n}:{n}).train.executor(0)") for n in range(2)]
    other = step.pod(run="other", node="root.for-loop-1(0:0).train.executor(0)")
    until(lambda: len(cluster.active()) == 3, "three jobs")
    for launcher in (*turns, other):
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 143
    assert len(set(cluster.created)) == 3
    assert all(re.fullmatch(r"train-[0-9a-f]{10}", name) for name in cluster.created)


@pytest.mark.slow
@pytest.mark.parametrize("verb", first(1, ["create", "list", "delete"]))
def test_a_permission_that_is_missing_is_named(verb: str, tmp_path: Path) -> None:
    from tests.servers.kubeflow.kubernetes import MANIFESTS

    rbac = (MANIFESTS / "rbac.yaml").read_text()
    line = "[create, delete, get, list]"
    assert rbac.count(line) == 1
    rbac = rbac.replace(line, line.replace(verb, "watch"))
    with FakeCluster(tmp_path / "cluster", rbac) as cluster:
        cluster.secrets["words", "first"] = "hello"
        cluster.start_run("run")
        step = Step(tmp_path, cluster, gate=str(tmp_path / "never"))
        launcher = step.pod()
        if verb == "delete":
            until(cluster.active, "a job")
            cluster.terminate_run("run")
        assert launcher.wait(30) == (143 if verb == "delete" else 1)
        assert f"cannot {verb} resource" in step.said()
        assert "Traceback" not in step.said()
        assert "rekindle doctor --platform kubeflow" in step.said()


@pytest.mark.slow
def test_a_launcher_step_that_others_read_says_where_its_artifacts_are(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    step = Step(tmp_path, cluster)
    place = {"outputFile": str(tmp_path / "kfp" / "place")}
    step.executor_input["outputs"]["parameters"][f"{PREFIX}model"] = place
    assert step.pod().wait(60) == 0, step.said()
    text = step.output()["parameterValues"][f"{PREFIX}model"]
    assert read_place(text) == (f"file://{step.outputs}/model", {"rows": 6})


@pytest.mark.slow
def test_a_job_of_the_same_name_that_is_not_ours_is_left_alone(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    step = Step(tmp_path, cluster, gate=str(go))
    kill_me = step.pod(node=f"{STEP}(0)")
    until(cluster.active, "a job")
    kill(kill_me)
    (name,) = cluster.jobs
    cluster.jobs[name].object["metadata"]["annotations"] = {}
    assert step.pod(node=f"{STEP}(0)").wait(60) == 1
    assert f"there is a TrainJob {name} that is not ours" in step.said()
    assert cluster.active() == [name]


@pytest.mark.slow
def test_a_package_that_cannot_be_installed_fails_the_node() -> None:
    pip = {"needed": [], "runtime": ["kfp==2.17.0"], "options": ["--no-index"]}
    assert installed(pip) == 0, "KFP's runtime is here"
    assert installed({**pip, "needed": ["no-such-package-anywhere"]}) == 1


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def train_ranks(data: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model]) -> bool:
    from pathlib import Path

    from rekindle.launch.torchrun import torchrun
    from rekindle.spec.model import TrainSpec

    script = Path("ranks.py").absolute()
    script.write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.tensor([dist.get_rank() + 1.0])\n"
        "dist.all_reduce(total)\n"
        "if dist.get_rank() == 0:\n"
        "    open(sys.argv[1], 'w').write(f'{dist.get_world_size()} ranks, {total.item():g}')\n"
        "dist.destroy_process_group()\n"
    )
    entrypoint = f"{script} {model.path}"
    torchrun(entrypoint.split(), TrainSpec(entrypoint=entrypoint), status=Path("status"))
    return True


@dsl.pipeline(name="ranks")
def ranks():
    rekindle.distribute(train_ranks(data=make().outputs["data"]), nodes=2)


@pytest.mark.slow
def test_torchrun_on_two_nodes_is_one_gang(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster, ranks, component="train-ranks")
    assert step.pod().wait(240) == 0, step.said()
    assert step.output()["parameterValues"]["Output"] is True
    assert (step.outputs / "model").read_text() == "2 ranks, 3"


# KFP's SubprocessRunner takes only what looks like kfp.dsl.executor_main
LAUNCHER = """
# kfp.dsl.executor_main
import sys
from rekindle.platforms.kubeflow.launcher import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_kfp_runs_the_whole_definition_with_the_launcher_in_it(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    spec = compiled()
    container = spec["deploymentSpec"]["executors"]["exec-train"]["container"]
    container["command"] = [
        "python3",
        "-c",
        LAUNCHER,
        "--server",
        cluster.url,
        "--account",
        str(cluster.account),
        "--poll",
        "0.05",
        "--pod",
        cluster.start_pod("run", STEP),
    ]
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(spec))
    code = (
        "import sys\n"
        "from kfp import components, local\n"
        "local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[2])\n"
        "components.load_component_from_file(sys.argv[1])()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pipeline.yaml"), str(tmp_path / "root")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (reported,) = (tmp_path / "root").glob("*/look/executor_output.json")
    assert json.loads(reported.read_text()) == {"parameterValues": {"Output": "6"}}
    assert len(cluster.created) == 1


def test_what_is_created_is_what_the_definition_says(cluster: FakeCluster, tmp_path: Path) -> None:
    step = Step(tmp_path, cluster)
    assert step.pod().wait(60) == 0, step.said()
    spec = cluster.jobs[cluster.created[0]].object["spec"]
    wanted = json.loads(step.container["args"][0])["job"]["spec"]
    args = spec["trainer"].pop("args")
    assert all(re.fullmatch(r"[A-Za-z0-9+/=]+", word) for word in args)
    patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][
        0
    ]
    account = patch["template"]["spec"]["template"]["spec"].pop("serviceAccountName")
    assert account == "rekindle-node"
    assert spec["trainer"]["env"].pop()["name"] == "REKINDLE_JOB_SECRET"
    assert spec == wanted
    assert spec["activeDeadlineSeconds"] == 48 * 3_600
