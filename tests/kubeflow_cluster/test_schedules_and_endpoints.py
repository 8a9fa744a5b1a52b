"""A schedule starts runs until it is deleted; an endpoint answers until it is deleted."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import yaml

from rekindle.ir.compile import compile_function
from rekindle.platforms.kubeflow.client import connected
from tests.kubeflow_cluster import steps
from tests.kubeflow_cluster.cluster import DIGITS, Suite, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def started_by(suite: Suite, schedule: str) -> list[Any]:
    """Runs that the recurring run of that name started."""
    with connected(suite.place) as server:
        recurring = server.listed(server.kfp.list_recurring_runs, "recurring_runs")
        ids = [each.recurring_run_id for each in recurring if each.display_name == schedule]
        runs = server.listed(server.kfp.list_runs, "runs")
    return [run for run in runs if run.recurring_run_id in ids]


def test_a_schedule_starts_a_run_and_is_deleted(suite: Suite) -> None:
    config = suite.config(compile_function(steps.scheduled), {})
    document = {**yaml.safe_load(config.read_text()), "schedule": {"cron": "* * * * *"}}
    config.write_text(yaml.safe_dump(document))
    to = ("--platform", "kubeflow", "--json")
    (schedule,) = json.loads(suite.rekindle("schedule", "set", config, "--yes", *to))["schedules"]
    try:
        until(lambda: bool(started_by(suite, schedule["id"])), "a run that it starts", 240)
    finally:
        suite.rekindle("schedule", "delete", config, "--yes", *to)
    assert json.loads(suite.rekindle("schedule", "list", config, *to))["schedules"] == []


def test_an_endpoint_proves_itself_by_rows_and_is_deleted(suite: Suite, tracked: str) -> None:
    if suite.options.artifact_root.startswith("minio://"):
        pytest.skip("KUBEFLOW_ARTIFACT_ROOT is a store that this machine cannot write to")
    name = f"rekindle-suite-{int(time.time())}"
    settings = {"register.tracking_uri": tracked, "register.model_name": name}
    if not suite.options.gateway:
        settings["deploy.canary"] = "[]"
    words = [*suite.settings(settings), "--platform", "kubeflow", "--yes", "--json"]
    suite.rekindle("submit", DIGITS, "--wait", *words)
    try:
        suite.rekindle("deploy", "start", DIGITS, *words)
        status = suite.rekindle("deploy", "status", "latest", "--platform", "kubeflow", "--json")
        (version,) = json.loads(status)["versions"].values()
        assert (version["state"], version["share"], version["errors"]) == ("ready", 100, 0)
    finally:
        suite.rekindle("deploy", "delete", "latest", "--platform", "kubeflow", "--yes")
    base = f"/apis/apps/v1/namespaces/{suite.options.namespace}/deployments"
    assert suite.listed(base, labelSelector=f"rekindle={name}") == []
