"""What jobs of SageMaker need of a machine, and the service itself."""

from __future__ import annotations

import collections
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.sagemaker.compile import compile
from rekindle.platforms.sagemaker.section import SageMakerSpec
from tests.servers.aws.sagemaker import Pipelines
from tests.support.sagemaker_compile import PLACE

KEYS = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}


@functools.cache
def can_mount() -> bool:
    """Whether this machine lets us give a job a /opt/ml of its own."""
    if os.geteuid() != 0 or not shutil.which("unshare"):
        return False
    try_it = 'mkdir -p /opt/ml && mount --bind "$0" /opt/ml'
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    done = subprocess.run([*unshare, "sh", "-c", try_it, "/tmp"], capture_output=True)
    return done.returncode == 0


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    """URL of a fresh moto_server."""
    if not can_mount():
        pytest.skip("this machine lets us mount no /opt/ml")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        url = next(
            m[0] for line in server.stderr if (m := re.search(r"http://127\.0\.0\.1:\d+", line))
        )
        rest = server.stderr  # a full pipe would stop it
        threading.Thread(target=lambda: collections.deque(rest, maxlen=0), daemon=True).start()
        yield url
        server.kill()


@pytest.fixture(scope="module")
def s3(aws: str) -> Any:
    """A client of a fresh S3 with the bucket `lake`."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is a developer's dependency")
    client = boto3.client("s3", endpoint_url=aws, **KEYS)
    region = {"LocationConstraint": "eu-central-1"}
    client.create_bucket(Bucket="lake", CreateBucketConfiguration=region)
    return client


@pytest.fixture(scope="module")
def service(s3: Any, aws: str, tmp_path_factory: pytest.TempPathFactory) -> Pipelines:
    environment = {
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),  # the image holds rekindle
    }
    return Pipelines(s3, tmp_path_factory.mktemp("jobs"), environment)


Submit = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def submitted(service: Pipelines) -> Submit:
    """A pipeline's definition, with its bundles where they belong."""

    def submit(pipeline: Any, arguments: dict[str, Any], **place: Any) -> dict[str, Any]:
        text = compile_function(pipeline)
        made = compile(text, read(text), arguments, SageMakerSpec(**{**PLACE, **place}))
        return stored(service, made.files)

    return submit


def stored(service: Pipelines, files: Any) -> dict[str, Any]:
    """Put what was compiled where it belongs; the definition."""
    found: dict[str, Any] = {}
    for name, content in files.items():
        if name.endswith(".sagemaker.json"):
            found = json.loads(content)
        else:
            service.s3.put_object(Bucket="lake", Key=f"rekindle/{name}", Body=content)
    return found
