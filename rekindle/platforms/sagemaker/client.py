"""SageMaker Pipelines in an account: a definition is published as a version of its
pipeline, and run.

Bundles go to S3 first, under names that are their content. An execution runs the very
version that holds its definition. It is started with a token that follows from definition
and submission, which the service heeds for a while, and is called by it, which is looked
for before.

Authority: botocore's model, as tests/servers/aws/rest.py has seen it ask. No account
has."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from rekindle.errors import PlatformError, UnreachableError, first_line
from rekindle.outputs import PlannedStep
from rekindle.platforms import submission
from rekindle.platforms.cache_diff import CacheKey, of_bundle
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import BUG, Definition, RunTag, SubmittedRun, digest_of
from rekindle.protojson import Json

Client: TypeAlias = Any
"""A botocore client of a service:
its methods are made from the service's model at run time."""

_RETRIES = {"mode": "standard", "total_max_attempts": 5}
ANSWER_SECONDS = 60.0
_MOST_LISTED = 1_000  # executions that are looked through for one of a name
SUFFIX = ".sagemaker.json"
_LOG_IN = "aws sso login, or set AWS_PROFILE or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_STEP_REFERENCE = re.compile(r"Steps\.([\w-]+)\.")
_PARAMETER_REFERENCE = re.compile(r'"Parameters\.([^"]+)"')


def submit(definition: Definition, place: SageMakerSpec, mark: RunTag) -> SubmittedRun:
    name = pipeline_name(definition)
    execution = run_name(definition, mark.token)
    with connected(place) as client_of:
        sagemaker = client_of("sagemaker")
        arn = _execution_named(sagemaker, name, execution)
        if arn:
            return SubmittedRun(arn, page(place, arn), anew=False)
        upload(client_of("s3"), definition, place)
        started = sagemaker.start_pipeline_execution(
            PipelineName=name,
            PipelineVersionId=version_of(sagemaker, name, definition, place),
            PipelineExecutionDisplayName=execution,
            PipelineExecutionDescription=str(mark),
            # twice, since the service wants 32 characters at least
            ClientRequestToken=digest_of(definition.files, mark.token) * 2,
        )
        arn = started["PipelineExecutionArn"]
        return SubmittedRun(arn, page(place, arn))


def pipeline_name(definition: Definition) -> str:
    """The pipeline that the definition is a version of."""
    return definition.entry.removesuffix(SUFFIX)


def run_name(definition: Definition, token: str) -> str:
    """The name of the execution of this definition that is submitted with this token."""
    return submission.submission_name(pipeline_name(definition), definition, token, longest=60)


def where(place: SageMakerSpec) -> str:
    """The account and region, for people."""
    account = place.role_arn.split(":")[4] if place.role_arn else "?"
    return f"account {account} in {place.region}"


def page(place: SageMakerSpec, arn: str) -> str:
    """The URL of an execution in the console."""
    console = f"https://{place.region}.console.aws.amazon.com/sagemaker/home"
    return f"{console}?region={place.region}#/pipelines/{arn.split(':pipeline/')[-1]}"


@contextlib.contextmanager
def connected(
    place: SageMakerSpec, **botocore_settings: object
) -> Iterator[Callable[[str], Client]]:
    """A function that gives the client of a service by its name; PlatformError for what
    clients raise in the block."""
    place.refuse_if_incomplete()
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise submission.not_installed(error, "sagemaker", "pip install boto3") from None
    settings = {"retries": _RETRIES, "read_timeout": ANSWER_SECONDS, **botocore_settings}
    config = Config(region_name=place.region, user_agent_extra="rekindle", **settings)
    # a session of our own: boto3's shared one keeps who was logged in, and is not thread-safe
    session = functools.cache(Session)
    try:
        yield lambda service: session().client(service, config=config)
    except (BotoCoreError, ClientError) as error:
        raise _explained(error, place) from error


def _execution_named(sagemaker: Client, pipeline: str, name: str) -> str | None:
    """The ARN of the execution with this name, among the newest of the pipeline."""
    pages = sagemaker.get_paginator("list_pipeline_executions").paginate(
        PipelineName=pipeline,
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"MaxItems": _MOST_LISTED, "PageSize": 100},
    )
    with contextlib.suppress(sagemaker.exceptions.ResourceNotFound):  # there is no pipeline yet
        for listed in pages:
            for execution in listed["PipelineExecutionSummaries"]:
                if execution.get("PipelineExecutionDisplayName") == name:
                    return str(execution["PipelineExecutionArn"])
    return None


