"""SageMaker Pipelines in an account: a definition is published as a version of its pipeline, run,
looked at and stopped, schedules are set and taken away; boto3 is imported when that is done.

Bundles go to S3 first, under names that are their content. An execution runs the very version that
holds its definition, whatever somebody else publishes meanwhile. It is started with a token that
follows from definition and submission, which the service heeds for a while, and is called by it,
which is looked for before: the same submission is one execution. boto3 repeats calls after
throttling, 5xx and broken connections, a few times.

Authority: botocore's model, as tests/servers/sagemaker_rest.py has seen it ask. No account has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rekindle.errors import PlatformError, Problem, SpecError
from rekindle.platforms.definition import Definition
from rekindle.platforms.sagemaker.outline import SUFFIX, definition_file, steps
from rekindle.platforms.sagemaker.schedule import lowered, schedule_id
from rekindle.platforms.submission import Outline, Placed, Schedule, digest_of
from rekindle.records import RunStatus
from rekindle.spec.places import SageMakerSpec
from rekindle.spec.schedule import ScheduleSpec

OVER: dict[str, RunStatus] = {
    "Succeeded": "succeeded", "Failed": "failed", "CompletedWithFailures": "failed",
    "Stopped": "cancelled",
}  # fmt: skip
_SECTION = "platforms.sagemaker"
_RETRIES = {"mode": "standard", "total_max_attempts": 5}
_MOST_LISTED = 1_000
_GROUP = "rekindle"  # of schedules
_KEPT = (
    "Description", "ScheduleExpression", "ScheduleExpressionTimezone", "FlexibleTimeWindow",
    "Target",
)  # fmt: skip
_EXAMPLES = {
    "region": "eu-central-1",
    "role_arn": "arn:aws:iam::123456789012:role/NAME",
    "artifact_root": "s3://my-bucket/rekindle",
}


def submit(definition: Definition, place: SageMakerSpec, token: str) -> Placed:
    """The execution, started now or by the same submission before; PlatformError if the account
    refuses it or does not answer, SpecError if `place` does not say where."""
    name, id = pipeline_name(definition), execution_name(definition, token)
    with connected(place) as session:
        sagemaker = session("sagemaker")
        if arn := _found(sagemaker, name, id):
            return Placed(arn, page(place, arn), anew=False)
        _upload(session("s3"), definition, place)
        started = sagemaker.start_pipeline_execution(
            PipelineName=name,
            PipelineVersionId=_version(sagemaker, name, definition, place),
            PipelineExecutionDisplayName=id,
            ClientRequestToken=digest_of(definition.files, token) * 2,
        )
        arn = started["PipelineExecutionArn"]
        return Placed(arn, page(place, arn))


def status(place: SageMakerSpec, id: str) -> str:
    """The execution's status in the service's words, such as `Executing`; `OVER` are the last."""
    with connected(place) as session:
        return _status_of(session("sagemaker"), id)


def cancel(place: SageMakerSpec, id: str) -> str:
    """Have the execution stopped; its status then. One that is over stays as it is."""
    with connected(place) as session:
        sagemaker = session("sagemaker")
        if (now := _status_of(sagemaker, id)) not in (*OVER, "Stopping"):
            token = digest_of({id: b"stop"}) * 2
            sagemaker.stop_pipeline_execution(PipelineExecutionArn=id, ClientRequestToken=token)
            now = _status_of(sagemaker, id)
        return now


def schedule_set(
    definition: Definition, place: SageMakerSpec, schedule: ScheduleSpec, name: str
) -> Schedule:
    """The schedule of the config `name`, made or changed to this; UnsupportedError for what AWS has
    no words for. It starts a pipeline of its own, which no submission changes."""
    expression = lowered(schedule)
    pipeline = f"{pipeline_name(definition)[:200].rstrip('-')}-scheduled"
    with connected(place) as session:
        sagemaker, scheduler = session("sagemaker"), session("scheduler")
        _upload(session("s3"), definition, place)
        _version(sagemaker, pipeline, definition, place)
        arn = sagemaker.describe_pipeline(PipelineName=pipeline)["PipelineArn"]
        _group_is_there(scheduler)
        body = {
            "Name": schedule_id(name), "GroupName": _GROUP, "State": "ENABLED",
            "Description": f"{name}: {schedule.cron}", "ScheduleExpression": expression,
            "ScheduleExpressionTimezone": schedule.timezone, "FlexibleTimeWindow": {"Mode": "OFF"},
            "Target": {
                "Arn": arn, "RoleArn": place.schedule_role_arn or place.role_arn,
                "SageMakerPipelineParameters": {"PipelineParameterList": []},
            },
        }  # fmt: skip
        try:
            scheduler.update_schedule(**body)
        except scheduler.exceptions.ResourceNotFoundException:
            with contextlib.suppress(scheduler.exceptions.ConflictException):  # or somebody did
                scheduler.create_schedule(**body)
        return _schedule(scheduler, schedule_id(name))


def schedule_list(place: SageMakerSpec) -> tuple[Schedule, ...]:
    """Schedules that were set here, those that pause too, by name."""
    with connected(place) as session:
        scheduler, found = session("scheduler"), list[str]()
        try:
            for listed in scheduler.get_paginator("list_schedules").paginate(GroupName=_GROUP):
                found += [one["Name"] for one in listed["Schedules"]]
        except scheduler.exceptions.ResourceNotFoundException:
            return ()  # no group yet
        return tuple(_schedule(scheduler, name) for name in sorted(found))


def schedule_pause(place: SageMakerSpec, name: str) -> Schedule:
    """The schedule of the config `name`, which starts nothing until it is set again."""
    with connected(place) as session:
        scheduler, id = session("scheduler"), schedule_id(name)
        found = scheduler.get_schedule(Name=id, GroupName=_GROUP)
        same = {member: found[member] for member in _KEPT}
        scheduler.update_schedule(Name=id, GroupName=_GROUP, State="DISABLED", **same)
        return _schedule(scheduler, id)


def schedule_delete(place: SageMakerSpec, name: str) -> bool:
    """Whether there was one to take away. Its pipeline stays, with the runs that it started."""
    with connected(place) as session:
        scheduler = session("scheduler")
        try:
            scheduler.delete_schedule(Name=schedule_id(name), GroupName=_GROUP)
        except scheduler.exceptions.ResourceNotFoundException:
            return False
        return True


def _group_is_there(scheduler: Any) -> None:
    try:
        scheduler.get_schedule_group(Name=_GROUP)
    except scheduler.exceptions.ResourceNotFoundException:
        with contextlib.suppress(scheduler.exceptions.ConflictException):  # or somebody made it
            scheduler.create_schedule_group(Name=_GROUP)


def _schedule(scheduler: Any, id: str) -> Schedule:
    found = scheduler.get_schedule(Name=id, GroupName=_GROUP)
    cron = str(found.get("Description", "")).rpartition(": ")[2]
    zone = found["ScheduleExpressionTimezone"]
    return Schedule(id, cron or found["ScheduleExpression"], zone, found["State"] == "ENABLED")


def pipeline_name(definition: Definition) -> str:
    """The pipeline that the definition is a version of."""
    return definition_file(definition).removesuffix(SUFFIX)


def execution_name(definition: Definition, token: str) -> str:
    """What the execution of this submission is called."""
    return f"{pipeline_name(definition)[:60].rstrip('-')}-{digest_of(definition.files, token)}"


def outline(definition: Definition, place: SageMakerSpec, token: str) -> Outline:
    """What `submit` with the same arguments will start; asks nobody."""
    return Outline(where(place), execution_name(definition, token), steps(definition))


def lacks(place: SageMakerSpec) -> tuple[Problem, ...]:
    """What the config does not say about the account."""
    return tuple(
        Problem(f"SageMaker needs `{name}`", at := f"{_SECTION}.{name}", f"set {at}: {value}")
        for name, value in _EXAMPLES.items()
        if not getattr(place, name)
    )


def where(place: SageMakerSpec) -> str:
    """The account and region, for people."""
    account = place.role_arn.split(":")[4] if place.role_arn else "?"
    return f"account {account} in {place.region}"


def page(place: SageMakerSpec, arn: str) -> str:
    """Where to look in the console."""
    console = f"https://{place.region}.console.aws.amazon.com/sagemaker/home"
    return f"{console}?region={place.region}#/pipelines/{arn.split(':pipeline/')[-1]}"


@contextlib.contextmanager
def connected(
    place: SageMakerSpec, session: Any = None, **more: Any
) -> Iterator[Callable[[str], Any]]:
    """Clients by the name of a service, of boto3's `session` if there is one, with `more` of
    botocore's settings; what they raise becomes a PlatformError."""
    if problems := lacks(place):
        raise SpecError(problems)
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise PlatformError(
            f"{error.name} is not installed here", where="sagemaker", fix="pip install boto3"
        ) from None
    settings = {"region_name": place.region, "retries": _RETRIES, **more}
    config = Config(user_agent_extra="rekindle", **settings)
    # of its own: the shared one keeps who was logged in, and is no thread's
    session = session or Session()
    try:
        yield lambda service: session.client(service, config=config)
    except (BotoCoreError, ClientError) as error:
        raise _explained(error, place) from error


