"""An execution of a SageMaker pipeline: its steps, what they print and leave, stopping
it, and trying again what failed.

Steps are jobs by name; conditions are not shown. A job's log is one stream of CloudWatch
for each machine. What a job left is read from the places that its own description names
(mounted.py says what lies there).

Authority: boto3's models of sagemaker and logs;
docs.aws.amazon.com/sagemaker/latest/dg/logging-cloudwatch.html (names of groups and
streams). No account has been asked."""

import contextlib
import datetime
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.platforms import submission
from rekindle.platforms.logs import LogPiece, read_streams
from rekindle.platforms.mounted import RESULT, place_of
from rekindle.platforms.sagemaker.client import (
    Client,
    code_of,
    connected,
    page,
    where,
)
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.snapshot import RunSnapshot, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, digest_of
from rekindle.protojson import Json
from rekindle.records import ArtifactRecord, RunStatus, StepRecord, StepStatus

_RUN_STATES: Mapping[str, RunStatus] = {
    "Succeeded": "succeeded",
    "Failed": "failed",
    "CompletedWithFailures": "failed",
    "Stopped": "cancelled",
}
_STEP_STATES: Mapping[str, StepStatus] = {
    "Succeeded": "succeeded",
    "Failed": "failed",
    "Stopped": "cancelled",
}
_LOG_GROUPS = {
    "ProcessingJob": "/aws/sagemaker/ProcessingJobs",
    "TrainingJob": "/aws/sagemaker/TrainingJobs",
}
# fields of a StepRecord, and those of DescribeTrainingJob that they are sums of
_SUMMED_SECONDS = {
    "billed_seconds": "BillableTimeInSeconds",
    "on_demand_seconds": "TrainingTimeInSeconds",
}
_MOST_STREAMS = 50


def describe(place: SageMakerSpec, id: str) -> RunSnapshot:
    with connected(place) as client_of:
        sagemaker = client_of("sagemaker")
        now = datetime.datetime.now(datetime.UTC)
        execution = sagemaker.describe_pipeline_execution(PipelineExecutionArn=id)
        status = _RUN_STATES.get(execution["PipelineExecutionStatus"], "running")
        pages = sagemaker.get_paginator("list_pipeline_execution_steps").paginate(
            PipelineExecutionArn=id, SortOrder="Ascending"
        )
        listed = [step for listing in pages for step in listing["PipelineExecutionSteps"]]
        steps = []
        for step in listed:
            # conditions are shown only if they failed
            is_condition = "Condition" in step.get("Metadata", {})
            if step["StepStatus"] == "Failed" or not is_condition:
                steps.append(_step_record(sagemaker, step, now))
        ended = execution.get("LastModifiedTime") if status != "running" else None
        return RunSnapshot(status, tuple(steps), execution.get("FailureReason", ""), ended)


def read_log(place: SageMakerSpec, id: str, step: StepRecord, cursor: str) -> LogPiece:
    """The lines of every machine since; those of several begin with its name."""
    if not step.log:
        return LogPiece("", cursor)  # it has not begun
    group, _, job = step.log.rpartition(":")
    with connected(place) as client_of:
        logs = client_of("logs")
        try:
            streams = logs.describe_log_streams(
                logGroupName=group, logStreamNamePrefix=f"{job}/", limit=_MOST_STREAMS
            )["logStreams"]
        except logs.exceptions.ResourceNotFoundException:
            return LogPiece("", cursor)  # the job has printed nothing yet
        machines = {}
        for stream in streams:
            name = stream["logStreamName"]
            machines[name] = name.removeprefix(f"{job}/").rpartition("-")[0]
        read_since = functools.partial(_lines, logs, group)
        return read_streams(machines, cursor, "", read_since)


def cancel(place: SageMakerSpec, id: str) -> None:
    with connected(place) as client_of:
        sagemaker = client_of("sagemaker")
        if _is_ending(sagemaker, id):
            return
        # the same token each time: a repeated call stops it once
        token = digest_of({id: b"stop"}) * 2
        try:
            sagemaker.stop_pipeline_execution(PipelineExecutionArn=id, ClientRequestToken=token)
        except sagemaker.exceptions.ClientError:
            if not _is_ending(sagemaker, id):  # it may have ended meanwhile
                raise


def resume(definition: Definition, place: SageMakerSpec, id: str, mark: RunTag) -> SubmittedRun:
    """The same execution, which tries again what failed or was stopped;
    else PlatformError."""
    with connected(place) as client_of:
        sagemaker = client_of("sagemaker")
        state = _state(sagemaker, id)
        if state == "Executing":  # by the same call, whose answer was lost
            return SubmittedRun(id, page(place, id), anew=False)
        status = _RUN_STATES.get(state)
        submission.check_resumable(status, f"the execution is {state}", where(place))
        sagemaker.retry_pipeline_execution(
            PipelineExecutionArn=id,
            ClientRequestToken=digest_of({id: b"retry"}, mark.token) * 2,
        )
        return SubmittedRun(id, page(place, id))


