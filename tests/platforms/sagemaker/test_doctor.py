"""The policy that doctor prints for a role on SageMaker; what it asks the account, of moto."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.platforms.checks import Needs, run_checks
from rekindle.platforms.sagemaker.doctor import checks, statements
from rekindle.platforms.sagemaker.limits import limits
from rekindle.platforms.sagemaker.section import SageMakerSpec
from tests.support.moto import aws as aws
from tests.support.moto import s3 as s3
from tests.support.sagemaker_compile import ECR, PLACE

HERE = "eu-central-1:123456789012"
NETWORK = {"subnets": ("subnet-1",), "security_groups": ("sg-1",)}
KEYS = {
    f"arn:aws:kms:{HERE}:key/k": (f"arn:aws:kms:{HERE}:key/k", None),
    "1234-ab": (f"arn:aws:kms:{HERE}:key/1234-ab", None),
    "alias/lake": (f"arn:aws:kms:{HERE}:key/*", "alias/lake"),
    f"arn:aws:kms:{HERE}:alias/lake": (f"arn:aws:kms:{HERE}:key/*", "alias/lake"),
}


@pytest.mark.parametrize("name", KEYS)
def test_the_role_may_use_one_key_by_whatever_name_it_goes(name: str) -> None:
    (use,) = [
        statement
        for statement in statements(SageMakerSpec(**{**PLACE, "kms_key": name}))
        if statement["Action"][0].startswith("kms:")
    ]
    resource, alias = KEYS[name]
    assert use["Resource"] == resource
    condition = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": alias}} if alias else None
    assert use.get("Condition") == condition


def test_the_role_makes_network_interfaces_in_the_subnets_of_the_config_only() -> None:
    found = {
        action: statement["Resource"]
        for statement in statements(SageMakerSpec(**PLACE, **NETWORK))
        for action in statement["Action"]
        if action.startswith("ec2:")
    }
    anywhere = {action for action, resource in found.items() if resource == "*"}
    assert all(action.startswith("ec2:Describe") for action in anywhere)
    interface = f"arn:aws:ec2:{HERE}:network-interface/*"
    assert found["ec2:CreateNetworkInterface"] == [
        interface,
        f"arn:aws:ec2:{HERE}:subnet/subnet-1",
        f"arn:aws:ec2:{HERE}:security-group/sg-1",
    ]
    assert found["ec2:DeleteNetworkInterface"] == interface


def test_every_right_is_an_operation_that_the_service_has() -> None:
    session = pytest.importorskip("botocore.session", reason="a developer's dependency")
    models = {"sagemaker": ("sagemaker", "sagemaker-runtime"), "logs": ("logs",)}
    known = {
        f"{prefix}:{operation}"
        for prefix, services in models.items()
        for service in services
        for operation in session.get_session().get_service_model(service).operation_names
    }
    tables = [f"{name}permissions" for name in ("", "network_", "deploy_", "publish_")]
    rows = [row for table in tables for row in limits()[table]]
    named = {action for row in rows for action in row["actions"]}
    assert {action for action in named if action.partition(":")[0] in models} <= known


@pytest.mark.slow
def test_moto_is_asked_in_the_same_words(
    aws: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's idea of AWS: what it knows it finds."""
    boto3 = pytest.importorskip("boto3", reason="boto3 is a developer's dependency")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws)
    region = PLACE["region"]
    boto3.client("ecr", region).create_repository(repositoryName="train")
    made = boto3.client("secretsmanager", region).create_secret(Name="hub", SecretString="x")
    place = {**PLACE, "image": f"{ECR}/train:1", "secrets": {"HF_TOKEN": made["ARN"]}}
    found = run_checks(checks(SageMakerSpec(**place), None, Needs()))
    assert {check.name: check.state for check in found} == {
        "credentials": "ok",
        "region": "ok",
        "bucket": "ok",
        "image": "problem",
        "secret HF_TOKEN": "ok",
    }, found
    (said,) = [check.said for check in found if check.state == "problem"]
    assert said == f"ECR has no image {ECR}/train:1"
