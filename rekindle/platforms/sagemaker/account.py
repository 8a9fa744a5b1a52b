"""Questions to an account on AWS about what a config names; each reads and none changes anything.

What the account says plainly (there is no such bucket) is a problem; a refusal to answer, and no
answer, is none. Authority: botocore's models of sts, s3, kms, ecr, service-quotas, ec2 and
secretsmanager; the names of SageMaker's quotas as Service Quotas lists them (`ml.g5.xlarge for spot
training job usage`). No account has been asked yet."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rekindle.errors import PlatformError, RequestError
from rekindle.platforms.asking import Question, Unasked
from rekindle.platforms.sagemaker.client import connected
from rekindle.platforms.submission import Planned
from rekindle.spec.places import SageMakerSpec

Session = Callable[[str], Any]
_BRIEF: Mapping[str, Any] = {
    "retries": {"mode": "standard", "total_max_attempts": 2}, "connect_timeout": 5,
    "read_timeout": 10,
}  # fmt: skip
_LOGIN = "credentials"
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<name>[^@:]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


class Account:
    """The account that `place` names; each client is made once and shared by all questions, since
    making them takes longer than asking."""

    def __init__(self, place: SageMakerSpec) -> None:
        self.place = place
        self._boto: Any = None
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()  # boto3 makes clients in one thread only

    def question(
        self, name: str, where: str, ask: Callable[..., str], early: bool, *words: Any
    ) -> Question:
        """`ask(place, session, *words)` as a question; where it is refused, it counts as not asked.

        So does one without an answer. But a refusal to say who is logged in is a problem."""

        def answer() -> str:
            try:
                with connected(self.place, self._session(), **_BRIEF) as session:
                    return ask(self.place, functools.partial(self._client, session), *words)
            except PlatformError as error:
                if name == _LOGIN and not _silent(error.__cause__):
                    raise
                raise Unasked(error.problems[0].what) from error

        return Question(name, where, answer, early)

    def _session(self) -> Any:
        with self._lock, contextlib.suppress(ImportError):  # `connected` says what is missing
            from boto3.session import Session as Boto

            self._boto = self._boto or Boto()
        return self._boto

    def _client(self, session: Session, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                self._clients[service] = session(service)
            return self._clients[service]


def error_code(error: Exception) -> str:
    """AWS's own name of what is wrong."""
    response: Any = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def caller(place: SageMakerSpec, session: Session) -> str:
    """Who is logged in, in the account of the role."""
    found = session("sts").get_caller_identity()
    wanted = place.role_arn.split(":")[4]
    if found["Account"] != wanted:
        raise RequestError(
            f"{found['Arn']} is of the account {found['Account']}, the role of {wanted}",
            fix=f"log in to {wanted} (AWS_PROFILE), or name a role of {found['Account']}",
        )
    return str(found["Arn"])


def region(place: SageMakerSpec, session: Session) -> str:
    """Whether there is such a region, as far as this version of botocore knows."""
    from boto3.session import Session as Boto

    boto = Boto()
    regions = [
        name
        for partition in boto.get_available_partitions()
        for name in boto.get_available_regions("sagemaker", partition)
    ]
    if place.region in regions:
        return place.region
    near = difflib.get_close_matches(place.region, regions, n=2)
    raise RequestError(
        f"there is no region `{place.region}` with SageMaker",
        fix=f"such as {' or '.join(near)}" if near else "name one, such as eu-central-1",
    )


def bucket(place: SageMakerSpec, session: Session) -> str:
    """Whether the bucket is there, can be looked at, and lies in the region."""
    s3, name = session("s3"), place.artifact_root.removeprefix("s3://").partition("/")[0]
    try:
        found = s3.head_bucket(Bucket=name)
    except s3.exceptions.ClientError as error:
        status = error.response["ResponseMetadata"]["HTTPStatusCode"]
        if status == 404:
            fix = f"aws s3 mb s3://{name} --region {place.region}, or name another"
            raise RequestError(f"there is no bucket {name}", fix=fix) from None
        if status == 403:
            fix = f"name a bucket of yours, or ask for s3:ListBucket on arn:aws:s3:::{name}"
            what = f"the bucket {name} belongs to another account, or you may not look at it"
            raise RequestError(what, fix=fix) from None
        raise
    headers = found["ResponseMetadata"]["HTTPHeaders"]
    lies = found.get("BucketRegion") or headers.get("x-amz-bucket-region") or place.region
    if lies != place.region:
        raise RequestError(
            f"the bucket {name} is in {lies}, the pipeline in {place.region}",
            fix=f"name a bucket in {place.region}, or set platforms.sagemaker.region: {lies}",
        )
    return f"{name} in {lies}{_owner(place, s3, name)}"


def _owner(place: SageMakerSpec, s3: Any, name: str) -> str:
    """A bucket that others share with the account works, and is worth a word."""
    owner = place.role_arn.split(":")[4]
    try:
        s3.head_bucket(Bucket=name, ExpectedBucketOwner=owner)
    except s3.exceptions.ClientError:
        return f", which does not belong to {owner}"
    return ""


