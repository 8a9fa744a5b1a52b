"""What tests share with platforms/sagemaker/test_schedules.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.servers.aws.rest import REGION, Account
from tests.support.moto import KEYS
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_client import account as account


@pytest.fixture
def scheduler(account: Account, aws: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The scheduler that this process finds, with nothing in it."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL_SCHEDULER", aws)
    client = boto3.client("scheduler", endpoint_url=aws, **{**KEYS, "region_name": REGION})
    for group in client.list_schedule_groups()["ScheduleGroups"]:
        if group["Name"] != "default":
            client.delete_schedule_group(Name=group["Name"])
    return client
