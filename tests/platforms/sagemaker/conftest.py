"""The service of SageMaker that executes pipelines, and pipelines submitted to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.sagemaker.compile import compile
from rekindle.platforms.sagemaker.section import SageMakerSpec
from tests.servers.aws.sagemaker import Pipelines
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_compile import PLACE


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