def artifacts(place: SageMakerSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """What the step's job left, with its metadata, at `s3://`;
    nothing of what is not a job."""
    with connected(place) as client_of:
        uri_of = _output_uris(client_of("sagemaker"), step.log)
    result_folder = uri_of(RESULT)
    if result_folder is None:
        return {}
    result = json.loads(read(place, f"{result_folder}/result.json"))
    records = {}
    for name, artifact in result["artifacts"].items():
        uri = place_of(artifact, uri_of(name) or "")
        records[name] = ArtifactRecord(uri=uri, metadata=artifact.get("metadata", {}))
    return records


def read(place: SageMakerSpec, uri: str) -> bytes:
    """What an object of S3 holds; FileNotFoundError where there is none."""
    from botocore.exceptions import ClientError

    if not uri.startswith("s3://"):  # a component may give its artifact any URI
        raise FileNotFoundError(uri)
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    with connected(place) as client_of:
        try:
            return bytes(client_of("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
        except ClientError as error:
            if code_of(error) in ("404", "NoSuchKey"):
                raise FileNotFoundError(uri) from None
            raise


def _state(sagemaker: Client, id: str) -> str:
    execution = sagemaker.describe_pipeline_execution(PipelineExecutionArn=id)
    return str(execution["PipelineExecutionStatus"])


def _is_ending(sagemaker: Client, id: str) -> bool:
    """Whether the execution has ended or is being stopped."""
    return _state(sagemaker, id) in (*_RUN_STATES, "Stopping")


def _step_record(sagemaker: Client, step: Json, now: datetime.datetime) -> StepRecord:
    log = ""
    for kind, group in _LOG_GROUPS.items():
        arn = step.get("Metadata", {}).get(kind, {}).get("Arn")
        if arn:
            log = f"{group}:{arn.rpartition('/')[2]}"
    attempts = step.get("AttemptCount", 1)
    is_cached = "CacheHitResult" in step
    reason = "taken from the cache" if is_cached else ""
    seconds: dict[str, float | None] = {}
    if log.startswith(_LOG_GROUPS["TrainingJob"]) and not is_cached:
        jobs = _training_jobs(sagemaker, log.rpartition(":")[2])
        interruptions = sum(map(_interruptions, jobs))
        # each retry is a job of its own, each interruption begins a job again
        attempts = max(attempts, len(jobs)) + interruptions
        if interruptions:
            reason = f"its spot machines were taken away {interruptions} x"
        for field, job_field in _SUMMED_SECONDS.items():
            reported = [job[job_field] for job in jobs if job_field in job]
            seconds[field] = sum(reported) if reported else None
    return StepRecord(
        name=step["StepName"],
        status=_STEP_STATES.get(step["StepStatus"], "running"),
        cached=is_cached,
        reason=reason,
        attempts=attempts,
        log=log,
        error=step.get("FailureReason", ""),
        **seconds,
        **step_times(step.get("StartTime"), step.get("EndTime"), now),
    )


def _interruptions(job: Json) -> int:
    """How often spot machines were taken from a training job."""
    changes = job.get("SecondaryStatusTransitions", ())
    return [change["Status"] for change in changes].count("Interrupted")


def _training_jobs(sagemaker: Client, newest: str) -> list[Json]:
    """The training jobs of a step, of which the `newest` has this name: each retry has a
    job of its own, whose name ends otherwise."""
    from botocore.exceptions import ClientError

    step = newest.rpartition("-")[0]
    names = {newest}
    pages = sagemaker.get_paginator("list_training_jobs")
    # without the right to list, the newest one is known
    with contextlib.suppress(ClientError):
        for listed in pages.paginate(NameContains=f"{step}-"):
            for job in listed["TrainingJobSummaries"]:
                name = job["TrainingJobName"]
                if name.rpartition("-")[0] == step:
                    names.add(name)
    return [sagemaker.describe_training_job(TrainingJobName=name) for name in sorted(names)]


def _output_uris(sagemaker: Client, log: str) -> Callable[[str], str | None]:
    """A function that gives the URI of an output by its name, of the job with this log;
    None for an output that the job does not have."""
    group, _, job = log.rpartition(":")
    if group == _LOG_GROUPS["ProcessingJob"]:
        described = sagemaker.describe_processing_job(ProcessingJobName=job)
        outputs = described["ProcessingOutputConfig"]["Outputs"]
        uris = {output["OutputName"]: str(output["S3Output"]["S3Uri"]) for output in outputs}
        return uris.get
    if group == _LOG_GROUPS["TrainingJob"]:
        described = sagemaker.describe_training_job(TrainingJobName=job)
        model = f"{described['OutputDataConfig']['S3OutputPath']}/{job}/output/model"
        return lambda name: f"{model}/{name}"
    return lambda name: None


def _lines(logs: Client, group: str, stream: str, token: str) -> tuple[list[str], str]:
    """What a stream holds since `token`, and the next one."""
    lines: list[str] = []
    while True:
        position: dict[str, Any] = {"nextToken": token} if token else {}
        events = logs.get_log_events(
            logGroupName=group, logStreamName=stream, startFromHead=True, **position
        )
        lines += [event["message"] for event in events["events"]]
        # at the end of the stream CloudWatch gives the same token back
        if events["nextForwardToken"] == token:
            return lines, token
        token = events["nextForwardToken"]
