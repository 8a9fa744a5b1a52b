"""An execution of a SageMaker pipeline: its steps, what they print and leave, stopping it, and
trying again what failed.

Steps are jobs by name; conditions are not shown. A job's log is one stream of CloudWatch for each
machine. What a job left is read from the places that its own description names (mounted.py says
what lies there).

Authority: boto3's models of sagemaker and logs;
docs.aws.amazon.com/sagemaker/latest/dg/logging-cloudwatch.html (names of groups and streams). No
account has been asked."""

import contextlib
import datetime
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.platforms import submission
from rekindle.platforms.mounted import RESULT, place_of
from rekindle.platforms.sagemaker.client import code_of, connected, page, where
from rekindle.platforms.snapshot import Log, RunSnapshot, states_of, step_times
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, digest_of
from rekindle.records import ArtifactRecord, StepRecord
from rekindle.spec.platforms import SageMakerSpec

_RUNS, _STEPS, _ = states_of(__file__)
_GROUPS = {kind: f"/aws/sagemaker/{kind}s" for kind in ("ProcessingJob", "TrainingJob")}
_SECONDS = {
    "billed_seconds": "BillableTimeInSeconds",
    "on_demand_seconds": "TrainingTimeInSeconds",
}
_MOST_STREAMS = 50


def describe(place: SageMakerSpec, id: str) -> RunSnapshot:
    with connected(place) as session:
        sagemaker, now = session("sagemaker"), datetime.datetime.now(datetime.UTC)
        found = sagemaker.describe_pipeline_execution(PipelineExecutionArn=id)
        status = _RUNS.get(found["PipelineExecutionStatus"], "running")
        pages = sagemaker.get_paginator("list_pipeline_execution_steps").paginate(
            PipelineExecutionArn=id, SortOrder="Ascending"
        )
        listed = [step for one in pages for step in one["PipelineExecutionSteps"]]
        steps = [  # conditions only if they failed
            _step(sagemaker, step, now)
            for step in listed
            if step["StepStatus"] == "Failed" or "Condition" not in step.get("Metadata", {})
        ]
        ended = found.get("LastModifiedTime") if status != "running" else None
        return RunSnapshot(status, tuple(steps), found.get("FailureReason", ""), ended)


def read_log(place: SageMakerSpec, id: str, step: StepRecord, cursor: str) -> Log:
    """The lines of every machine since; those of several begin with its name."""
    if not step.log:
        return Log("", cursor)  # it has not begun
    group, _, job = step.log.rpartition(":")
    seen: dict[str, str] = json.loads(cursor or "{}")
    text = list[str]()
    with connected(place) as session:
        logs = session("logs")
        try:
            streams = logs.describe_log_streams(
                logGroupName=group, logStreamNamePrefix=f"{job}/", limit=_MOST_STREAMS
            )["logStreams"]
        except logs.exceptions.ResourceNotFoundException:
            return Log("", cursor)  # the job has printed nothing yet
        for stream in streams:
            name = stream["logStreamName"]
            machine = name.removeprefix(f"{job}/").rpartition("-")[0]
            before = f"[{machine}] " if len(streams) > 1 else ""
            lines, seen[name] = _lines(logs, group, name, seen.get(name, ""))
            text += [f"{before}{line}\n" for line in lines]
    return Log("".join(text), json.dumps(seen))


def cancel(place: SageMakerSpec, id: str) -> None:
    with connected(place) as session:
        sagemaker = session("sagemaker")
        if _status(sagemaker, id) in (*_RUNS, "Stopping"):
            return
        token = digest_of({id: b"stop"}) * 2
        try:
            sagemaker.stop_pipeline_execution(PipelineExecutionArn=id, ClientRequestToken=token)
        except sagemaker.exceptions.ClientError:
            if _status(sagemaker, id) not in (*_RUNS, "Stopping"):  # it may have ended meanwhile
                raise


def resume(definition: Definition, place: SageMakerSpec, id: str, mark: RunTag) -> SubmittedRun:
    """The same execution, which tries again what failed or was stopped; else PlatformError."""
    with connected(place) as session:
        sagemaker = session("sagemaker")
        status = _status(sagemaker, id)
        if status == "Executing":  # by the same call, whose answer was lost
            return SubmittedRun(id, page(place, id), anew=False)
        submission.check_resumable(_RUNS.get(status), f"the execution is {status}", where(place))
        sagemaker.retry_pipeline_execution(
            PipelineExecutionArn=id, ClientRequestToken=digest_of({id: b"retry"}, mark.token) * 2
        )
        return SubmittedRun(id, page(place, id))


