"""SageMaker Pipelines in an account: a definition is published as a version of its pipeline, and
run.

Bundles go to S3 first, under names that are their content. An execution runs the very version that
holds its definition. It is started with a token that follows from definition and submission, which
the service heeds for a while, and is called by it, which is looked for before.

Authority: botocore's model, as tests/servers/aws/rest.py has seen it ask. No account has."""

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rekindle.errors import PlatformError, UnreachableError, first_line
from rekindle.outputs import PlannedStep
from rekindle.platforms import submission
from rekindle.platforms.cache_diff import CacheKey, of_bundle
from rekindle.platforms.submission import BUG, Definition, RunTag, SubmittedRun, digest_of
from rekindle.spec.platforms import SageMakerSpec
from rekindle.tables import rows

_RETRIES = {"mode": "standard", "total_max_attempts": 5}
ANSWER_SECONDS = 60.0
_MOST_LISTED = 1_000
_FIXES: Mapping[str, str] = {
    code: row["fix"] for row in rows(Path(__file__).with_suffix(".yaml")) for code in row["codes"]
}
SUFFIX = ".sagemaker.json"
_READ = re.compile(r"Steps\.([\w-]+)\.")
_PARAMETER = re.compile(r'"Parameters\.([^"]+)"')


def submit(definition: Definition, place: SageMakerSpec, mark: RunTag) -> SubmittedRun:
    name, id = pipeline_name(definition), run_name(definition, mark.token)
    with connected(place) as session:
        sagemaker = session("sagemaker")
        if arn := _found(sagemaker, name, id):
            return SubmittedRun(arn, page(place, arn), anew=False)
        upload(session("s3"), definition, place)
        started = sagemaker.start_pipeline_execution(
            PipelineName=name,
            PipelineVersionId=version_of(sagemaker, name, definition, place),
            PipelineExecutionDisplayName=id,
            PipelineExecutionDescription=str(mark),
            ClientRequestToken=digest_of(definition.files, mark.token) * 2,
        )
        arn = started["PipelineExecutionArn"]
        return SubmittedRun(arn, page(place, arn))


def pipeline_name(definition: Definition) -> str:
    """The pipeline that the definition is a version of."""
    return definition.entry.removesuffix(SUFFIX)


def run_name(definition: Definition, token: str) -> str:
    return f"{pipeline_name(definition)[:60].rstrip('-')}-{digest_of(definition.files, token)}"


def where(place: SageMakerSpec) -> str:
    account = place.role_arn.split(":")[4] if place.role_arn else "?"
    return f"account {account} in {place.region}"


def page(place: SageMakerSpec, arn: str) -> str:
    console = f"https://{place.region}.console.aws.amazon.com/sagemaker/home"
    return f"{console}?region={place.region}#/pipelines/{arn.split(':pipeline/')[-1]}"


@contextlib.contextmanager
def connected(place: SageMakerSpec, **more: Any) -> Iterator[Callable[[str], Any]]:
    """Clients by service, with `more` settings of botocore; PlatformError for what they raise."""
    place.refuse_if_incomplete()
    try:
        from boto3.session import Session
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        raise submission.not_installed(error, "sagemaker", "pip install boto3") from None
    settings = {"retries": _RETRIES, "read_timeout": ANSWER_SECONDS, **more}
    config = Config(region_name=place.region, user_agent_extra="rekindle", **settings)
    # of its own: the shared one keeps who was logged in, and is no thread's
    session = functools.cache(Session)
    try:
        yield lambda service: session().client(service, config=config)
    except (BotoCoreError, ClientError) as error:
        raise _explained(error, place) from error


def _found(sagemaker: Any, name: str, id: str) -> str | None:
    """The ARN of the execution that is called `id`, among the newest of the pipeline."""
    pages = sagemaker.get_paginator("list_pipeline_executions").paginate(
        PipelineName=name,
        SortBy="CreationTime",
        SortOrder="Descending",
        PaginationConfig={"MaxItems": _MOST_LISTED, "PageSize": 100},
    )
    with contextlib.suppress(sagemaker.exceptions.ResourceNotFound):  # there is no pipeline yet
        for listed in pages:
            for one in listed["PipelineExecutionSummaries"]:
                if one.get("PipelineExecutionDisplayName") == id:
                    return str(one["PipelineExecutionArn"])
    return None


def upload(s3: Any, definition: Definition, place: SageMakerSpec) -> None:
    """The bundles that are not there yet: their names say what is in them."""
    from botocore.exceptions import ClientError

    bucket, _, root = place.artifact_root.removeprefix("s3://").rstrip("/").partition("/")
    encrypted = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": place.kms_key}
    more = encrypted if place.kms_key else {}
    for name, content in definition.files.items():
        if not name.startswith("bundles/"):
            continue
        key = f"{root}/{name}" if root else name
        try:
            there = s3.head_object(Bucket=bucket, Key=key)["ContentLength"] == len(content)
        except ClientError as error:
            if code_of(error) not in ("404", "NoSuchKey"):
                raise
            there = False
        if not there:
            s3.put_object(Bucket=bucket, Key=key, Body=content, **more)


