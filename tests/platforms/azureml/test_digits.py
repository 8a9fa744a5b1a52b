"""The shipped pipeline that deploys, on Azure ML: what the command compiled runs command by command, each step a process, and
the last one has a managed endpoint answer."""

from __future__ import annotations

import json
import os
import re
import ssl
from pathlib import Path

import pytest

pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")

import httpx

from rekindle.cli.main import invoke
from rekindle.records import Evidence
from tests.platforms.azureml.conftest import service as service
from tests.servers import impatient
from tests.servers.azure import lake
from tests.servers.azure.jobs import Workspace as Jobs
from tests.servers.azure.rest import SUBSCRIPTION, Workspace, token_for
from tests.support.azureml_compile import IMAGE
from tests.support.moto import can_mount
from tests.support.otherwise import words_of
from tests.support.registry import mlflow as mlflow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not can_mount(), reason="this machine lets us mount nothing"),
]
ROOT = Path(__file__).parents[3]
HOW = ("HTTPS_PROXY", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "MSI_ENDPOINT", "MSI_SECRET")


def test_what_passes_its_gate_is_deployed_by_the_last_step_and_answers(
    service: Workspace, mlflow: str, tmp_path: Path
) -> None:
    settings = {
        "platforms.azureml.subscription": SUBSCRIPTION,
        "platforms.azureml.resource_group": "rg",
        "platforms.azureml.workspace": "forge",
        "platforms.azureml.image": IMAGE,
        "platforms.azureml.artifact_root": "abfs://lake@acc.dfs.core.windows.net/rekindle",
        "register.tracking_uri": mlflow,
        "deploy.after_promotion": "true",
    }
    asked = ["compile", str(ROOT / "configs" / "digits.yaml"), "--platform", "azureml"]
    assert invoke([*asked, "-o", str(tmp_path / "made"), *words_of(settings)]) == 0
    service.endpoints.lake = tmp_path / "lake"
    driver = impatient.installed(lake.installed(tmp_path / "driver", tmp_path / "lake"))
    environment = {name: os.environ[name] for name in HOW}
    environment |= {"PYTHONPATH": f"{ROOT}:{driver}", "OMP_NUM_THREADS": "1"}
    (tmp_path / "runs").mkdir()
    (file,) = (tmp_path / "made").rglob("*.azureml.yaml")
    done = Jobs(tmp_path / "runs", environment).run(file)
    log = (done["condition_1_deploy"] / "log-0").read_text()
    states = re.findall(r'"state":"(\w+)"', log)
    assert states == ["create", "smoke", "live", "settled"]
    ((name, deployments),) = service.endpoints.names.items()
    (deployment,) = deployments - {"deployments"}
    traffic = service.endpoints.there[f"onlineEndpoints/{name}"]["properties"]["traffic"]
    assert traffic == {deployment: 100}
    (evidence,) = (tmp_path / "lake/acc/lake/rekindle/deployments/digits").glob("v1-*/evidence*")
    (row, *_) = Evidence.read(evidence).smoke.rows
    url = json.loads(
        (done["condition_1_deploy"] / "outputs/rekindle_result/result.json").read_text()
    )
    answer = httpx.post(
        url["parameters"]["address"],
        json={"instances": [{"image": row.content}]},
        headers={
            "authorization": f"Bearer {token_for('https://ml.azure.com')}",
            "azureml-model-deployment": deployment,
        },
        proxy=os.environ["HTTPS_PROXY"],
        verify=ssl.create_default_context(cafile=os.environ["SSL_CERT_FILE"]),
    )
    assert answer.json()["predictions"] == [row.answer]
