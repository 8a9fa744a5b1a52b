"""Questions to an account on AWS about what a config names; each reads and none changes anything.

What the account says plainly (there is no such bucket) is a problem; a refusal to answer, and no
answer, are none. Authority: botocore's models of sts, s3, ecr and secretsmanager. No account has
been asked yet."""

from __future__ import annotations

import contextlib
import difflib
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.platforms.checks import NotChecked
from rekindle.platforms.sagemaker.client import connected
from rekindle.spec.platforms import SageMakerSpec

_BRIEF: Mapping[str, Any] = {
    "retries": {"mode": "standard", "total_max_attempts": 2}, "connect_timeout": 5,
    "read_timeout": 10,
}  # fmt: skip
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<name>[^@:]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


class Account:
    """The account that `place` names; each client is made once and shared by all questions, since
    making them takes longer than asking."""

    def __init__(self, place: SageMakerSpec) -> None:
        self.place = place
        self._made: Any = None
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()  # boto3 makes clients in one thread only

    @contextlib.contextmanager
    def client(self, service: str) -> Iterator[Any]:
        """botocore's client of a service; what it raises becomes a PlatformError."""
        with connected(self.place, **_BRIEF) as made:
            with self._lock:
                self._made = self._made or made
                if service not in self._clients:
                    self._clients[service] = self._made(service)
            yield self._clients[service]


def caller(there: Account) -> str:
    """Who is logged in, in the account of the role; a refusal to say so is a problem."""
    try:
        with there.client("sts") as sts:
            found = sts.get_caller_identity()
    except UnreachableError:
        raise
    except PlatformError as error:
        raise RequestError(error.problems) from error
    wanted = there.place.role_arn.split(":")[4]
    if found["Account"] != wanted:
        raise RequestError(
            f"{found['Arn']} is of the account {found['Account']}, the role of {wanted}",
            fix=f"log in to {wanted} (AWS_PROFILE), or name a role of {found['Account']}",
        )
    return str(found["Arn"])


def region(there: Account) -> str:
    """Whether there is such a region, as far as this version of botocore knows."""
    from boto3.session import Session

    boto, wanted = Session(), there.place.region
    regions = [
        name
        for partition in boto.get_available_partitions()
        for name in boto.get_available_regions("sagemaker", partition)
    ]
    if wanted in regions:
        return wanted
    near = difflib.get_close_matches(wanted, regions, n=2)
    raise RequestError(
        f"there is no region `{wanted}` with SageMaker",
        fix=f"such as {' or '.join(near)}" if near else "name one, such as eu-central-1",
    )


def bucket(there: Account) -> str:
    """Whether the bucket is there, can be looked at, and lies in the region."""
    wanted = there.place.region
    name = there.place.artifact_root.removeprefix("s3://").partition("/")[0]
    with there.client("s3") as s3:
        try:
            found = s3.head_bucket(Bucket=name)
        except s3.exceptions.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 404:
                fix = f"aws s3 mb s3://{name} --region {wanted}, or name another"
                raise RequestError(f"there is no bucket {name}", fix=fix) from None
            if status == 403:
                fix = f"name a bucket of yours, or ask for s3:ListBucket on arn:aws:s3:::{name}"
                what = f"the bucket {name} belongs to another account, or you may not look at it"
                raise RequestError(what, fix=fix) from None
            raise
    headers = found["ResponseMetadata"]["HTTPHeaders"]
    lies = found.get("BucketRegion") or headers.get("x-amz-bucket-region") or wanted
    if lies != wanted:
        raise RequestError(
            f"the bucket {name} is in {lies}, the pipeline in {wanted}",
            fix=f"name a bucket in {wanted}, or set platforms.sagemaker.region: {lies}",
        )
    return f"{name} in {lies}"


def image(there: Account, reference: str) -> str:
    """Whether ECR has the image, in the region of the jobs."""
    match, wanted = _ECR.fullmatch(reference), there.place.region
    if match is None:
        raise NotChecked(f"{reference} is in no ECR")
    if match["region"] != wanted:
        raise RequestError(
            f"the image is in {match['region']}, the jobs are in {wanted}",
            fix=f"push it to ECR in {wanted}, or replicate the repository",
        )
    digest = match["digest"]
    version = {"imageDigest": digest} if digest else {"imageTag": match["tag"] or "latest"}
    named = {"registryId": match["account"], "repositoryName": match["name"]}
    with there.client("ecr") as ecr:
        try:
            found = ecr.describe_images(**named, imageIds=[version])["imageDetails"]
        except ecr.exceptions.RepositoryNotFoundException:
            fix = f"aws ecr create-repository --repository-name {match['name']}, and push it"
            raise RequestError(f"ECR has no repository {match['name']}", fix=fix) from None
        except ecr.exceptions.ImageNotFoundException:
            fix = f"push it: docker push {reference.partition('@')[0]}; then name its digest"
            raise RequestError(f"ECR has no image {reference}", fix=fix) from None
    pinned = "" if digest else f" is {found[0]['imageDigest']} now; better name that digest"
    return f"{reference}{pinned}"


def secret(there: Account, arn: str) -> str:
    """Whether the secret is there; its value is not read."""
    where = arn.split(":")[3]
    if where != there.place.region:
        raise NotChecked(f"it is in {where}")
    with there.client("secretsmanager") as manager:
        try:
            found = manager.describe_secret(SecretId=arn)
        except manager.exceptions.ResourceNotFoundException:
            fix = f"aws secretsmanager list-secrets --region {where}"
            raise RequestError(f"there is no secret {arn}", fix=fix) from None
    if found.get("DeletedDate"):
        fix = f"aws secretsmanager restore-secret --secret-id {arn}"
        raise RequestError(f"the secret {arn} is about to be deleted", fix=fix)
    return arn