def version_of(sagemaker: Any, name: str, definition: Definition, place: SageMakerSpec) -> int:
    """The number of the pipeline's version with this definition: the newest one, or a new one."""
    text = definition.text.decode()
    body = {"PipelineName": name, "PipelineDefinition": text, "RoleArn": place.role_arn}
    if (newest := _newest(sagemaker, name)) is None:
        tags = [{"Key": key, "Value": value} for key, value in sorted(place.tags.items())]
        token = digest_of(definition.files, f"create {name}") * 2
        meanwhile = sagemaker.exceptions.ConflictException, sagemaker.exceptions.ResourceInUse
        with contextlib.suppress(*meanwhile):  # or another process made it
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


def code_of(error: Exception) -> str:
    response: Any = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def _explained(error: Exception, place: SageMakerSpec) -> PlatformError:
    from botocore import exceptions as of

    kind, code = PlatformError, code_of(error)
    if isinstance(error, of.NoCredentialsError):
        code = "NoCredentials"
    response: Any = getattr(error, "response", None) or {}
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    passing = status == 429 or status >= 500 or "Throttl" in code
    passing = passing or isinstance(error, of.ConnectionError | of.HTTPClientError)
    if code in _FIXES:
        fix = _FIXES[code].format(region=place.region)
    elif passing:
        kind, fix = UnreachableError, "check the network and platforms.sagemaker.region; "
        fix += "retry the command: submitting is idempotent"
    else:
        fix = f"the service rejected the request; {BUG}"
    said = first_line(error, response.get("Error", {}).get("Message"))
    return kind(said, where=where(place), fix=fix)


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    """The jobs by name, those of every branch: on machines of which type."""
    return tuple(planned for planned, _ in _planned(definition))


def images(definition: Definition) -> frozenset[str]:
    return frozenset(image for _, image in _planned(definition))


def _planned(definition: Definition) -> Iterator[tuple[PlannedStep, str]]:
    for step in _jobs(json.loads(definition.text)["Steps"]):
        job, name = step["Arguments"], step["Name"]
        if step["Type"] == "Processing":
            cluster = job["ProcessingResources"]["ClusterConfig"]
            planned = PlannedStep(name, cluster["InstanceType"], cluster["InstanceCount"])
            yield planned, job["AppSpecification"]["ImageUri"]
        elif step["Type"] == "Training":
            resources, spot = job["ResourceConfig"], job.get("EnableManagedSpotTraining", False)
            planned = PlannedStep(name, resources["InstanceType"], resources["InstanceCount"], spot)
            yield planned, job["AlgorithmSpecification"]["TrainingImage"]


def _jobs(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The steps, those inside of conditions in place of these."""
    for step in steps:
        if step["Type"] == "Condition":
            yield from _jobs([*step["Arguments"]["IfSteps"], *step["Arguments"]["ElseSteps"]])
        else:
            yield step


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The steps as the cache sees them, by image, environment and inputs. Inputs are URIs: whatever
    an execution writes lies at a new one, so all that reads it runs again, too."""
    definition = json.loads(Definition(files).text)
    defaults = {p["Name"]: json.dumps(p["DefaultValue"]) for p in definition["Parameters"]}
    return tuple(_unit(step, defaults, files) for step in _jobs(definition["Steps"]))


def _unit(
    step: dict[str, Any], defaults: Mapping[str, str], files: Mapping[str, bytes]
) -> CacheKey:
    job = step["Arguments"]
    inputs = {i["InputName"]: i["S3Input"]["S3Uri"] for i in job.get("ProcessingInputs", ())}
    for channel in job.get("InputDataConfig", ()):
        inputs[channel["ChannelName"]] = channel["DataSource"]["S3DataSource"]["S3Uri"]
    environment = json.dumps(job.get("Environment", {}), sort_keys=True)
    bundle = str(inputs.pop("bundle", ""))
    algorithm = job.get("AppSpecification") or job.get("AlgorithmSpecification") or {}
    parts = {
        "image": json.dumps(algorithm, sort_keys=True),
        "environment variables": environment,
        "inputs": json.dumps(inputs, sort_keys=True),
        **{f"parameter `{n}`": defaults.get(n, "") for n in _PARAMETER.findall(environment)},
        **of_bundle("bundles" + bundle.partition("/bundles")[2], files),
    }
    reads = _READ.findall(json.dumps([*inputs.values(), job.get("InferenceSpecification")]))
    cached = bool(step.get("CacheConfig", {}).get("Enabled"))
    return CacheKey(step["Name"], cached, parts, tuple(dict.fromkeys(reads)))
