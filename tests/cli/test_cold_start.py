"""`rekindle status` of a run on a platform starts in a moment: nothing heavy is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rekindle.cli.main import invoke
from tests.cli.world import World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.quick import first
from tests.support.cli_killed import account as account
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3

pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")
OWN = {"kubeflow": "kfp", "sagemaker": "boto3"}  # what those are asked with, which is light
HEAVY = {
    "torch",
    "transformers",
    "mlflow",
    "datasets",
    "kfp",
    "boto3",
    "sagemaker",
    "google.cloud.aiplatform_v1",
    "azure.ai.ml",
}
CODE = """
import json, sys, time
from rekindle.cli.main import invoke
assert invoke(["status", "--json"]) == 0
print(json.dumps([time.process_time(), sorted(sys.modules)]))
"""


@pytest.mark.parametrize("platform", first(2, ["kubeflow", "vertex", "sagemaker", "azureml"]))
def test_status_imports_nothing_that_takes_long(
    platform: str, world: World, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if platform == "sagemaker":
        request.getfixturevalue("account")
    assert invoke(["submit", "c.yaml", "--platform", platform, "--yes", "--json"]) == 0
    capsys.readouterr()
    child = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    record, told = child.stdout.splitlines()
    assert json.loads(record)["status"] == "running"
    seconds, modules = json.loads(told)
    print(f"{platform}: {seconds:.2f} s of processor time")
    assert HEAVY & {*modules} <= {OWN.get(platform)}