def key(place: SageMakerSpec, session: Session) -> str:
    """Whether the key is there, in use, and in the region."""
    kms = session("kms")
    try:
        found = kms.describe_key(KeyId=place.kms_key)["KeyMetadata"]
    except kms.exceptions.NotFoundException:
        fix = f"aws kms list-keys --region {place.region}"
        raise RequestError(f"there is no key {place.kms_key}", fix=fix) from None
    if found["KeyState"] != "Enabled":
        fix = f"aws kms enable-key --key-id {found['KeyId']}"
        raise RequestError(f"the key {place.kms_key} is {found['KeyState']}", fix=fix)
    return str(found["Arn"])


def image(place: SageMakerSpec, session: Session, reference: str) -> str:
    """Whether ECR has the image, in the region of the jobs."""
    match = _ECR.fullmatch(reference)
    if match is None:
        raise Unasked(f"{reference} is in no ECR")
    if match["region"] != place.region:
        raise RequestError(
            f"the image is in {match['region']}, the jobs are in {place.region}",
            fix=f"push it to ECR in {place.region}, or replicate the repository",
        )
    ecr, digest = session("ecr"), match["digest"]
    wanted = {"imageDigest": digest} if digest else {"imageTag": match["tag"] or "latest"}
    named = {"registryId": match["account"], "repositoryName": match["name"]}
    try:
        found = ecr.describe_images(**named, imageIds=[wanted])["imageDetails"]
    except ecr.exceptions.RepositoryNotFoundException:
        fix = f"aws ecr create-repository --repository-name {match['name']}, and push it"
        raise RequestError(f"ECR has no repository {match['name']}", fix=fix) from None
    except ecr.exceptions.ImageNotFoundException:
        fix = f"push it: docker push {reference.partition('@')[0]}; then name its digest"
        raise RequestError(f"ECR has no image {reference}", fix=fix) from None
    pinned = "" if digest else f" is {found[0]['imageDigest']} now; better name that digest"
    return f"{reference}{pinned}"


def usages(
    work: Iterable[tuple[Planned, str, str]],
) -> dict[str, tuple[int, str]]:
    """The quotas that a definition needs, as the service calls them: how many machines the largest
    step of each wants, and its name."""
    found: dict[str, tuple[int, str]] = {}
    for planned, kind, _ in work:
        spot = "spot " if planned.spot else ""
        name = f"{planned.machine} for {spot}{kind} job usage"
        found[name] = max(found.get(name, (0, "")), (planned.machines, planned.step))
    return found


def quota(place: SageMakerSpec, session: Session, name: str, count: int, step: str) -> str:
    """Whether as many machines as the step wants may run at once."""
    quotas = session("service-quotas")
    for call in ("list_service_quotas", "list_aws_default_service_quotas"):
        for listed in quotas.get_paginator(call).paginate(ServiceCode="sagemaker"):
            for one in listed["Quotas"]:
                if one["QuotaName"] == name:
                    return _enough(one, name, count, step)
    raise Unasked(f"Service Quotas knows no `{name}`")


def _enough(found: Mapping[str, Any], name: str, count: int, step: str) -> str:
    value = int(found["Value"])
    if value >= count:
        return f"{name}: {value}"
    code = found.get("QuotaCode", "CODE")
    ask = "aws service-quotas request-service-quota-increase --service-code sagemaker"
    raise RequestError(
        f"the step {step} wants {count} of `{name}`, the account may have {value}",
        fix=f"{ask} --quota-code {code} --desired-value {count}, or ask for another machine",
    )


def network(place: SageMakerSpec, session: Session) -> str:
    """Whether subnets and security groups are there, of one network."""
    ec2 = session("ec2")
    try:
        subnets = ec2.describe_subnets(SubnetIds=list(place.subnets))["Subnets"]
        groups = ec2.describe_security_groups(GroupIds=list(place.security_groups))
    except ec2.exceptions.ClientError as error:
        if error_code(error).endswith(".NotFound"):
            said = error.response["Error"]["Message"]
            fix = f"aws ec2 describe-subnets --region {place.region}, describe-security-groups"
            raise RequestError(said, fix=fix) from None
        raise
    networks = {one["VpcId"] for one in (*subnets, *groups["SecurityGroups"])}
    if len(networks) > 1:
        raise RequestError(
            f"subnets and security groups are of several networks: {', '.join(sorted(networks))}",
            fix="name those of one VPC",
        )
    return ", ".join(sorted(networks))


def secret(place: SageMakerSpec, session: Session, arn: str) -> str:
    """Whether the secret is there; its value is not read."""
    where = arn.split(":")[3]
    if where != place.region:
        raise Unasked(f"it is in {where}")
    manager = session("secretsmanager")
    try:
        found = manager.describe_secret(SecretId=arn)
    except manager.exceptions.ResourceNotFoundException:
        fix = f"aws secretsmanager list-secrets --region {where}"
        raise RequestError(f"there is no secret {arn}", fix=fix) from None
    if found.get("DeletedDate"):
        fix = f"aws secretsmanager restore-secret --secret-id {arn}"
        raise RequestError(f"the secret {arn} is about to be deleted", fix=fix)
    return arn


def _silent(error: BaseException | None) -> bool:
    """Whether the service did not answer, or not yet: then it is not known who is logged in."""
    response: Any = getattr(error, "response", None)
    if response is None:
        return type(error).__name__ in _NO_ANSWER
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return bool(status == 429 or status >= 500)


_NO_ANSWER = frozenset({
    "EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionClosedError",
    "ProxyConnectionError", "SSLError", "HTTPClientError",
})  # fmt: skip
