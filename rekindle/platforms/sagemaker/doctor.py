"""The least that the role of jobs on SageMaker may do, as IAM takes it, and whether the account
has what a config names.

The list is ours, from what the steps read and write; no account has tried it yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rekindle.platforms.checks import Check, about
from rekindle.platforms.definition import Definition
from rekindle.platforms.sagemaker import account
from rekindle.platforms.sagemaker.outline import images
from rekindle.spec.platforms import SageMakerSpec

_INTERFACES = [
    "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
]  # fmt: skip
_NETWORK = [  # IAM knows no resources of these
    "ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets", "ec2:DescribeVpcs",
]  # fmt: skip


def checks(place: SageMakerSpec, definition: Definition | None) -> Iterator[Check]:
    """About the config, and about what would be sent."""
    if not place.region or not place.role_arn:  # which of them is missing is reported elsewhere
        return
    ask = about("sagemaker", account.Account(place))
    yield ask("credentials", "role_arn", account.caller, early=True, login=True)
    yield ask("region", "region", account.region, early=True)
    if place.artifact_root:
        yield ask("bucket", "artifact_root", account.bucket, early=True)
    for image in sorted({place.image or "", *(images(definition) if definition else ())} - {""}):
        yield ask("image", "image", account.image, image, early=True)
    for variable, arn in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", account.secret, arn)


def permissions(place: SageMakerSpec) -> str:
    """A policy for `place.role_arn`, and the trust that the service needs."""
    policy = {"Version": "2012-10-17", "Statement": statements(place)}
    role = place.role_arn or "platforms.sagemaker.role_arn"
    return (
        f"The role of the jobs, {role}, which sagemaker.amazonaws.com may assume, needs:\n"
        f"{json.dumps(policy, indent=2)}"
    )


def statements(place: SageMakerSpec) -> list[dict[str, Any]]:
    """What the policy allows, a statement a resource."""
    bucket, _, folder = (place.artifact_root or "s3://BUCKET/FOLDER")[5:].rstrip("/").partition("/")
    objects = f"arn:aws:s3:::{bucket}/{folder}/*" if folder else f"arn:aws:s3:::{bucket}/*"
    image = (place.image or "ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME").partition("@")[0]
    found = [
        _allow(["s3:GetObject", "s3:PutObject", "s3:DeleteObject"], objects),
        _allow(["s3:ListBucket"], f"arn:aws:s3:::{bucket}"),
        _allow(["ecr:GetAuthorizationToken"], "*"),
        _allow(["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"], _repository(image)),
        _allow(["logs:CreateLogGroup", "logs:CreateLogStream", "logs:PutLogEvents",
                "cloudwatch:PutMetricData"], "*"),
    ]  # fmt: skip
    if place.subnets:
        made = _arn(place, "ec2", "network-interface/*")
        inside = [_arn(place, "ec2", f"subnet/{name}") for name in place.subnets]
        inside += [_arn(place, "ec2", f"security-group/{name}") for name in place.security_groups]
        found.append(_allow(["ec2:CreateNetworkInterface"], [made, *inside]))
        found += [_allow(_INTERFACES, made), _allow(_NETWORK, "*")]
    if place.kms_key:
        found.append(_key(place))
    if place.secrets:
        arns = sorted(place.secrets.values())
        found.append(_allow(["secretsmanager:GetSecretValue"], arns))
    return found


def _key(place: SageMakerSpec) -> dict[str, Any]:
    """Use of the key, which may be named by its ARN, its id or an alias."""
    uses = ["kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"]
    name = place.kms_key.split(":", 5)[-1]
    if name.startswith("alias/"):  # a policy takes no alias for a resource
        allowed = _allow(uses, _arn(place, "kms", "key/*"))
        return allowed | {"Condition": {"ForAnyValue:StringEquals": {"kms:ResourceAliases": name}}}
    if place.kms_key.startswith("arn:"):
        return _allow(uses, place.kms_key)
    return _allow(uses, _arn(place, "kms", f"key/{name}"))


def _arn(place: SageMakerSpec, service: str, name: str) -> str:
    """Something in the region and account of the jobs."""
    words = (place.role_arn or "arn:aws:iam::ACCOUNT:role/NAME").split(":")
    return f"arn:{words[1]}:{service}:{place.region or 'REGION'}:{words[4]}:{name}"


def _allow(actions: list[str], resource: str | list[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


def _repository(image: str) -> str:
    """The ARN of the repository that an image lies in."""
    host, _, name = image.partition("/")
    words = host.split(".")
    owner, region = words[0], words[3] if len(words) > 3 else "REGION"
    return f"arn:aws:ecr:{region}:{owner}:repository/{name}"
