"""Why a step waits, as `rekindle status` says it: what Argo writes of pods that do not start, and
what a launcher writes of the nodes of its job. The tree is one that real KFP answered."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from rekindle.platforms.kubeflow import runs
from rekindle.platforms.kubeflow.compile import LAUNCHER
from rekindle.platforms.kubeflow.obstacles import waits_for
from rekindle.records import StepRecord
from tests.support.kubeflow_recorded import STEPS, Replay, recorded, replay_of

EXECUTOR = ".slow(0).executor(0)"
DRIVER = ".slow-driver(0)"
ZERO = "0001-01-01T00:00:00Z"
# in the words of getPendingReason, and of an API server whose quota is used up
UNSCHEDULABLE = "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu."
UNPULLED = 'ImagePullBackOff: Back-off pulling image "a:1"'
OVER_QUOTA = 'pods "hello-slow" is forbidden: exceeded quota: proof, requested: pods=1'
QUOTA_OF_NODES = 'Error creating: pods "slow-1f-node-0-0-..." is forbidden: exceeded quota: proof'


def pending(pod: str, message: str) -> Any:
    """The recorded run, at the time when this pod had not begun."""
    recording = recorded("kfp-running")
    nodes = recording["workflow"]["status"]["nodes"]
    if pod == DRIVER:  # before its end there is nothing of the step itself
        for id in [id for id, node in nodes.items() if is_of_the_step(node["name"])]:
            del nodes[id]
    (waiting,) = [node for node in nodes.values() if node["name"].endswith(pod)]
    waiting |= {"phase": "Pending", "message": message, "finishedAt": None}
    return recording


def is_of_the_step(name: str) -> bool:
    return name.endswith(".slow") or ".slow(0)" in name


def launched(log: str) -> tuple[Any, Replay]:
    """The recorded run, as if its step launched nodes and its pod had printed `log`."""
    recording = recorded("kfp-running")
    replay = replay_of(recording, STEPS["slow"])
    path = f"GET /apis/v2beta1/runs/{recording['run']['run_id']}"
    run = json.loads(replay.answers[path][1])
    container = run["pipeline_spec"]["deploymentSpec"]["executors"]["exec-slow"]["container"]
    container["command"] = [*LAUNCHER]
    replay.answers[path] = (200, json.dumps(run))
    replay.answers[f"GET {recording['logs'][0]['GET']}"] = (200, log)
    return recording, replay


def step_of(replay: Replay, recording: Any) -> StepRecord:
    with replay.serving() as place:
        (step,) = runs.describe(place, recording["run"]["run_id"]).steps
    return step


@pytest.mark.parametrize("pod", [EXECUTOR, DRIVER])
@pytest.mark.parametrize("message", [UNSCHEDULABLE, UNPULLED, OVER_QUOTA])
def test_a_step_whose_pod_does_not_start_is_pending_and_says_why(pod: str, message: str) -> None:
    recording = pending(pod, message)
    step = step_of(replay_of(recording, STEPS["slow"]), recording)
    assert (step.name, step.status, step.attempts) == ("slow", "pending", 0)
    assert step.reason == f"waiting: {message}"


@pytest.mark.parametrize("message", ["", "ContainerCreating", "PodInitializing"])
def test_a_pod_that_is_about_to_start_waits_for_nothing(message: str) -> None:
    recording = pending(EXECUTOR, message)
    step = step_of(replay_of(recording, STEPS["slow"]), recording)
    assert (step.status, step.reason) == ("running", "")


def test_a_step_says_what_its_launcher_waits_for_with_one_look_at_its_log() -> None:
    recording, replay = launched(
        f"TrainJob slow-1f created\nTrainJob slow-1f, waiting: {QUOTA_OF_NODES}\n"
    )
    step = step_of(replay, recording)
    assert (step.status, step.reason) == ("running", f"waiting: {QUOTA_OF_NODES}")
    assert len([path for path in replay.asked if path.endswith("/log")]) == 1


def test_of_a_long_log_only_the_beginning_is_fetched() -> None:
    """Of a training of days it would be fetched again at each look."""
    waiting = f"TrainJob slow-1f, waiting: {QUOTA_OF_NODES}\n"
    recording, replay = launched(waiting + "step 1\n" * (1 << 18))
    assert step_of(replay, recording).reason == ""
    recording, replay = launched(waiting + "step 1\n" * 1000)
    assert step_of(replay, recording).reason == f"waiting: {QUOTA_OF_NODES}"


def test_the_log_of_a_step_that_launches_nothing_is_not_read() -> None:
    recording = recorded("kfp-running")
    replay = replay_of(recording, STEPS["slow"])
    assert step_of(replay, recording).reason == ""
    assert not [path for path in replay.asked if path.endswith("/log")]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, "no"),
        (404, "no"),
        (200, "<html>a login</html>"),
        (200, '{"error_message": "x", "error_details": "y"}'),
    ],
)
def test_a_log_that_cannot_be_read_leaves_the_step_as_it_was(
    status: int, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recording, replay = launched("")
    replay.answers[f"GET {recording['logs'][0]['GET']}"] = (status, body)
    step = step_of(replay, recording)
    assert (step.status, step.reason) == ("running", "")
    assert len([path for path in replay.asked if path.endswith("/log")]) == 1
    is_said = "what the nodes of slow wait for is not known" in caplog.text
    assert is_said == (status != 200 or body.startswith("<html"))


@pytest.mark.parametrize(
    ("lines", "obstacle"),
    [
        (["TrainJob a created"], ""),
        (["TrainJob a, waiting: x"], "x"),
        (["TrainJob a, waiting: x", "TrainJob a, waiting: y", "step 3"], "y"),
        (["TrainJob a, waiting: x", "TrainJob a: all nodes run", "waiting: mine"], ""),
        (["TrainJob a, waiting: x", "TrainJob a failed: no reason", "the next attempt"], ""),
        (["TrainJob a, waiting: x", "TrainJob a-2 created"], ""),
    ],
)
def test_the_last_obstacle_that_is_not_past_counts(lines: list[str], obstacle: str) -> None:
    assert waits_for("\n".join(lines)) == obstacle
