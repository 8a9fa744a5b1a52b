"""The least that the role of jobs on SageMaker may do, as IAM takes it, and whether the account on
AWS has what a config names; each check reads and none changes anything.

The list is ours, from what the steps read and write. What the account says plainly (there is no
such bucket) is a problem; a refusal to answer, and no answer, are none. Authority: botocore's
models of sts, iam, s3, ecr and secretsmanager. No account has been asked yet."""

import contextlib
import difflib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from rekindle.catalog.tables import limits
from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.platforms.checks import Check, Needs, NotChecked, about, may
from rekindle.platforms.sagemaker.client import connected, images
from rekindle.platforms.submission import Definition, plain_name, problems_in, requests_in
from rekindle.spec.platforms import SageMakerSpec

_BRIEF: Mapping[str, Any] = {
    "retries": {"mode": "standard", "total_max_attempts": 2},
    "connect_timeout": 5,
    "read_timeout": 10,
}
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<name>[^@:]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_problem, _request = problems_in(__file__), requests_in(__file__)


def checks(place: SageMakerSpec, definition: Definition | None, needs: Needs) -> Iterator[Check]:
    if not place.region or not place.role_arn:  # which of them is missing is reported elsewhere
        return
    ask = about("sagemaker", Account(place))
    yield ask("credentials", "role_arn", caller, early=True, login=True)
    yield ask("region", "region", region, early=True)
    for use, is_asked in (("deploy", needs.deploys), ("publish", needs.publishes)):
        rights = _allowed(f"{use}_permissions", place, needs.model)
        if is_asked:
            yield ask(f"you may {use}", "role_arn", permitted, rights, "")
        if needs.publishes if use == "publish" else needs.deploys_in_steps:
            yield ask(f"steps may {use}", "role_arn", permitted, rights, place.role_arn)
    if place.artifact_root:
        yield ask("bucket", "artifact_root", bucket, early=True)
    for wanted in sorted({place.image or "", *(images(definition) if definition else ())} - {""}):
        yield ask("image", "image", image, wanted, early=True)
    for variable, arn in sorted(place.secrets.items()):
        yield ask(f"secret {variable}", f"secrets.{variable}", secret, arn)


def permissions(place: SageMakerSpec, needs: Needs) -> str:
    """A policy for `place.role_arn`, and the trust that the service needs."""
    found, deploying = statements(place), _allowed("deploy_permissions", place, needs.model)
    found += deploying if needs.deploys_in_steps else []
    found += _allowed("publish_permissions", place, needs.model) if needs.publishes else []
    policy = {"Version": "2012-10-17", "Statement": found}
    deploys = [action for statement in deploying for action in statement["Action"]]
    role = place.role_arn or "platforms.sagemaker.role_arn"
    return (
        f"The role of the jobs, {role}, which sagemaker.amazonaws.com may assume, needs:\n"
        f"{json.dumps(policy, indent=2)}\n"
        f"Who deploys needs, beside the bucket: {', '.join(dict.fromkeys(deploys))}"
    )


def statements(place: SageMakerSpec) -> list[dict[str, Any]]:
    """What the policy allows, a statement a resource."""
    found, about = _allowed("permissions", place), _names(place)
    if place.subnets:
        interface, *others = _allowed("network_permissions", place)
        inside = [f"{about['ec2']}subnet/{name}" for name in place.subnets]
        inside += [f"{about['ec2']}security-group/{name}" for name in place.security_groups]
        found += [{**interface, "Resource": [interface["Resource"], *inside]}, *others]
    if place.kms_key:
        found.append(_key(place))
    if place.secrets:
        found.append(_allow(["secretsmanager:GetSecretValue"], sorted(place.secrets.values())))
    return found


def _allowed(table: str, place: SageMakerSpec, model: str = "") -> list[dict[str, Any]]:
    """The statements that a table of the catalog comes to for this config."""
    about = _names(place, model)
    return [
        _allow(row["actions"], row["resource"].format(**about))
        for row in limits("sagemaker")[table]
    ]


def _names(place: SageMakerSpec, model: str = "") -> dict[str, str]:
    """What the catalog's resources are made of; a service's name stands for the begin of its ARNs
    in the region and account of the jobs."""
    bucket, _, folder = (place.artifact_root or "s3://BUCKET/FOLDER")[5:].rstrip("/").partition("/")
    image = (place.image or "ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME").partition("@")[0]
    host, _, name = image.partition("/")
    words = host.split(".")
    registry = f"{words[3] if len(words) > 3 else 'REGION'}:{words[0]}"
    mine = (place.role_arn or "arn:aws:iam::ACCOUNT:role/NAME").split(":")
    where = f"{place.region or 'REGION'}:{mine[4]}:"
    services = ("ec2", "kms", "logs", "sagemaker")
    return {
        "bucket": bucket,
        "objects": f"{bucket}/{folder}/*" if folder else f"{bucket}/*",
        "repository": f"{registry}:repository/{name}",
        "role": place.role_arn or "platforms.sagemaker.role_arn",
        "model": plain_name(model or "MODEL", r"[^a-zA-Z0-9]+", 40, distinct=True),
        **{service: f"arn:{mine[1]}:{service}:{where}" for service in services},
    }


