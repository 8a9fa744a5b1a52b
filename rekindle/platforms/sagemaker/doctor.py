"""The least that the role of jobs on SageMaker may do, as IAM takes it.

The list is ours, from what the steps read and write; no account has tried it yet."""

from __future__ import annotations

import json
from typing import Any

from rekindle.errors import Problem
from rekindle.spec.places import SageMakerSpec

_NETWORK = [
    "ec2:CreateNetworkInterface", "ec2:DeleteNetworkInterface", "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups", "ec2:DescribeSubnets", "ec2:DescribeVpcs",
]  # fmt: skip


def permissions(place: SageMakerSpec) -> str:
    """A policy for `place.role_arn`, and the trust that the service needs."""
    bucket, _, folder = (place.artifact_root or "s3://BUCKET/FOLDER")[5:].rstrip("/").partition("/")
    objects = f"arn:aws:s3:::{bucket}/{folder}/*" if folder else f"arn:aws:s3:::{bucket}/*"
    image = (place.image or "ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME").partition("@")[0]
    statements = [
        _allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], objects),
        _allow(["s3:ListBucket"], f"arn:aws:s3:::{bucket}"),
        _allow(["ecr:GetAuthorizationToken"], "*"),
        _allow(["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"], _repository(image)),
        _allow(["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents",
                "cloudwatch:PutMetricData"], "*"),
    ]  # fmt: skip
    if place.subnets:
        statements.append(_allow(_NETWORK, "*"))
    if place.kms_key:
        key = place.kms_key if place.kms_key.startswith("arn:") else "*"
        statements.append(_allow(["kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"], key))
    if place.secrets:
        arns = sorted(place.secrets.values())
        statements.append(_allow(["secretsmanager:GetSecretValue"], arns))
    policy = {"Version": "2012-10-17", "Statement": statements}
    role = place.role_arn or "platforms.sagemaker.role_arn"
    return (
        f"The role of the jobs, {role}, which sagemaker.amazonaws.com may assume, needs:\n"
        f"{json.dumps(policy, indent=2)}"
    )


def problems(place: SageMakerSpec) -> tuple[Problem, ...]:
    """Nothing: no question to the account is asked yet."""
    return ()


def _allow(actions: list[str], resource: str | list[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


def _repository(image: str) -> str:
    """The ARN of the repository that an image lies in."""
    host, _, name = image.partition("/")
    words = host.split(".")
    account, region = words[0], words[3] if len(words) > 3 else "REGION"
    return f"arn:aws:ecr:{region}:{account}:repository/{name}"
