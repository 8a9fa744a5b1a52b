"""The cluster of the suite; each test skips with the reason for which it cannot run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rekindle.errors import RekindleError
from tests.kubeflow_cluster.cluster import Options, Suite

_RUNTIME = "/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes/rekindle"


@pytest.fixture(scope="session")
def options() -> Options:
    found = Options.from_environment()
    if not found.host or not found.image:
        pytest.skip("no cluster: make test-kubeflow KUBECONFIG=... HOST=... IMAGE=...")
    return found


@pytest.fixture
def suite(options: Options, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Suite]:
    """Commands and the cluster; what the test's runs left is recorded, and they are stopped."""
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    made = Suite(options, tmp_path, name)
    yield made
    for run in made.runs():
        try:
            made.record(run)
        finally:
            made.rekindle("cancel", run, "--yes")


@pytest.fixture
def trainer(suite: Suite) -> Suite:
    """The same, where Kubeflow Trainer is there with rekindle's runtime."""
    try:
        runtime = suite.api.get(_RUNTIME)
    except RekindleError as error:
        pytest.skip(f"Trainer's runtime cannot be read: {error}")
    if runtime is None:
        pytest.skip("the cluster has no ClusterTrainingRuntime `rekindle`")
    return suite


@pytest.fixture
def tracked(options: Options) -> str:
    """The MLflow server that steps register models at."""
    if not options.tracking_uri:
        pytest.skip("KUBEFLOW_TRACKING_URI names no MLflow server that the cluster reaches")
    return options.tracking_uri
