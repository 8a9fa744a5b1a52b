"""Definitions for SageMaker, executed against its container contract (tests/servers/sagemaker.py): the
same parameters and artifacts as a run here."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.ir.compile import compile_function
from rekindle.ir.read import read
from rekindle.platforms.sagemaker.compile import compile
from rekindle.spec.model import SageMakerSpec
from tests.platforms.local.runs import module, run
from tests.platforms.sagemaker.test_compile import PLACE, named_result
from tests.platforms.sagemaker.test_compile import pipeline as two_steps
from tests.servers.sagemaker import Execution, Failed, Pipelines


def can_mount() -> bool:
    """Whether this machine lets us give a job a /opt/ml of its own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    try_it = 'mkdir -p /opt/ml && mount --bind "$0" /opt/ml'
    done = subprocess.run(["unshare", "-m", "sh", "-c", try_it, "/tmp"], capture_output=True)
    return done.returncode == 0


pytestmark = pytest.mark.skipif(not can_mount(), reason="this machine lets us mount no /opt/ml")
SAME = module("same")
CASES = [
    "one step", "all kinds of parameters", "all kinds of arguments", "constants", "named tuple",
    "artifacts and metadata", "metrics", "output paths", "input path", "defaults", "integers",
    "nested pipelines", "environment", "loop over constants", "loop over structs", "list of artifacts",
    "nested loops with the item of the outer one", "loop over nested pipelines",
    "artifact as a return value",
]  # fmt: skip


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of a fresh S3 with the bucket `lake`."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is a developer's dependency")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(
            m[0] for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line))
        )
        rest = server.stderr  # a full pipe would stop it
        threading.Thread(target=lambda: collections.deque(rest, maxlen=0), daemon=True).start()
        client = boto3.client(
            "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x",
            aws_secret_access_key="x",
        )  # fmt: skip
        client.create_bucket(Bucket="lake")
        yield client
        server.kill()


@pytest.fixture(scope="module")
def service(s3: Any, tmp_path_factory: pytest.TempPathFactory) -> Pipelines:
    return Pipelines(s3, tmp_path_factory.mktemp("jobs"))


def submitted(service: Pipelines, pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The definition, with its bundles where they belong."""
    text = compile_function(pipeline)
    made = compile(text, read(text), arguments, SageMakerSpec(**PLACE))
    found: dict[str, Any] = {}
    for name, content in made.files.items():
        if name.endswith(".sagemaker.json"):
            found = json.loads(content)
        else:
            service.s3.put_object(Bucket="lake", Key=f"rekindle/{name}", Body=content)
    return found


def what_came_of_it(execution: Execution, s3: Any) -> dict[str, Any]:
    """Parameters and artifacts by job, the artifacts as schema and metadata."""
    found = {}
    for name in execution.jobs:
        result = execution.result(name, s3)
        artifacts = {n: [a["schema_title"], a["metadata"]] for n, a in result["artifacts"].items()}
        found[name] = [result["parameters"], artifacts]
    return found


def what_came_of_it_here(home: Path, pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    record = run(read(compile_function(pipeline)), home, arguments)
    return {
        step.name.replace("/", "-"): [
            dict(step.parameters),
            {n: [a.schema_title, dict(a.metadata)] for n, a in step.artifacts.items()},
        ]
        for step in record.steps
        if step.status == "succeeded"
    }


@pytest.mark.parametrize("case", CASES)
def test_every_step_leaves_what_it_leaves_here(
    case: str, service: Pipelines, tmp_path: Path
) -> None:
    pipeline, arguments = SAME.CASES[case]
    execution = service.execute(submitted(service, pipeline, arguments))
    here = what_came_of_it_here(tmp_path / "home", pipeline, arguments)
    assert what_came_of_it(execution, service.s3) == here


@pytest.mark.parametrize("n", [1, 3])
def test_a_condition_on_what_a_step_returned_decides(
    n: int, service: Pipelines, tmp_path: Path
) -> None:
    execution = service.execute(submitted(service, two_steps, {"n": n}))
    assert execution.conditions == {"if-condition-1": n > 1}
    assert len(execution.jobs) == (2 if n > 1 else 1)
    here = what_came_of_it_here(tmp_path / "home", two_steps, {"n": n})
    assert what_came_of_it(execution, service.s3) == here


def test_an_artifact_may_be_called_result(service: Pipelines, tmp_path: Path) -> None:
    execution = service.execute(submitted(service, named_result, {"text": "é"}))
    assert execution.result("read", service.s3)["parameters"] == {"Output": "é"}


def test_a_parameter_is_given_to_an_execution(service: Pipelines) -> None:
    definition = submitted(service, SAME.arithmetic, {"a": 3})
    usual, other = service.execute(definition), service.execute(definition, a=4)
    results = [what_came_of_it(execution, service.s3) for execution in (usual, other)]
    assert results[0] != results[1]
    again = service.execute(definition, a=4)
    assert what_came_of_it(again, service.s3) == results[1]
    assert all(job.cached for job in again.jobs.values())


def test_a_step_that_fails_says_why(service: Pipelines) -> None:
    definition = submitted(service, module("behaviour").failing, {"folder": "/tmp"})
    with pytest.raises(Failed, match="ValueError: no"):
        service.execute(definition)


def test_a_step_is_tried_again_in_its_container(service: Pipelines, tmp_path: Path) -> None:
    definition = submitted(service, SAME.retried, {"folder": str(tmp_path)})
    execution = service.execute(definition)
    assert (tmp_path / "tries").read_text() == "xxx"
    (job,) = execution.jobs.values()
    assert "attempt 2 failed" in job.log
