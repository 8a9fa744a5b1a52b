"""All four platforms as one process finds them, each with all that a config names: a world in which a
request works, for tests that take something away."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.ir.compile import compile_function
from tests.servers.aws import account as aws_account
from tests.servers.azure import facts as azure_facts
from tests.servers.azure.rest import SUBSCRIPTION, Workspace, token_for
from tests.servers.google import project as google_project
from tests.servers.google.rest import PROJECT, REGION, Project, key_file
from tests.servers.kubeflow import rest as kfp_rest
from tests.servers.tls_hosts import Answer, Hosts, identity
from tests.support.two_steps import pipeline as two_steps

DIGEST = "sha256:" + "0" * 64
ACCOUNT = aws_account.ACCOUNT
ECR = f"{ACCOUNT}.dkr.ecr.eu-central-1.amazonaws.com"


class World:
    """All four platforms, each with all that the config names; `begin` has them as they were."""

    def __init__(self) -> None:
        self.aws, self.kfp = aws_account.Facts(), kfp_rest.Server()
        self.begin()

    def begin(self) -> None:
        self.aws.__init__()  # servers know these two
        self.kfp.__init__()
        self.google = google_project.Facts(Project())
        self.azure = azure_facts.Facts(Workspace(compute=("cpus",)))

    def answer(self, asked: Any) -> Answer:
        google = asked.host.endswith((".googleapis.com", ".pkg.dev"))
        return (self.google if google else self.azure).answer(asked)

    def made(self) -> list[str]:
        """What there is now that was not there before."""
        assert self.google.jobs
        workspace = self.azure.workspace
        found = [
            self.google.jobs.jobs,
            self.google.jobs.schedules,
            workspace.jobs,
            workspace.assets,
        ]
        found += [
            workspace.blobs,
            workspace.schedules,
            self.kfp.experiments,
            self.kfp.runs,
            self.kfp.recurring,
        ]
        calls = [
            line for line in self.aws.refused if "nobody answers" in line or "there is no " in line
        ]
        return [key for one in found for key in one] + calls


@dataclasses.dataclass
class Served:
    """What answers for `world`, and how it is found."""

    world: World
    environment: dict[str, str]
    kfp: str


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tls")
    made, names = World(), (*azure_facts.HOSTS, *google_project.HOSTS)
    tokens = {resource: token_for(resource) for resource in azure_facts.RESOURCES}
    with (
        Hosts(folder, names, made.answer) as hosts,
        aws_account.serving(made.aws) as aws,
        kfp_rest.serving(made.kfp) as kfp,
        identity(tokens) as msi,
    ):
        yield Served(
            made,
            {
                **hosts.environment,
                **msi,
                "AWS_ENDPOINT_URL": aws,
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
                "AWS_CONFIG_FILE": "/nowhere",
                "GOOGLE_APPLICATION_CREDENTIALS": str(key_file(folder)),
                "NO_GCE_CHECK": "true",
                "CLOUDSDK_CONFIG": str(folder),
                "KFP_TOKEN": kfp_rest.TOKEN,
            },
            kfp,
        )


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pipeline") / "p.yaml"
    path.write_text(compile_function(two_steps))
    return path


@pytest.fixture
def world(served: Served, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The platforms, as this process finds them; its folder holds a config for all of them."""
    from botocore.retries.standard import ExponentialBackoff

    from rekindle.platforms import reads

    served.world.begin()
    monkeypatch.setattr(reads, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    for name, value in served.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(yaml.safe_dump(config(served.kfp, compiled), sort_keys=False))
    return served.world


def config(kfp: str, pipeline: Path) -> dict[str, Any]:
    return {
        "name": "c",
        "pipeline": str(pipeline),
        "arguments": {"n": 3},
        "platforms": {
            "kubeflow": {"host": kfp, "token": "env:KFP_TOKEN", "artifact_root": "/mnt/r"},
            "vertex": {
                "project": PROJECT,
                "region": REGION,
                "artifact_root": "gs://lake/r",
                "image": f"europe-docker.pkg.dev/{PROJECT}/r/train@{DIGEST}",
            },
            "sagemaker": {
                "region": "eu-central-1",
                "role_arn": f"arn:aws:iam::{ACCOUNT}:role/me",
                "artifact_root": "s3://bucket/r",
                "image": f"{ECR}/train@{DIGEST}",
            },
            "azureml": {
                "subscription": SUBSCRIPTION,
                "resource_group": "rg",
                "workspace": "forge",
                "artifact_root": "abfs://lake@acc.dfs.core.windows.net/r",
                "image": f"lake.azurecr.io/train@{DIGEST}",
            },
        },
    }
