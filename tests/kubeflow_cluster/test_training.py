"""The shipped pipeline on the cluster, and what becomes of it when something is taken away."""

from __future__ import annotations

import json
import re
import time

import pytest

from rekindle.ir.compile import compile_function
from rekindle.launch.events import parse
from rekindle.platforms.kubeflow.job import state_of
from tests.kubeflow_cluster import steps
from tests.kubeflow_cluster.cluster import DIGITS, Suite, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


def submitted(suite: Suite) -> str:
    """A run whose step holds two nodes."""
    arguments = {"seconds": suite.options.hold_seconds}
    return suite.submit(suite.config(compile_function(steps.holding), arguments))


def digits(suite: Suite, tracked: str, nodes: int) -> list[str]:
    """Options of the digits config."""
    settings = {
        "register.tracking_uri": tracked,
        # without a champion of an earlier run of the suite, which may be better
        "register.model_name": f"rekindle-suite-{int(time.time())}",
        "resources.nodes": nodes,
        "train.checkpoint": "{every: 40}",
    }
    return suite.settings(settings)


def steps_done(suite: Suite, run: str) -> float:
    """The last step of the training that its log tells of."""
    events = map(parse, suite.log(run, "finetune").splitlines())
    return max((event.get("step", 0) for event in events if event), default=0)


def test_digits_on_one_node_are_promoted(suite: Suite, tracked: str) -> None:
    words = digits(suite, tracked, 1)
    command = ("submit", DIGITS, "--platform", "kubeflow", "--yes", "--wait", "--json")
    summary = json.loads(suite.rekindle(*command, *words))
    assert (summary["status"], summary["gate"]["promoted"]) == ("succeeded", True)


def test_digits_on_two_nodes_lose_one_resume_and_are_promoted(trainer: Suite, tracked: str) -> None:
    run = trainer.submit(DIGITS, *digits(trainer, tracked, 2))
    job = trainer.training(run)
    # a checkpoint of step 40 is committed while steps go on
    until(lambda: steps_done(trainer, run) >= 80, "the 80th step", 900)
    trainer.record(run, "before-a-node-is-killed")
    trainer.kill(trainer.nodes(job)[1])
    assert trainer.wait_for_end(run) == "succeeded"
    assert re.search(r"resumed from the checkpoint of step \d+", trainer.log(run, "finetune"))
    (row,) = json.loads(trainer.rekindle("runs", "--json"))["runs"]
    assert row["gate"]["promoted"] is True


def test_nodes_that_were_killed_are_replaced(trainer: Suite) -> None:
    run = submitted(trainer)
    job = trainer.training(run)
    before = {pod["metadata"]["uid"] for pod in trainer.nodes(job)}
    trainer.kill(trainer.nodes(job)[1])

    def are_replaced() -> bool:
        assert trainer.active_jobs(run), "the TrainJob ended with its node"
        uids = {pod["metadata"]["uid"] for pod in trainer.nodes(job)}
        return len(uids) == 2 and not uids & before

    until(are_replaced, "two other nodes", 300)
    trainer.record(run, "replaced")
    assert trainer.wait_for_end(run) == "succeeded"


def test_a_cancelled_run_leaves_no_job_and_is_resumed(trainer: Suite) -> None:
    run = submitted(trainer)
    trainer.training(run)
    trainer.rekindle("cancel", run, "--yes")
    trainer.no_job_is_left(run)
    assert trainer.wait_for_end(run, 300) == "cancelled"
    trainer.record(run, "cancelled")
    trainer.rekindle("resume", run)
    assert trainer.wait_for_end(run) == "succeeded"


def test_a_launcher_that_is_drained_is_replaced_and_the_job_goes_on(trainer: Suite) -> None:
    run = submitted(trainer)
    job = trainer.training(run)
    (launcher,) = trainer.launchers(run)
    trainer.kill(launcher)
    until(lambda: bool(trainer.launchers(run)), "another launcher", 120)
    assert "is there already (active)" in trainer.log(run, "hold")
    (same,) = trainer.jobs(run)
    assert same["metadata"]["uid"] == job["metadata"]["uid"]
    assert trainer.wait_for_end(run) == "succeeded"


def test_a_launcher_that_is_lost_too_often_leaves_no_job(trainer: Suite) -> None:
    run = submitted(trainer)
    trainer.training(run)

    def has_failed() -> bool:
        for launcher in trainer.launchers(run):
            trainer.kill(launcher)
        return trainer.status(run) != "running"

    until(has_failed, "the end of the run without a launcher", 900)
    trainer.no_job_is_left(run)
    assert trainer.status(run) == "failed"


def test_a_launcher_whose_container_is_killed_leaves_no_job_behind_its_run(trainer: Suite) -> None:
    """Such a pod is Failed, which KFP 2.17 does not retry: the run fails at once. Earlier releases
    replace the launcher, some times."""
    run = submitted(trainer)
    trainer.training(run)

    def has_failed() -> bool:
        for launcher in trainer.launchers(run):
            trainer.fail(launcher)
        return trainer.status(run) != "running"

    until(has_failed, "the end of the run without a launcher", 900)
    trainer.no_job_is_left(run)
    trainer.record(run, "left")
    assert trainer.status(run) == "failed"
    assert not [job for job in trainer.jobs(run) if state_of(job) == "complete"]


def test_a_deadline_ends_the_job_and_fails_the_step(trainer: Suite) -> None:
    config = trainer.config(compile_function(steps.holding_with_a_deadline), {"seconds": 600})
    run = trainer.submit(config)
    assert trainer.wait_for_end(run, 600) == "failed"
    trainer.no_job_is_left(run)
    assert "exceeded its active deadline" in trainer.log(run, "hold")
