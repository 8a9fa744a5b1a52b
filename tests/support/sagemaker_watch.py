"""What tests share with platforms/sagemaker/test_watch.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.platforms.sagemaker.conftest import service as service
from tests.servers.aws import account as aws_account
from tests.servers.aws.rest import Account, serving
from tests.servers.aws.sagemaker import Pipelines
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_compile import IMAGE


@pytest.fixture
def account(
    aws: str, s3: Any, service: Pipelines, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Account]:
    from botocore.retries.standard import ExponentialBackoff

    made, around = Account(s3, service), aws_account.Facts()
    around.images[IMAGE.partition("/")[2].partition("@")[0]] = [IMAGE.partition("@")[2]]
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    with serving(made) as url, aws_account.serving(around) as questions:
        for name, value in {
            "AWS_ENDPOINT_URL": questions,
            "AWS_ENDPOINT_URL_SAGEMAKER": url,
            "AWS_ENDPOINT_URL_CLOUDWATCH_LOGS": url,
            "AWS_ENDPOINT_URL_S3": aws,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
        }.items():
            monkeypatch.setenv(name, value)
        yield made
        for run in made.runs.values():
            run.execution.stopping.set()
