"""What doctor asks an account on AWS: boto3 itself, over HTTP, against one that is played here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.answers import ReadinessCheck
from rekindle.platforms.definition import Definition
from rekindle.platforms.sagemaker.doctor import checks, statements
from rekindle.spec.places import SageMakerSpec
from tests.platforms.sagemaker.conftest import aws as aws
from tests.platforms.sagemaker.conftest import s3 as s3
from tests.platforms.sagemaker.test_compile import compiled
from tests.platforms.sagemaker.test_compile import pipeline as two_steps
from tests.servers.aws_account import ACCOUNT, REGION, TRUST, Bucket, Facts, serving

pytest.importorskip("boto3", reason="boto3 is a developer's dependency")

HF = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:hub"
KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/k"
DIGEST = "sha256:" + "0" * 64
ECR = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com"
KWARGS: dict[str, Any] = {
    "region": REGION, "role_arn": f"arn:aws:iam::{ACCOUNT}:role/me",
    "artifact_root": "s3://bucket/rekindle", "image": f"{ECR}/train@{DIGEST}",
    "kms_key": KEY, "secrets": {"HF_TOKEN": HF},
}  # fmt: skip
NETWORK = {"subnets": ("subnet-1",), "security_groups": ("sg-1",)}  # a second to load ec2's model


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Facts]:
    """An account that has everything, and that this process finds, logged in by its environment."""
    from botocore.retries.standard import ExponentialBackoff

    made = Facts()
    made.keys[KEY], made.subnets["subnet-1"], made.groups["sg-1"] = "Enabled", "vpc-1", "vpc-1"
    made.secrets.add(HF)
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with serving(made) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield made


@functools.cache
def definition() -> Definition:
    return compiled(two_steps, {"n": 3}, **KWARGS)


def asked(early: bool = False, **changes: Any) -> tuple[ReadinessCheck, ...]:
    return checks(SageMakerSpec(**{**KWARGS, **changes}), definition(), early)


def wrong(found: tuple[ReadinessCheck, ...]) -> list[str]:
    return [f"{check.said} | {check.fix}" for check in found if check.state == "problem"]


HERE = f"{REGION}:{ACCOUNT}"
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
        for statement in statements(SageMakerSpec(**{**KWARGS, "kms_key": name}))
        if statement["Action"][0].startswith("kms:")
    ]
    resource, alias = KEYS[name]
    assert use["Resource"] == resource
    condition = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": alias}} if alias else None
    assert use.get("Condition") == condition


def test_the_role_makes_network_interfaces_in_the_subnets_of_the_config_only() -> None:
    found = {
        action: statement["Resource"]
        for statement in statements(SageMakerSpec(**KWARGS, **NETWORK))
        for action in statement["Action"]
        if action.startswith("ec2:")
    }
    anywhere = {action for action, resource in found.items() if resource == "*"}
    assert all(action.startswith("ec2:Describe") for action in anywhere)
    interface = f"arn:aws:ec2:{HERE}:network-interface/*"
    assert found["ec2:CreateNetworkInterface"] == [
        interface, f"arn:aws:ec2:{HERE}:subnet/subnet-1", f"arn:aws:ec2:{HERE}:security-group/sg-1",
    ]  # fmt: skip
    assert found["ec2:DeleteNetworkInterface"] == interface


def test_an_account_that_has_everything_has_no_problem_and_is_only_asked(facts: Facts) -> None:
    found = asked(**NETWORK)
    assert {check.state for check in found} == {"ok"}, [c for c in found if c.state != "ok"]
    assert [check.name for check in found if check.name != "the role may"] == [
        "credentials", "region", "role", "you may", "bucket", "key", "image", "quota", "network",
        "secret HF_TOKEN",
    ]  # fmt: skip
    reads = ("Get", "Describe", "List", "Head", "Simulate")
    assert all(call.partition(":")[2].startswith(reads) for call in facts.calls)
    assert facts.refused == []


def test_before_a_submission_little_is_asked(facts: Facts) -> None:
    found = asked(early=True)
    assert [check.name for check in found] == ["credentials", "region", "bucket", "image"]
    assert len(facts.calls) == 4, "the bucket is asked whose it is, too"


Change = Callable[[Facts], Any]
WRONG: dict[str, tuple[int, Change, dict[str, Any], str]] = {  # what goes together, what, and what is said
    "a bucket that is not there": (1, lambda f: f.buckets.clear(), {}, "there is no bucket bucket | aws s3 mb s3://bucket",
    ),
    "a bucket of somebody else": (2, lambda f: f.buckets.update(bucket=Bucket(owner="999999999999", shared=False)), {},
        "the bucket bucket belongs to another account, or you may not look at it | name a bucket of yours",
    ),
    "a bucket elsewhere": (3, lambda f: f.buckets.update(bucket=Bucket(region="us-east-1")), {},
        "the bucket bucket is in us-east-1, the pipeline in eu-central-1 | name a bucket in",
    ),
    "a role that is not there": (1, lambda f: f.roles.clear(), {}, "there is no role arn:aws:iam::"),
    "a role that the service may not assume": (2, lambda f: f.roles.update(me={"Statement": []}), {},
        "sagemaker.amazonaws.com may not assume the role me | aws iam update-assume-role-policy",
    ),
    "a role that may not read": (3, lambda f: f.denied.update({"me s3:GetObject", "me s3:PutObject"}), {},
        "the role's policies do not allow s3:GetObject, s3:PutObject on arn:aws:s3:::bucket/rekindle/* | add",
    ),
    "somebody who may not pass the role": (2, lambda f: f.denied.add("who-asks iam:PassRole"), {},
        "your policies do not allow iam:PassRole on arn:aws:iam::123456789012:role/me | ask",
    ),
    "a key that is not there": (1, lambda f: f.keys.clear(), {}, f"there is no key {KEY} | aws kms list-keys"),
    "a key that nobody may use": (2, lambda f: f.keys.update({KEY: "PendingDeletion"}), {}, f"the key {KEY} is PendingDeletion | aws kms",
    ),
    "an image that is not there": (1, lambda f: f.images.update(train=["latest"]), {}, f"ECR has no image {ECR}/train@{DIGEST} | push it",
    ),
    "a repository that is not there": (2, lambda f: f.images.clear(), {}, "ECR has no repository train | aws ecr create-repository",
    ),
    "an image elsewhere": (3, lambda f: None, {"image": f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/train@{DIGEST}"},
        "the image is in us-east-1, the jobs are in eu-central-1 | push it to ECR in eu-central-1",
    ),
    "too small a quota": (1, lambda f: f.quotas.update({"ml.m5.xlarge for processing job usage": 0}), {},
        "wants 1 of `ml.m5.xlarge for processing job usage`, the account may have 0 | aws service-quotas",
    ),
    "a subnet that is not there": (1, lambda f: f.subnets.clear(), NETWORK, "The subnet ID 'subnet-1' does not exist | aws ec2",
    ),
    "a network of two halves": (2, lambda f: f.groups.update({"sg-1": "vpc-2"}), NETWORK, "are of several networks: vpc-1, vpc-2 | name",
    ),
    "a secret that is not there": (1, lambda f: f.secrets.clear(), {}, f"there is no secret {HF} | aws"),
    "a region that is not there": (4, lambda f: None, {"region": "eu-central-9", "secrets": {}, "image": KWARGS["image"].replace(REGION, "eu-central-9")},
        "there is no region `eu-central-9` with SageMaker | such as eu-central-",
    ),
}  # fmt: skip


@pytest.mark.parametrize("together", sorted({case[0] for case in WRONG.values()}))
def test_all_that_an_account_lacks_is_said_at_once_with_its_fix(
    together: int, facts: Facts
) -> None:
    cases = {name: case for name, case in WRONG.items() if case[0] == together}
    settings: dict[str, Any] = {}
    for _, change, more, _ in cases.values():
        change(facts)
        settings |= more
    found = wrong(asked(**settings))
    missed = [name for name, (*_, says) in cases.items() if not any(says in line for line in found)]
    assert missed == [], found


LOGINS: dict[str, tuple[Change, str]] = {
    "an expired token": (
        lambda f: f.errors.update({"sts:*": (403, "ExpiredToken")}), "| aws sso login",
    ),
    "keys that nobody knows": (
        lambda f: f.errors.update({"sts:*": (403, "InvalidClientTokenId")}), "| aws sso login",
    ),
    "another account": (
        lambda f: setattr(f, "account", "999999999999"),
        "is of the account 999999999999, the role of 123456789012 | log in to 123456789012",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOGINS)
def test_whoever_is_not_logged_in_is_asked_nothing_more(case: str, facts: Facts) -> None:
    change, says = LOGINS[case]
    change(facts)
    found = asked()
    (said,) = wrong(found)
    assert says in said
    assert {check.said for check in found[1:]} == {"the login failed"}
    assert set(facts.calls) == {"sts:GetCallerIdentity"}


def test_no_credentials_are_said_to_be_none(facts: Facts, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    (said,) = wrong(asked())
    assert said.startswith("Unable to locate credentials | aws sso login")
    assert facts.calls == []


def test_what_one_may_not_ask_is_no_problem(facts: Facts) -> None:
    services = ("iam", "kms", "ecr", "service-quotas", "ec2", "secretsmanager")
    facts.errors = {f"{service}:*": (400, "AccessDeniedException") for service in services}
    found = asked(**NETWORK)
    assert wrong(found) == []
    assert {check.name for check in found if check.state == "ok"} == {
        "credentials",
        "region",
        "bucket",
    }
    assert all(c.said.startswith("as the test wants it") for c in found if c.state == "not asked")


def test_a_bucket_that_others_share_is_told_from_ones_own(facts: Facts) -> None:
    facts.buckets["bucket"] = Bucket(owner="999999999999")
    (check,) = [check for check in asked(early=True) if check.name == "bucket"]
    assert (check.state, check.said) == (
        "ok", "bucket in eu-central-1, which does not belong to 123456789012",
    )  # fmt: skip


def test_machines_on_spot_are_another_quota(facts: Facts) -> None:
    from rekindle.platforms.sagemaker.account import usages
    from rekindle.platforms.submission import Planned

    work = [
        (Planned("a", "ml.p4d.24xlarge", 2, True), "training", ""),
        (Planned("b", "ml.p4d.24xlarge", 4, True), "training", ""),
        (Planned("c", "ml.p4d.24xlarge", 1), "training", ""),
    ]
    assert usages(work) == {
        "ml.p4d.24xlarge for spot training job usage": (4, "b"),
        "ml.p4d.24xlarge for training job usage": (1, "c"),
    }


@pytest.mark.slow
def test_moto_is_asked_in_the_same_words(
    aws: str, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's idea of AWS: what it knows it finds, and what it lacks is not asked."""
    import boto3

    def client(service: str) -> Any:
        return boto3.client(
            service,
            endpoint_url=aws,
            region_name=REGION,
            aws_access_key_id="x",
            aws_secret_access_key="x",
        )

    key = client("kms").create_key()["KeyMetadata"]["Arn"]
    trust = json.dumps(TRUST)
    role = client("iam").create_role(RoleName="me", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    client("ecr").create_repository(repositoryName="train")
    client("s3").create_bucket(
        Bucket="near", CreateBucketConfiguration={"LocationConstraint": REGION}
    )
    secret = client("secretsmanager").create_secret(Name="hub", SecretString="x")["ARN"]
    subnet = client("ec2").describe_subnets()["Subnets"][0]
    group = client("ec2").create_security_group(
        GroupName="g", Description="g", VpcId=subnet["VpcId"]
    )["GroupId"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    account = role.split(":")[4]
    found = asked(
        role_arn=role, kms_key=key, artifact_root="s3://near/r", secrets={"HF_TOKEN": secret},
        subnets=(subnet["SubnetId"],), security_groups=(group,), image=f"{ECR}/train:1".replace(ACCOUNT, account),
    )  # fmt: skip
    states = {check.name: check.state for check in found}
    assert states == {
        "credentials": "ok", "region": "ok", "role": "ok", "the role may": "not asked", "you may": "not asked",
        "bucket": "ok", "key": "ok", "image": "problem", "quota": "not asked", "network": "ok", "secret HF_TOKEN": "ok",
    }, found  # fmt: skip
    (said, *_) = [line for line in wrong(found) if "train:1" in line]
    assert "ECR has no image" in said
