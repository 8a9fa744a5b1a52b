"""What tests share with cli/test_killed.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.cli.world import World
from tests.cli.world import compiled as compiled
from tests.cli.world import served as served
from tests.cli.world import world as world
from tests.servers.aws import rest as sagemaker_rest
from tests.servers.troubles import Troubled
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3

Runs = tuple[Troubled, Callable[[], set[str]]]


@pytest.fixture
def account(
    world: World, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[sagemaker_rest.Account]:
    """SageMaker beside the rest of AWS."""
    bucket = request.getfixturevalue("s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", request.getfixturevalue("aws"))
    if "bucket" not in {one["Name"] for one in bucket.list_buckets()["Buckets"]}:
        region = {"LocationConstraint": "eu-central-1"}
        bucket.create_bucket(Bucket="bucket", CreateBucketConfiguration=region)
    made = sagemaker_rest.Account(bucket)
    with sagemaker_rest.serving(made) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_SAGEMAKER", url)
        yield made


def service_of(platform: str, world: World, request: pytest.FixtureRequest) -> Runs:
    """What is asked, and the ids of the runs that it has."""
    if platform == "kubeflow":
        return world.kfp, lambda: {*world.kfp.runs}
    if platform == "vertex":
        jobs = world.google.jobs
        return jobs, lambda: {*jobs.jobs}
    if platform == "azureml":
        workspace = world.azure.workspace
        return workspace, lambda: {*workspace.jobs}
    account = request.getfixturevalue("account")
    return account, lambda: {*account.runs}
