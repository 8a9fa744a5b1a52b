"""What keeps nodes from starting is said in the log of their step, and by `status`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.errors import RekindleError
from rekindle.ir.compile import compile_function
from tests.kubeflow_cluster import steps
from tests.kubeflow_cluster.cluster import Suite, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "rekindle-suite"},
    "spec": {"hard": {"requests.nvidia.com/gpu": "0"}},
}


@pytest.fixture
def no_gpus(trainer: Suite) -> Iterator[Suite]:
    """The namespace has a quota that refuses pods with a GPU; it goes with the test."""
    path = f"/api/v1/namespaces/{trainer.options.namespace}/resourcequotas"
    try:
        quota = trainer.api.create(path, QUOTA)
    except RekindleError as error:
        pytest.skip(f"this user may create no quota: {error}")
    yield trainer
    trainer.api.delete(f"{path}/rekindle-suite", quota["metadata"]["uid"])


def is_said(suite: Suite, run: str, words: str) -> None:
    """Fail unless the step's log names the obstacle within three minutes of the job's creation,
    and its state does."""
    until(lambda: bool(suite.active_jobs(run)), "a TrainJob", 900)

    def is_in_the_log() -> bool:
        lines = suite.log(run, "hold").splitlines()
        return any("waiting: " in line and words in line for line in lines)

    until(is_in_the_log, f"`waiting: ... {words}` in the log", 180)
    step = suite.step(run, "hold")
    assert step["status"] == "running"
    assert step["reason"].startswith("waiting: ")
    assert words in step["reason"]
    suite.record(run, "waiting")
    suite.rekindle("cancel", run, "--yes")
    suite.no_job_is_left(run)


def test_a_quota_is_said_in_the_log_of_the_step_and_by_status(no_gpus: Suite) -> None:
    text = compile_function(steps.holding_gpus)
    is_said(no_gpus, no_gpus.submit(no_gpus.config(text, {"seconds": 1})), "exceeded quota")


def test_a_missing_account_is_said_in_the_log_of_the_step_and_by_status(trainer: Suite) -> None:
    text = compile_function(steps.holding)
    config = trainer.config(text, {"seconds": 1}, node_account="rekindle-suite-missing")
    is_said(trainer, trainer.submit(config), "rekindle-suite-missing")