def _key(place: SageMakerSpec) -> dict[str, Any]:
    """Use of the key, which may be named by its ARN, its id or an alias."""
    uses = ["kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"]
    name, keys = place.kms_key.split(":", 5)[-1], f"{_names(place)['kms']}key/"
    if name.startswith("alias/"):  # a policy takes no alias for a resource
        condition = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": name}}
        return {**_allow(uses, f"{keys}*"), "Condition": condition}
    return _allow(uses, place.kms_key if place.kms_key.startswith("arn:") else f"{keys}{name}")


def _allow(actions: list[str], resource: str | list[str]) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


class Account:
    """The account that `place` names, with each client made once, since that is what takes time."""

    def __init__(self, place: SageMakerSpec, more: Mapping[str, Any] = _BRIEF) -> None:
        self.place, self._more = place, more
        self._made: Any = None
        self._clients: dict[str, Any] = {}
        self._lock = threading.Lock()  # boto3 makes clients in one thread only

    @contextlib.contextmanager
    def client(self, service: str) -> Iterator[Any]:
        """botocore's client of a service; what it raises becomes a PlatformError."""
        with connected(self.place, **self._more) as made:
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
    arn, account = str(found["Arn"]), found["Account"]
    if account != wanted:
        raise RequestError([_problem("other_account", arn=arn, account=account, wanted=wanted)])
    return arn


def region(there: Account) -> str:
    """Whether there is such a region, as far as this version of botocore knows."""
    from boto3.session import Session

    boto, wanted = Session(), there.place.region
    regions = list[str]()
    for partition in boto.get_available_partitions():
        regions += boto.get_available_regions("sagemaker", partition)
    if wanted in regions:
        return wanted
    near = difflib.get_close_matches(wanted, regions, n=2)
    fix = f"such as {' or '.join(near)}" if near else "name one, such as eu-central-1"
    raise RequestError(f"there is no region `{wanted}` with SageMaker", fix=fix)


def permitted(there: Account, wanted: list[dict[str, Any]], role: str) -> str:
    """Whether the policies of the role, or else of who is logged in, allow the statements, as IAM
    simulates them; what depends on facts of a request that only it has is left open."""
    fixes, missing, who = dict[str, str](), list[str](), role
    with there.client("iam") as iam, there.client("sts") as sts:
        if not role:
            who = sts.get_caller_identity()["Arn"]
            if ":assumed-role/" in who:  # of which IAM knows the role alone
                who = iam.get_role(RoleName=who.split("/")[1])["Role"]["Arn"]
        for one in wanted:
            resource, actions = one["Resource"], one["Action"]
            fixes |= dict.fromkeys(actions, f"have {who} allowed it on {resource}")
            asked = _request("simulation", who=who, actions=actions, resource=resource)
            pages = iam.get_paginator("simulate_principal_policy").paginate(**asked)
            for found in (found for page in pages for found in page["EvaluationResults"]):
                if found["EvalDecision"] != "allowed" and not found.get("MissingContextValues"):
                    missing.append(found["EvalActionName"])
    return may(fixes, dict.fromkeys(missing), "the role of the steps" if role else "you")


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
                raise RequestError([_problem("no_bucket", name=name, region=wanted)]) from None
            if status == 403:
                raise RequestError([_problem("foreign_bucket", name=name)]) from None
            raise
    headers = found["ResponseMetadata"]["HTTPHeaders"]
    lies = found.get("BucketRegion") or headers.get("x-amz-bucket-region") or wanted
    if lies != wanted:
        raise RequestError([_problem("far_bucket", name=name, lies=lies, region=wanted)])
    return f"{name} in {lies}"


def image(there: Account, reference: str) -> str:
    """Whether ECR has the image, in the region of the jobs."""
    match, wanted = _ECR.fullmatch(reference), there.place.region
    if match is None:
        raise NotChecked(f"{reference} is in no ECR")
    if match["region"] != wanted:
        raise RequestError([_problem("far_image", lies=match["region"], region=wanted)])
    digest = match["digest"]
    version = {"imageDigest": digest} if digest else {"imageTag": match["tag"] or "latest"}
    named = {"registryId": match["account"], "repositoryName": match["name"]}
    with there.client("ecr") as ecr:
        try:
            found = ecr.describe_images(**named, imageIds=[version])["imageDetails"]
        except ecr.exceptions.RepositoryNotFoundException:
            raise RequestError([_problem("no_repository", name=match["name"])]) from None
        except ecr.exceptions.ImageNotFoundException:
            of = reference.partition("@")[0]
            raise RequestError([_problem("no_image", reference=reference, named=of)]) from None
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
            raise RequestError([_problem("no_secret", arn=arn, region=where)]) from None
    if found.get("DeletedDate"):
        raise RequestError([_problem("deleted_secret", arn=arn)])
    return arn