def artifacts(place: SageMakerSpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    """What the step's job left, with its metadata, at `s3://`; nothing of what is not a job."""
    with connected(place) as session:
        output = _outputs(session("sagemaker"), step.log)
    if (result := output(RESULT)) is None:
        return {}
    told = json.loads(read(place, f"{result}/result.json"))
    return {
        name: ArtifactRecord(
            uri=place_of(artifact, output(name) or ""), metadata=artifact.get("metadata", {})
        )
        for name, artifact in told["artifacts"].items()
    }


def read(place: SageMakerSpec, uri: str) -> bytes:
    from botocore.exceptions import ClientError

    if not uri.startswith("s3://"):  # a component may give its artifact any URI
        raise FileNotFoundError(uri)
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    with connected(place) as session:
        try:
            return bytes(session("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
        except ClientError as error:
            if code_of(error) in ("404", "NoSuchKey"):
                raise FileNotFoundError(uri) from None
            raise


def _status(sagemaker: Any, id: str) -> str:
    found = sagemaker.describe_pipeline_execution(PipelineExecutionArn=id)
    return str(found["PipelineExecutionStatus"])


def _step(sagemaker: Any, step: Mapping[str, Any], now: datetime.datetime) -> StepRecord:
    log, attempts = "", step.get("AttemptCount", 1)
    for kind, group in _GROUPS.items():
        if arn := step.get("Metadata", {}).get(kind, {}).get("Arn"):
            log = f"{group}:{arn.rpartition('/')[2]}"
    cached = "CacheHitResult" in step
    reason, billed = "taken from the cache" if cached else "", dict[str, float | None]()
    if log.startswith(_GROUPS["TrainingJob"]) and not cached:
        jobs = _jobs(sagemaker, log.rpartition(":")[2])
        changes = itertools.chain(*(job.get("SecondaryStatusTransitions", ()) for job in jobs))
        taken = sum(change["Status"] == "Interrupted" for change in changes)
        attempts = max(attempts, len(jobs)) + taken
        reason = f"its spot machines were taken away {taken} x" if taken else ""
        for name, field in _SECONDS.items():
            known = [job[field] for job in jobs if field in job]
            billed[name] = sum(known) if known else None
    return StepRecord(
        name=step["StepName"],
        status=_STEPS.get(step["StepStatus"], "running"),
        cached=cached,
        reason=reason,
        attempts=attempts,
        log=log,
        error=step.get("FailureReason", ""),
        **billed,
        **step_times(step.get("StartTime"), step.get("EndTime"), now),
    )


def _jobs(sagemaker: Any, last: str) -> list[Mapping[str, Any]]:
    """The training jobs of a step, of which the `last` has this name: each retry has a job of its
    own, whose name ends otherwise."""
    from botocore.exceptions import ClientError

    step, names = last.rpartition("-")[0], {last}
    pages = sagemaker.get_paginator("list_training_jobs")
    with contextlib.suppress(ClientError):  # without the right to list, the last one is known
        for page in pages.paginate(NameContains=f"{step}-"):
            listed = (job["TrainingJobName"] for job in page["TrainingJobSummaries"])
            names |= {name for name in listed if name.rpartition("-")[0] == step}
    return [sagemaker.describe_training_job(TrainingJobName=name) for name in sorted(names)]


def _outputs(sagemaker: Any, log: str) -> Callable[[str], str | None]:
    """Where an output of the job with this log lies; None for what it has not."""
    group, _, job = log.rpartition(":")
    if group == _GROUPS["ProcessingJob"]:
        described = sagemaker.describe_processing_job(ProcessingJobName=job)
        outputs = described["ProcessingOutputConfig"]["Outputs"]
        return {one["OutputName"]: str(one["S3Output"]["S3Uri"]) for one in outputs}.get
    if group == _GROUPS["TrainingJob"]:
        described = sagemaker.describe_training_job(TrainingJobName=job)
        model = f"{described['OutputDataConfig']['S3OutputPath']}/{job}/output/model"
        return lambda name: f"{model}/{name}"
    return lambda name: None


def _lines(logs: Any, group: str, stream: str, token: str) -> tuple[list[str], str]:
    """What a stream holds since `token`, and the next one."""
    found = list[str]()
    while True:
        more = {"nextToken": token} if token else {}
        got = logs.get_log_events(
            logGroupName=group, logStreamName=stream, startFromHead=True, **more
        )
        found += [event["message"] for event in got["events"]]
        if got["nextForwardToken"] == token:
            return found, token
        token = got["nextForwardToken"]