def upload(s3: Client, definition: Definition, place: SageMakerSpec) -> None:
    """Upload the bundles that S3 does not have yet: their names say what is in them."""
    bucket, _, root = place.artifact_root.removeprefix("s3://").rstrip("/").partition("/")
    encryption = {}
    if place.kms_key:
        encryption = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": place.kms_key}
    for name, content in definition.files.items():
        if not name.startswith("bundles/"):
            continue
        key = f"{root}/{name}" if root else name
        # an upload that was cut off has another length
        if _object_bytes(s3, bucket, key) != len(content):
            s3.put_object(Bucket=bucket, Key=key, Body=content, **encryption)


def _object_bytes(s3: Client, bucket: str, key: str) -> int | None:
    """The size of an object; None where there is none."""
    from botocore.exceptions import ClientError

    try:
        return int(s3.head_object(Bucket=bucket, Key=key)["ContentLength"])
    except ClientError as error:
        if code_of(error) not in ("404", "NoSuchKey"):
            raise
        return None


def version_of(sagemaker: Client, name: str, definition: Definition, place: SageMakerSpec) -> int:
    """The number of the pipeline's version with this definition:
    the newest one, or a new one."""
    text = definition.text.decode()
    body = {"PipelineName": name, "PipelineDefinition": text, "RoleArn": place.role_arn}
    newest = _newest_version(sagemaker, name)
    if newest is None:
        tags = [{"Key": key, "Value": value} for key, value in sorted(place.tags.items())]
        token = digest_of(definition.files, f"create {name}") * 2
        created_meanwhile = (
            sagemaker.exceptions.ConflictException,
            sagemaker.exceptions.ResourceInUse,
        )
        with contextlib.suppress(*created_meanwhile):  # by another process
            sagemaker.create_pipeline(**body, ClientRequestToken=token, Tags=tags)
        newest = _newest_version(sagemaker, name)
    # an execution runs a version, so the same definition needs no new one
    if newest is not None:
        pipeline = sagemaker.describe_pipeline(PipelineName=name, PipelineVersionId=newest)
        if (pipeline["PipelineDefinition"], pipeline["RoleArn"]) == (
            text,
            place.role_arn,
        ):
            return newest
    return int(sagemaker.update_pipeline(**body)["PipelineVersionId"])


def _newest_version(sagemaker: Client, name: str) -> int | None:
    try:
        listed = sagemaker.list_pipeline_versions(
            PipelineName=name, SortOrder="Descending", MaxResults=1
        )
    except sagemaker.exceptions.ResourceNotFound:
        return None
    versions = listed["PipelineVersionSummaries"]
    return int(versions[0]["PipelineVersionId"]) if versions else None


def code_of(error: Exception) -> str:
    """The service's code of an error, or its HTTP status where it has none;
    "" for other errors."""
    return str(_response_of(error).get("Error", {}).get("Code", ""))


def _response_of(error: Exception) -> Json:
    return getattr(error, "response", None) or {}


def _explained(error: Exception, place: SageMakerSpec) -> PlatformError:
    """The error of botocore as ours, with what to do about it."""
    message = first_line(error, _response_of(error).get("Error", {}).get("Message"))
    fix = _fix_by_code(error, place)
    if fix:
        return PlatformError(message, where=where(place), fix=fix)
    if _is_passing(error):
        fix = (
            "check the network and platforms.sagemaker.region; "
            "retry the command: submitting is idempotent"
        )
        return UnreachableError(message, where=where(place), fix=fix)
    fix = f"the service rejected the request; {BUG}"
    return PlatformError(message, where=where(place), fix=fix)


