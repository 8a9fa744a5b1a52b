"""What tests share with platforms/sagemaker/test_client.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition
from tests.servers.aws.rest import Account, serving
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_compile import PLACE as KWARGS
from tests.support.sagemaker_compile import compiled
from tests.support.two_steps import pipeline as two_steps

PLACE = SageMakerSpec(**KWARGS)


@pytest.fixture
def account(aws: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    """An account that this process finds, logged in by its environment; nothing runs in it."""
    from botocore.retries.standard import ExponentialBackoff

    made = Account(s3)
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    with serving(made) as url:
        for name, value in {
            "AWS_ENDPOINT_URL_SAGEMAKER": url,
            "AWS_ENDPOINT_URL_S3": aws,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
        }.items():
            monkeypatch.setenv(name, value)
        yield made


def definition(n: int = 3) -> Definition:
    return compiled(two_steps, {"n": n})
