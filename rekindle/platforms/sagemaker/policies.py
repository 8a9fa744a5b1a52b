"""What roles and people may do in an account on AWS, as IAM simulates it: nothing is tried.

Only policies of the identity count there; one of a key or a bucket may allow more, and an
organisation less. Authority: botocore's model of iam (SimulatePrincipalPolicy, GetRole)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from rekindle.errors import RequestError
from rekindle.platforms.asking import Unasked
from rekindle.platforms.sagemaker.account import Session, error_code
from rekindle.spec.places import SageMakerSpec

_YOURS = [
    "sagemaker:CreatePipeline", "sagemaker:UpdatePipeline", "sagemaker:DescribePipeline",
    "sagemaker:ListPipelineVersions", "sagemaker:StartPipelineExecution",
    "sagemaker:ListPipelineExecutions", "sagemaker:DescribePipelineExecution",
    "sagemaker:StopPipelineExecution",
]  # fmt: skip


def trust(place: SageMakerSpec, session: Session, arn: str, service: str) -> str:
    """Whether the role is there, and the service may assume it."""
    iam, name = session("iam"), arn.rsplit("/", 1)[-1]
    try:
        found = iam.get_role(RoleName=name)["Role"]
    except iam.exceptions.NoSuchEntityException:
        fix = "aws iam list-roles, or make one with the policy that this command prints"
        raise RequestError(f"there is no role {arn}", fix=fix) from None
    document = found["AssumeRolePolicyDocument"]
    trusted = json.loads(unquote(document)) if isinstance(document, str) else document
    if not any(_trusts(one, service) for one in _several(trusted["Statement"])):
        raise RequestError(
            f"{service} may not assume the role {name}",
            fix=f"aws iam update-assume-role-policy: allow sts:AssumeRole to {service}",
        )
    return f"{name}, which {service} may assume"


def role_may(place: SageMakerSpec, session: Session, statement: Mapping[str, Any]) -> str:
    """Whether the role's policies allow what one statement of the least policy does."""
    actions, resources = statement["Action"], _several(statement["Resource"])
    said = f"{', '.join(actions)} on {', '.join(resources)}"
    denied = _denied(session, place.role_arn, actions, resources)
    if denied and all(action.startswith("kms:") for action in denied):
        raise Unasked(f"{said}: the policy of the key may allow it, those of the role do not")
    if denied:
        raise RequestError(
            f"the role's policies do not allow {', '.join(denied)} on {', '.join(resources)}",
            fix="add the statement that this command prints: aws iam put-role-policy",
        )
    return said


def you_may(place: SageMakerSpec, session: Session) -> str:
    """Whether who is logged in may publish and start pipelines, and hand the role on."""
    arn = _identity(session)
    bucket, _, folder = place.artifact_root.removeprefix("s3://").rstrip("/").partition("/")
    region, account = place.region, place.role_arn.split(":")[4]
    asked = (
        (_YOURS, f"arn:aws:sagemaker:{region}:{account}:pipeline/*"),
        (["iam:PassRole"], place.role_arn),
        (["s3:GetObject", "s3:PutObject"], f"arn:aws:s3:::{bucket}/{folder}/*".replace("//", "/")),
    )
    denied = [
        f"{', '.join(found)} on {resource}"
        for actions, resource in asked
        if (found := _denied(session, arn, actions, [resource]))
    ]
    if denied:
        raise RequestError(
            f"your policies do not allow {'; '.join(denied)}",
            fix="ask the account's administrator for these permissions",
        )
    return "publish and start pipelines, pass the role, upload bundles"


def _denied(
    session: Session, arn: str, actions: Sequence[str], resources: Sequence[str]
) -> list[str]:
    iam = session("iam")
    passed = {
        "ContextKeyName": "iam:PassedToService", "ContextKeyType": "string",
        "ContextKeyValues": ["sagemaker.amazonaws.com"],
    }  # fmt: skip
    try:
        pages = iam.get_paginator("simulate_principal_policy").paginate(
            PolicySourceArn=arn, ActionNames=list(actions), ResourceArns=list(resources),
            ContextEntries=[passed],
        )  # fmt: skip
        found = [one for page in pages for one in page["EvaluationResults"]]
    except iam.exceptions.ClientError as error:
        if error_code(error) in ("NoSuchEntity", "InvalidInput"):
            raise Unasked(f"IAM knows no policies of {arn}") from None
        raise
    decided = [one["EvalActionName"] for one in found if one["EvalDecision"] != "allowed"]
    return list(dict.fromkeys(decided))


def _identity(session: Session) -> str:
    """Who is logged in, as policies know them: a session of a role is that role."""
    arn = str(session("sts").get_caller_identity()["Arn"])
    if ":assumed-role/" not in arn:
        return arn
    return str(session("iam").get_role(RoleName=arn.split("/")[1])["Role"]["Arn"])


def _trusts(statement: Mapping[str, Any], service: str) -> bool:
    principal = statement.get("Principal", {})
    named = principal.get("Service", []) if isinstance(principal, Mapping) else principal
    return statement.get("Effect") == "Allow" and service in _several(named)


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