def _is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    from botocore import exceptions as botocore_errors

    status = _response_of(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if status == 429 or status >= 500 or "Throttl" in code_of(error):
        return True
    return isinstance(error, botocore_errors.ConnectionError | botocore_errors.HTTPClientError)


def _fix_by_code(error: Exception, place: SageMakerSpec) -> str:
    """What to do about an error whose code says it; "" for others."""
    from botocore.exceptions import NoCredentialsError

    if isinstance(error, NoCredentialsError):  # botocore's, which asked for nothing
        return _LOG_IN
    match code_of(error):
        case (
            "ExpiredToken"
            | "ExpiredTokenException"
            | "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "InvalidAccessKeyId"
            | "SignatureDoesNotMatch"
            | "InvalidSignatureException"
        ):
            return _LOG_IN
        case "AccessDenied" | "AccessDeniedException" | "403":
            return (
                "rekindle doctor CONFIG --platform sagemaker prints the permissions that are needed"
            )
        case "NoSuchBucket" | "404":
            return "make the bucket of platforms.sagemaker.artifact_root, or name another"
        case "PermanentRedirect" | "301" | "AuthorizationHeaderMalformed":
            return (
                "the bucket of platforms.sagemaker.artifact_root is in another region "
                f"than {place.region}"
            )
        case "ResourceNotFound" | "ResourceNotFoundException":
            return "see what there is: aws sagemaker list-pipelines, rekindle schedule list"
        case "ResourceLimitExceeded":
            return (
                "wait until others end, or ask for a higher quota: Service Quotas, Amazon SageMaker"
            )
    return ""


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The jobs by name, those of every branch, and the type of their machines."""
    return tuple(planned for planned, _ in _planned(definition))


def images(definition: Definition) -> frozenset[str]:
    """The images that the jobs run in."""
    return frozenset(image for _, image in _planned(definition))


def _planned(definition: Definition) -> Iterator[tuple[PlannedStep, str]]:
    """Each job of a definition, and its image."""
    for step in _jobs(json.loads(definition.text)["Steps"]):
        name = step["Name"]
        job = step["Arguments"]
        if step["Type"] == "Processing":
            cluster = job["ProcessingResources"]["ClusterConfig"]
            planned = PlannedStep(name, cluster["InstanceType"], cluster["InstanceCount"])
            yield planned, job["AppSpecification"]["ImageUri"]
        elif step["Type"] == "Training":
            cluster = job["ResourceConfig"]
            is_spot = job.get("EnableManagedSpotTraining", False)
            planned = PlannedStep(name, cluster["InstanceType"], cluster["InstanceCount"], is_spot)
            yield planned, job["AlgorithmSpecification"]["TrainingImage"]


def _jobs(steps: list[Json]) -> Iterator[Json]:
    """The steps that are jobs, those inside of conditions in the place of these."""
    for step in steps:
        if step["Type"] == "Condition":
            yield from _jobs([*step["Arguments"]["IfSteps"], *step["Arguments"]["ElseSteps"]])
        else:
            yield step


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them, by image, environment and inputs. Inputs are
    URIs: whatever an execution writes lies at a new one, so all that reads it runs again,
    too."""
    definition = json.loads(Definition(files).text)
    defaults = {p["Name"]: json.dumps(p["DefaultValue"]) for p in definition["Parameters"]}
    return tuple(_cache_key(step, defaults, files) for step in _jobs(definition["Steps"]))


def _cache_key(step: Json, defaults: Mapping[str, str], files: Mapping[str, bytes]) -> CacheKey:
    job = step["Arguments"]
    inputs = _input_uris(job)
    environment = json.dumps(job.get("Environment", {}), sort_keys=True)
    # the bundle is compared by its files, not by its URI
    bundle = str(inputs.pop("bundle", ""))
    algorithm = job.get("AppSpecification") or job.get("AlgorithmSpecification") or {}
    parts = {
        "image": json.dumps(algorithm, sort_keys=True),
        "environment variables": environment,
        "inputs": json.dumps(inputs, sort_keys=True),
    }
    for name in _PARAMETER_REFERENCE.findall(environment):
        parts[f"parameter `{name}`"] = defaults.get(name, "")
    parts |= of_bundle("bundles" + bundle.partition("/bundles")[2], files)
    referring = json.dumps([*inputs.values(), job.get("InferenceSpecification")])
    steps_read = tuple(dict.fromkeys(_STEP_REFERENCE.findall(referring)))
    is_cached = bool(step.get("CacheConfig", {}).get("Enabled"))
    return CacheKey(step["Name"], is_cached, parts, steps_read)


def _input_uris(job: Json) -> Json:
    """The URIs of a job's inputs by name, its bundle among them."""
    uris = {}
    for job_input in job.get("ProcessingInputs", ()):
        uris[job_input["InputName"]] = job_input["S3Input"]["S3Uri"]
    for channel in job.get("InputDataConfig", ()):
        uris[channel["ChannelName"]] = channel["DataSource"]["S3DataSource"]["S3Uri"]
    return uris