def _found(sagemaker: Any, name: str, id: str) -> str | None:
    """The ARN of the execution that is called `id`, among the newest of the pipeline."""
    pages = sagemaker.get_paginator("list_pipeline_executions").paginate(
        PipelineName=name, SortBy="CreationTime", SortOrder="Descending",
        PaginationConfig={"MaxItems": _MOST_LISTED, "PageSize": 100},
    )  # fmt: skip
    try:
        for listed in pages:
            for one in listed["PipelineExecutionSummaries"]:
                if one.get("PipelineExecutionDisplayName") == id:
                    return str(one["PipelineExecutionArn"])
    except sagemaker.exceptions.ResourceNotFound:
        pass  # there is no pipeline yet
    return None


def _upload(s3: Any, definition: Definition, place: SageMakerSpec) -> None:
    """The bundles that are not there yet: their names say what is in them."""
    bucket, _, root = place.artifact_root.removeprefix("s3://").rstrip("/").partition("/")
    encrypted = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": place.kms_key}
    more = encrypted if place.kms_key else {}
    for name, content in definition.files.items():
        if name.startswith("bundles/"):
            key = f"{root}/{name}" if root else name
            if not _is_there(s3, bucket, key, len(content)):
                s3.put_object(Bucket=bucket, Key=key, Body=content, **more)


