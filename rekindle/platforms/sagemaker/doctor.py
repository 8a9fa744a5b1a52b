"""The least that the role of jobs on SageMaker may do, as IAM takes it, and whether the account
has what a config names.

The list is ours, from what the steps read and write; no account has tried it yet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rekindle.answers import ReadinessCheck
from rekindle.platforms.asking import Question
from rekindle.platforms.asking import checks as asked
from rekindle.platforms.definition import Definition
from rekindle.platforms.sagemaker import account, policies
from rekindle.platforms.sagemaker.outline import jobs
from rekindle.spec.places import SageMakerSpec

_SECTION = "platforms.sagemaker"
_INTERFACES = [
    "ec2:CreateNetworkInterfacePermission", "ec2:DeleteNetworkInterface",
    "ec2:DeleteNetworkInterfacePermission",
]  # fmt: skip
_NETWORK = [  # IAM knows no resources of these
    "ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets", "ec2:DescribeVpcs",
]  # fmt: skip


def permissions(place: SageMakerSpec) -> str:
    """A policy for `place.role_arn`, and the trust that the service needs."""
    policy = {"Version": "2012-10-17", "Statement": statements(place)}
    role = place.role_arn or f"{_SECTION}.role_arn"
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


def checks(
    place: SageMakerSpec, definition: Definition | None, early: bool = False
) -> tuple[ReadinessCheck, ...]:
    """What the account says of the config and of what it would be sent."""
    if not place.region or not place.role_arn:  # what lacks then is said elsewhere
        return ()
    there = account.Account(place)
    login = there.question("credentials", f"{_SECTION}.role_arn", account.caller, True)
    return asked(login, _questions(there, definition), early)


def _questions(there: account.Account, definition: Definition | None) -> Iterator[Question]:
    place = there.place

    def ask(name: str, field: str, what: Any, early: bool = False, *words: Any) -> Question:
        return there.question(name, f"{_SECTION}.{field}", what, early, *words)

    work = list(jobs(definition)) if definition else []
    yield ask("region", "region", account.region, True)
    yield ask("role", "role_arn", policies.trust, False, place.role_arn, "sagemaker.amazonaws.com")
    if place.schedule_role_arn:
        service = "scheduler.amazonaws.com"
        yield ask("role of schedules", "schedule_role_arn", policies.trust, False,
                  place.schedule_role_arn, service)  # fmt: skip
    for statement in statements(place):
        yield ask("the role may", "role_arn", policies.role_may, False, statement)
    yield ask("you may", "role_arn", policies.you_may)
    if place.artifact_root:
        yield ask("bucket", "artifact_root", account.bucket, True)
    if place.kms_key:
        yield ask("key", "kms_key", account.key)
    for image in sorted({place.image or "", *(image for _, _, image in work)} - {""}):
        yield ask("image", "image", account.image, True, image)
    for name, (count, step) in sorted(account.usages(work).items()):
        yield ask("quota", "machine", account.quota, False, name, count, step)
    if place.subnets:
        yield ask("network", "subnets", account.network)
    for variable, arn in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", account.secret, False, arn)


def _allow(actions: list[str], resource: str | list[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


def _repository(image: str) -> str:
    """The ARN of the repository that an image lies in."""
    host, _, name = image.partition("/")
    words = host.split(".")
    owner, region = words[0], words[3] if len(words) > 3 else "REGION"
    return f"arn:aws:ecr:{region}:{owner}:repository/{name}"
