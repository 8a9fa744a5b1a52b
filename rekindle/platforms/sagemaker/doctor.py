"""The least rights that the role of the jobs on SageMaker needs, as an IAM policy, and
checks whether the account on AWS has what a config names. Checks only read.

The list of rights (limits.yaml) is our own, from what the steps read and write. An answer
such as "there is no such bucket" is a problem. Where AWS refuses to answer, or does not
answer, the check is reported as not asked. Authority: botocore's models of sts, iam, s3,
ecr and secretsmanager. No account has been asked yet."""

import contextlib
import difflib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.platforms.checks import Needs, NotChecked, PlatformCheck, about, may
from rekindle.platforms.sagemaker.client import Client, connected, images
from rekindle.platforms.sagemaker.limits import limits
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition, plain_name

# botocore's settings for a check, which has to answer within `checks.PATIENCE_SECONDS`
_IMPATIENT: Mapping[str, object] = {
    "retries": {"mode": "standard", "total_max_attempts": 2},
    "connect_timeout": 5,
    "read_timeout": 10,
}
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.(?P<region>[a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/"
    r"(?P<name>[^@:]+)(?::(?P<tag>[^@]+))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
# a policy may allow iam:PassRole for one service only: a simulated request names it
_PASSED_TO_SAGEMAKER = {
    "ContextKeyName": "iam:PassedToService",
    "ContextKeyType": "string",
    "ContextKeyValues": ["sagemaker.amazonaws.com"],
}
Statement: TypeAlias = dict[str, Any]
"""A statement of an IAM policy."""


def checks(
    place: SageMakerSpec, definition: Definition | None, needs: Needs
) -> Iterator[PlatformCheck]:
    """What to ask the account before a submission; see `Platform.checks`."""
    if not place.region or not place.role_arn:  # which of them is missing is reported elsewhere
        return
    check_of = about("sagemaker", Account(place))
    yield check_of("credentials", "role_arn", caller, early=True, login=True)
    yield check_of("region", "region", region, early=True)
    deploy_rights = _allowed("deploy_permissions", place, needs.model)
    if needs.deploys:
        yield check_of("you may deploy", "role_arn", permitted, deploy_rights, "")
    if needs.deploys_in_steps:
        yield check_of("steps may deploy", "role_arn", permitted, deploy_rights, place.role_arn)
    if needs.publishes:
        publish_rights = _allowed("publish_permissions", place, needs.model)
        yield check_of("you may publish", "role_arn", permitted, publish_rights, "")
        yield check_of("steps may publish", "role_arn", permitted, publish_rights, place.role_arn)
    if place.artifact_root:
        yield check_of("bucket", "artifact_root", bucket, early=True)
    references = set(images(definition)) if definition else set()
    if place.image:
        references.add(place.image)
    for reference in sorted(references - {""}):
        yield check_of("image", "image", image, reference, early=True)
    for variable, arn in sorted(place.secrets.items()):
        yield check_of(f"secret {variable}", f"secrets.{variable}", secret, arn)


def permissions(place: SageMakerSpec, needs: Needs) -> str:
    """A policy for `place.role_arn`, which service has to be trusted with the role, and
    what a user who deploys needs; as text."""
    allowed = statements(place)
    deploying = _allowed("deploy_permissions", place, needs.model)
    if needs.deploys_in_steps:
        allowed += deploying
    if needs.publishes:
        allowed += _allowed("publish_permissions", place, needs.model)
    policy = {"Version": "2012-10-17", "Statement": allowed}
    deploy_actions = [action for statement in deploying for action in statement["Action"]]
    role = place.role_arn or "platforms.sagemaker.role_arn"
    return (
        f"The role of the jobs, {role}, which sagemaker.amazonaws.com may assume, needs:\n"
        f"{json.dumps(policy, indent=2)}\n"
        f"Who deploys needs, beside the bucket: {', '.join(dict.fromkeys(deploy_actions))}"
    )


def statements(place: SageMakerSpec) -> list[Statement]:
    """The statements of the policy, one a resource."""
    allowed = _allowed("permissions", place)
    if place.subnets:
        # the first, CreateNetworkInterface, needs rights on the subnets and groups, too
        interface, *others = _allowed("network_permissions", place)
        ec2 = _names(place)["ec2"]
        resources = [interface["Resource"]]
        resources += [f"{ec2}subnet/{name}" for name in place.subnets]
        resources += [f"{ec2}security-group/{name}" for name in place.security_groups]
        allowed += [{**interface, "Resource": resources}, *others]
    if place.kms_key:
        allowed.append(_key_statement(place))
    if place.secrets:
        arns = sorted(place.secrets.values())
        allowed.append(_statement(["secretsmanager:GetSecretValue"], arns))
    return allowed


def _allowed(table: str, place: SageMakerSpec, model: str = "") -> list[Statement]:
    """The statements of a table of limits.yaml, with the names of this config filled in."""
    names = _names(place, model)
    return [_statement(row["actions"], row["resource"].format(**names)) for row in limits()[table]]


def _names(place: SageMakerSpec, model: str = "") -> dict[str, str]:
    """The values of the placeholders in limits.yaml's resources.

    A service's name, such as `ec2`, stands for the beginning of its ARNs in the region
    and account of the jobs. Words in capitals stand for what the config lacks."""
    root = (place.artifact_root or "s3://BUCKET/FOLDER").rstrip("/")
    bucket, _, folder = root[len("s3://") :].partition("/")
    image = (place.image or "ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME").partition("@")[0]
    host, _, name = image.partition("/")
    host_labels = host.split(".")  # ACCOUNT.dkr.ecr.REGION.amazonaws.com
    registry_region = host_labels[3] if len(host_labels) > 3 else "REGION"
    registry = f"{registry_region}:{host_labels[0]}"
    role_arn = place.role_arn or "arn:aws:iam::ACCOUNT:role/NAME"
    _, partition, _, _, account, *_ = role_arn.split(":")  # `partition`: aws, aws-cn ...
    names = {
        "bucket": bucket,
        "objects": f"{bucket}/{folder}/*" if folder else f"{bucket}/*",
        "repository": f"{registry}:repository/{name}",
        "role": place.role_arn or "platforms.sagemaker.role_arn",
        "model": plain_name(model or "MODEL", r"[^a-zA-Z0-9]+", 40, distinct=True),
    }
    for service in ("ec2", "kms", "logs", "sagemaker"):
        names[service] = f"arn:{partition}:{service}:{place.region or 'REGION'}:{account}:"
    return names


def _key_statement(place: SageMakerSpec) -> Statement:
    """The statement that allows use of the key, which the config names by ARN, id or alias."""
    uses = ["kms:Decrypt", "kms:GenerateDataKey", "kms:CreateGrant"]
    name = place.kms_key.split(":", 5)[-1]
    keys = f"{_names(place)['kms']}key/"
    if name.startswith("alias/"):  # in a policy an alias can be a condition, not a resource
        condition = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": name}}
        return {**_statement(uses, f"{keys}*"), "Condition": condition}
    if place.kms_key.startswith("arn:"):
        return _statement(uses, place.kms_key)
    return _statement(uses, f"{keys}{name}")


def _statement(actions: list[str], resource: str | list[str]) -> Statement:
    return {"Effect": "Allow", "Action": actions, "Resource": resource}


class Account:
    """The account that `place` names. Each client is made once, since making one is what
    takes time."""

    def __init__(
        self, place: SageMakerSpec, botocore_settings: Mapping[str, object] = _IMPATIENT
    ) -> None:
        self.place = place
        self._botocore_settings = botocore_settings
        self._client_of: Callable[[str], Client] | None = None
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()  # boto3 makes clients in one thread only

    @contextlib.contextmanager
    def client(self, service: str) -> Iterator[Client]:
        """botocore's client of a service; errors of botocore inside become PlatformErrors."""
        with connected(self.place, **self._botocore_settings) as client_of:
            with self._lock:
                # all clients come from the session of the first connection
                if self._client_of is None:
                    self._client_of = client_of
                if service not in self._clients:
                    self._clients[service] = self._client_of(service)
            yield self._clients[service]


def caller(account: Account) -> str:
    """The ARN of the user who is logged in. RequestError where there is no valid login,
    or it is to another account than the role's."""
    try:
        with account.client("sts") as sts:
            identity = sts.get_caller_identity()
    except UnreachableError:
        raise
    # every login may ask STS who it is, so a refusal means that the login is not valid
    except PlatformError as error:
        raise RequestError(error.problems) from error
    role_account = account.place.role_arn.split(":")[4]  # arn:aws:iam::ACCOUNT:role/NAME
    arn = str(identity["Arn"])
    own_account = identity["Account"]
    if own_account != role_account:
        raise RequestError(
            f"{arn} is of the account {own_account}, the role of {role_account}",
            fix=f"log in to {role_account} (AWS_PROFILE), or name a role of {own_account}",
        )
    return arn


def region(account: Account) -> str:
    """The region, if this version of botocore knows it for SageMaker; RequestError if not."""
    from boto3.session import Session

    session = Session()
    name = account.place.region
    regions: list[str] = []
    for partition in session.get_available_partitions():
        regions += session.get_available_regions("sagemaker", partition)
    if name in regions:
        return name
    near = difflib.get_close_matches(name, regions, n=2)
    fix = f"such as {' or '.join(near)}" if near else "name one, such as eu-central-1"
    raise RequestError(f"there is no region `{name}` with SageMaker", fix=fix)


def permitted(account: Account, rights: list[Statement], role: str) -> str:
    """The actions of the statements, if the policies of the role allow them all; with ""
    for `role`, those of the user who is logged in. RequestError names those that are not
    allowed.

    IAM simulates the requests. Where its answer depends on a value that only a real
    request has, the action counts as allowed."""
    fixes: dict[str, str] = {}
    missing: list[str] = []
    principal = role
    with account.client("iam") as iam, account.client("sts") as sts:
        if not principal:
            principal = sts.get_caller_identity()["Arn"]
            # arn:aws:sts::ACCOUNT:assumed-role/ROLE/SESSION; IAM simulates the role only
            if ":assumed-role/" in principal:
                principal = iam.get_role(RoleName=principal.split("/")[1])["Role"]["Arn"]
        for statement in rights:
            resource = statement["Resource"]
            actions = statement["Action"]
            fixes |= dict.fromkeys(actions, f"have {principal} allowed it on {resource}")
            pages = iam.get_paginator("simulate_principal_policy").paginate(
                PolicySourceArn=principal,
                ActionNames=actions,
                ContextEntries=[_PASSED_TO_SAGEMAKER],
                ResourceArns=[resource],
            )
            results = [result for page in pages for result in page["EvaluationResults"]]
            for result in results:
                is_denied = result["EvalDecision"] != "allowed"
                if is_denied and not result.get("MissingContextValues"):
                    missing.append(result["EvalActionName"])
    who = "the role of the steps" if role else "you"
    return may(fixes, dict.fromkeys(missing), who)


def bucket(account: Account) -> str:
    """The bucket and its region; RequestError where there is no such bucket, it may not
    be looked at, or it lies in another region than the jobs."""
    job_region = account.place.region
    name = account.place.artifact_root.removeprefix("s3://").partition("/")[0]
    with account.client("s3") as s3:
        try:
            head = s3.head_bucket(Bucket=name)
        except s3.exceptions.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status == 404:
                raise RequestError(
                    f"there is no bucket {name}",
                    fix=f"aws s3 mb s3://{name} --region {job_region}, or name another",
                ) from None
            if status == 403:
                raise RequestError(
                    f"the bucket {name} belongs to another account, or you may not look at it",
                    fix=f"name a bucket of yours, or ask for s3:ListBucket on arn:aws:s3:::{name}",
                ) from None
            raise
    # older versions of botocore do not parse the region, but keep the header
    headers = head["ResponseMetadata"]["HTTPHeaders"]
    bucket_region = head.get("BucketRegion") or headers.get("x-amz-bucket-region") or job_region
    if bucket_region != job_region:
        raise RequestError(
            f"the bucket {name} is in {bucket_region}, the pipeline in {job_region}",
            fix=f"name a bucket in {job_region}, "
            f"or set platforms.sagemaker.region: {bucket_region}",
        )
    return f"{name} in {bucket_region}"


def image(account: Account, reference: str) -> str:
    """The image, if ECR has it in the region of the jobs; RequestError if not."""
    match = _ECR.fullmatch(reference)
    job_region = account.place.region
    if match is None:
        raise NotChecked(f"{reference} is in no ECR")
    if match["region"] != job_region:
        raise RequestError(
            f"the image is in {match['region']}, the jobs are in {job_region}",
            fix=f"push it to ECR in {job_region}, or replicate the repository",
        )
    if match["digest"]:
        image_id = {"imageDigest": match["digest"]}
    else:
        image_id = {"imageTag": match["tag"] or "latest"}
    with account.client("ecr") as ecr:
        try:
            details = ecr.describe_images(
                registryId=match["account"],
                repositoryName=match["name"],
                imageIds=[image_id],
            )["imageDetails"]
        except ecr.exceptions.RepositoryNotFoundException:
            raise RequestError(
                f"ECR has no repository {match['name']}",
                fix=f"aws ecr create-repository --repository-name {match['name']}, and push it",
            ) from None
        except ecr.exceptions.ImageNotFoundException:
            name = reference.partition("@")[0]
            raise RequestError(
                f"ECR has no image {reference}",
                fix=f"push it: docker push {name}; then name its digest",
            ) from None
    if match["digest"]:
        return reference
    return f"{reference} is {details[0]['imageDigest']} now; better name that digest"


def secret(account: Account, arn: str) -> str:
    """The ARN of the secret, if there is such a secret; its value is not read."""
    secret_region = arn.split(":")[3]  # arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME
    if secret_region != account.place.region:
        raise NotChecked(f"it is in {secret_region}")
    with account.client("secretsmanager") as manager:
        try:
            described = manager.describe_secret(SecretId=arn)
        except manager.exceptions.ResourceNotFoundException:
            raise RequestError(
                f"there is no secret {arn}",
                fix=f"aws secretsmanager list-secrets --region {secret_region}",
            ) from None
    if described.get("DeletedDate"):
        raise RequestError(
            f"the secret {arn} is about to be deleted",
            fix=f"aws secretsmanager restore-secret --secret-id {arn}",
        )
    return arn