def _is_there(s3: Any, bucket: str, key: str, size: int) -> bool:
    from botocore.exceptions import ClientError

    try:
        return bool(s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == size)
    except ClientError as error:
        if _code(error) in ("404", "NoSuchKey"):
            return False
        raise


def _version(sagemaker: Any, name: str, definition: Definition, place: SageMakerSpec) -> int:
    """The number of the pipeline's version with this definition: the newest one, or one that is
    made now."""
    text = definition.files[definition_file(definition)].decode()
    body = {"PipelineName": name, "PipelineDefinition": text, "RoleArn": place.role_arn}
    newest = _newest(sagemaker, name)
    if newest is None:
        tags = [{"Key": key, "Value": value} for key, value in sorted(place.tags.items())]
        token = digest_of(definition.files, f"create {name}") * 2
        meanwhile = sagemaker.exceptions.ConflictException, sagemaker.exceptions.ResourceInUse
        with contextlib.suppress(*meanwhile):  # or somebody made it
            sagemaker.create_pipeline(**body, ClientRequestToken=token, Tags=tags)
        newest = _newest(sagemaker, name)
    if newest is not None:
        there = sagemaker.describe_pipeline(PipelineName=name, PipelineVersionId=newest)
        if (there["PipelineDefinition"], there["RoleArn"]) == (text, place.role_arn):
            return newest
    return int(sagemaker.update_pipeline(**body)["PipelineVersionId"])


def _newest(sagemaker: Any, name: str) -> int | None:
    try:
        listed = sagemaker.list_pipeline_versions(
            PipelineName=name, SortOrder="Descending", MaxResults=1
        )
    except sagemaker.exceptions.ResourceNotFound:
        return None
    found = listed["PipelineVersionSummaries"]
    return int(found[0]["PipelineVersionId"]) if found else None


def _status_of(sagemaker: Any, id: str) -> str:
    found = sagemaker.describe_pipeline_execution(PipelineExecutionArn=id)
    return str(found["PipelineExecutionStatus"])


def _code(error: Exception) -> str:
    response: Any = getattr(error, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def _explained(error: Exception, place: SageMakerSpec) -> PlatformError:
    """What AWS says, and what to do about it."""
    from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError

    code = _code(error)
    if isinstance(error, NoCredentialsError) or code in _NOT_LOGGED_IN:
        fix = "aws sso login, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    elif code in ("AccessDenied", "AccessDeniedException", "403"):
        fix = "rekindle doctor CONFIG --platform sagemaker prints the permissions that are needed"
    elif code in ("NoSuchBucket", "404"):
        fix = f"make the bucket of {_SECTION}.artifact_root, or name another"
    elif code in ("PermanentRedirect", "301", "AuthorizationHeaderMalformed"):
        fix = f"the bucket of {_SECTION}.artifact_root is in another region than {place.region}"
    elif code in ("ResourceNotFound", "ResourceNotFoundException"):
        fix = "see what there is: aws sagemaker list-pipelines, rekindle schedule list"
    elif code == "ResourceLimitExceeded":
        fix = "wait until others end, or ask for a higher quota: Service Quotas, Amazon SageMaker"
    elif isinstance(error, EndpointConnectionError):
        fix = f"see whether the network is there, and whether {_SECTION}.region is a region"
    elif isinstance(error, ClientError) and _may_succeed(error):
        fix = "say it again; what was done already is found"
    else:
        fix = "this may be a mistake of rekindle's: the service refuses what was sent"
    return PlatformError(_said(error), where=where(place), fix=fix)


_NOT_LOGGED_IN = frozenset({
    "ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException",
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSignatureException",
})  # fmt: skip


def _may_succeed(error: Any) -> bool:
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status == 429 or status >= 500 or "Throttl" in _code(error)


def _said(error: Exception) -> str:
    """The service's own sentence."""
    response: Any = getattr(error, "response", {})
    text = response.get("Error", {}).get("Message") or str(error)
    return str(text).strip().splitlines()[0] if str(text).strip() else type(error).__name__
