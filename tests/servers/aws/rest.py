"""SageMaker's API for pipelines over HTTP, as far as we ask it: pipelines with versions, executions
that run (sagemaker.py), are listed, looked at, stopped and tried again.

Every request is held against botocore's model: unknown and missing members, types, lengths,
patterns. A definition has to be one, bundles that it names have to be in S3 when it starts, an
execution with the token of another is that one. `faults` are answered in place of, or after, the
next call that they fit; what is refused stands in `refused`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

from tests.servers.aws.container import Failed
from tests.servers.aws.sagemaker import Execution, Pipelines, Turn
from tests.servers.troubles import Broken, Troubled

ACCOUNT, REGION = "123456789012", "eu-central-1"
_MODELS = {
    target: botocore.session.get_session().get_service_model(name)
    for target, name in {
        "SageMaker": "sagemaker",
        "Logs_20140328": "logs",
        "GraniteServiceVersion20100801": "cloudwatch",
    }.items()
}
_PAGE = 3  # steps and lines that one answer holds at most, so that pages are asked for
_BUNDLE = re.compile(r's3://([a-z0-9.-]+)/([^"]*bundles/[0-9a-f]{32})')


class Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message


@dataclasses.dataclass
class Run:
    """An execution: what it runs, and how far it is."""

    arn: str
    pipeline: str
    name: str
    description: str
    version: int
    status: str = "Executing"
    reason: str = ""
    began: float = dataclasses.field(default_factory=time.time)
    ended: float = 0.0
    execution: Execution = dataclasses.field(default_factory=Execution)
    thread: threading.Thread | None = None


class Account(Troubled):
    """An account in one region. With `service`, executions really run."""

    def __init__(self, s3: Any, service: Pipelines | None = None) -> None:
        self.s3, self.service = s3, service
        self.pipelines: dict[str, list[dict[str, Any]]] = {}  # versions, the oldest first
        self.runs: dict[str, Run] = {}
        self.tokens: dict[str, str] = {}
        super().__init__()
        self.operations: dict[str, Callable[..., dict[str, Any]]] = {
            "CreatePipeline": self.create,
            "UpdatePipeline": self.update,
            "DescribePipeline": self.describe,
            "ListPipelineVersions": self.versions,
            "StartPipelineExecution": self.start,
            "ListPipelineExecutions": self.list,
            "DescribePipelineExecution": self.describe_run,
            "StopPipelineExecution": self.stop,
            "ListPipelineExecutionSteps": self.list_steps,
            "RetryPipelineExecution": self.retry,
            "DescribeProcessingJob": self.describe_processing,
            "DescribeTrainingJob": self.describe_training,
            "ListTrainingJobs": self.list_training,
            "DescribeLogStreams": self.log_streams,
            "GetLogEvents": self.log_events,
            "DeletePipeline": self.delete,
        }

    def answer(self, target: str, call: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP's status and the answer; ConnectionError where there shall be none."""
        try:
            return 200, self.met(call, lambda: self.done(target, call, body))
        except Refused as error:
            self.refused.append(f"{call}: {error.message}")
            return 400, {"__type": error.code, "message": error.message}
        except Broken as broken:
            fault = broken.fault
            if broken.dropped():
                raise ConnectionError from None
            return fault.status, {"__type": fault.code, "message": "as the test wants it"}

    def done(self, target: str, call: str, body: dict[str, Any]) -> dict[str, Any]:
        if call not in self.operations:
            raise Refused("UnknownOperationException", call)
        shape = _MODELS[target].operation_model(call).input_shape
        report = ParamValidator().validate(body, shape)
        problems = [report.generate_report()] if report.has_errors() else []
        if problems := [*problems, *_beyond(body, shape, call)]:
            raise Refused("ValidationException", "; ".join(problems))
        return self.operations[call](**body)

    def create(self, PipelineName: str, **more: Any) -> dict[str, Any]:
        if self.pipelines.get(PipelineName):
            known = self.pipelines[PipelineName][0]
            if known["ClientRequestToken"] == more["ClientRequestToken"]:
                return {"PipelineArn": _arn(PipelineName)}
            raise Refused("ConflictException", f"{PipelineName} exists")
        _checked(more["PipelineDefinition"])
        self.pipelines[PipelineName] = [more]
        return {"PipelineArn": _arn(PipelineName)}

    def update(self, PipelineName: str, **more: Any) -> dict[str, Any]:
        versions = self.pipeline(PipelineName)
        _checked(more["PipelineDefinition"])
        versions.append({**versions[-1], **more})
        return {"PipelineArn": _arn(PipelineName), "PipelineVersionId": len(versions)}

    def describe(self, PipelineName: str, PipelineVersionId: int = 0) -> dict[str, Any]:
        found = self.pipeline(PipelineName)[PipelineVersionId - 1]
        kept = ("PipelineDefinition", "RoleArn")
        arn = {"PipelineName": PipelineName, "PipelineArn": _arn(PipelineName)}
        return {**arn, **{name: found[name] for name in kept}}

    def delete(self, PipelineName: str, ClientRequestToken: str) -> dict[str, Any]:
        self.pipeline(PipelineName)
        if any(
            run.status == "Executing" for run in self.runs.values() if run.pipeline == PipelineName
        ):
            raise Refused("ConflictException", f"{PipelineName} has runs that go on")
        del self.pipelines[PipelineName]
        return {"PipelineArn": _arn(PipelineName)}

    def versions(self, PipelineName: str, SortOrder: str, MaxResults: int) -> dict[str, Any]:
        count = len(self.pipeline(PipelineName))
        numbers = range(count, 0, -1) if SortOrder == "Descending" else range(1, count + 1)
        listed = [{"PipelineVersionId": number} for number in numbers]
        return {"PipelineVersionSummaries": listed[:MaxResults]}

    def start(
        self,
        PipelineName: str,
        ClientRequestToken: str,
        PipelineVersionId: int,
        PipelineExecutionDisplayName: str,
        PipelineExecutionDescription: str,
        PipelineParameters: Any = (),
    ) -> dict[str, Any]:
        if known := self.tokens.get(ClientRequestToken):
            return {"PipelineExecutionArn": known}
        text = self.pipeline(PipelineName)[PipelineVersionId - 1]["PipelineDefinition"]
        for bucket, prefix in sorted(set(_BUNDLE.findall(text))):
            listed = self.s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/entry.py")
            if not listed["KeyCount"]:
                raise Refused("ValidationException", f"nothing is in s3://{bucket}/{prefix}")
        arn = f"{_arn(PipelineName)}/execution/{len(self.runs):012d}"
        run = Run(
            arn,
            PipelineName,
            PipelineExecutionDisplayName,
            PipelineExecutionDescription,
            PipelineVersionId,
        )
        self.runs[arn] = self.runs.get(arn, run)
        self.tokens[ClientRequestToken] = arn
        given = {one["Name"]: one["Value"] for one in PipelineParameters}
        self.go_on(run, json.loads(text), given)
        return {"PipelineExecutionArn": arn}

    def go_on(self, run: Run, definition: dict[str, Any], given: dict[str, Any]) -> None:
        if self.service:
            run.thread = threading.Thread(target=self.execute, args=(run, definition, given))
            run.thread.start()

    def execute(self, run: Run, definition: dict[str, Any], given: dict[str, Any]) -> None:
        assert self.service is not None
        try:
            self.service.execute(definition, run.execution, **given)
            run.status = "Succeeded"
        except Failed:
            stopped = run.execution.stopping.is_set()
            run.status = "Stopped" if stopped else "Failed"
            run.reason = "" if stopped else "Step failure: One or multiple steps failed."
        except Exception as error:  # nobody waits for ever for what this cannot play
            run.status, run.reason = "Failed", f"{type(error).__name__}: {error}"
            raise
        run.ended = time.time()

    def list(
        self,
        PipelineName: str,
        SortBy: str,
        SortOrder: str,
        MaxResults: int = 10,
        NextToken: str = "0",
    ) -> dict[str, Any]:
        self.pipeline(PipelineName)
        assert SortBy == "CreationTime"
        found = [run for run in self.runs.values() if run.pipeline == PipelineName]
        found = found[:: -1 if SortOrder == "Descending" else 1]
        begin = int(NextToken)
        summaries = [
            {
                "PipelineExecutionArn": run.arn,
                "PipelineExecutionDisplayName": run.name,
                "PipelineExecutionDescription": run.description,
                "StartTime": run.began,
            }
            for run in found[begin : begin + MaxResults]
        ]
        more = {"NextToken": str(begin + MaxResults)} if begin + MaxResults < len(found) else {}
        return {"PipelineExecutionSummaries": summaries, **more}

    def describe_run(self, PipelineExecutionArn: str) -> dict[str, Any]:
        run = self.run(PipelineExecutionArn)
        return {
            "PipelineExecutionArn": run.arn,
            "PipelineExecutionStatus": run.status,
            "PipelineExecutionDisplayName": run.name,
            "PipelineVersionId": run.version,
            "CreationTime": run.began,
            "LastModifiedTime": run.ended or time.time(),
            **({"FailureReason": run.reason} if run.reason else {}),
        }

    def stop(self, PipelineExecutionArn: str, ClientRequestToken: str) -> dict[str, Any]:
        run = self.run(PipelineExecutionArn)
        if run.status != "Executing":
            raise Refused("ValidationException", f"{run.arn} is {run.status}")
        run.execution.stopping.set()
        run.status = "Stopping" if run.thread and run.thread.is_alive() else "Stopped"
        return {"PipelineExecutionArn": run.arn}

    def retry(self, PipelineExecutionArn: str, ClientRequestToken: str) -> dict[str, Any]:
        run = self.run(PipelineExecutionArn)
        if self.tokens.get(ClientRequestToken) == run.arn:
            return {"PipelineExecutionArn": run.arn}
        if run.status not in ("Failed", "Stopped"):
            raise Refused("ValidationException", f"{run.arn} is {run.status}")
        self.tokens[ClientRequestToken] = run.arn
        run.status, run.reason = "Executing", ""
        run.execution.stopping.clear()
        text = self.pipelines[run.pipeline][run.version - 1]["PipelineDefinition"]
        self.go_on(run, json.loads(text), {})
        return {"PipelineExecutionArn": run.arn}

    def list_steps(
        self, PipelineExecutionArn: str, SortOrder: str, NextToken: str = "0"
    ) -> dict[str, Any]:
        assert SortOrder == "Ascending"
        turns = [*self.run(PipelineExecutionArn).execution.turns.values()]
        begin = int(NextToken)
        shown = [_step(turn) for turn in turns[begin : begin + _PAGE]]
        more = {"NextToken": str(begin + _PAGE)} if begin + _PAGE < len(turns) else {}
        return {"PipelineExecutionSteps": shown, **more}

    def describe_processing(self, ProcessingJobName: str) -> dict[str, Any]:
        return {"ProcessingJobName": ProcessingJobName, **self.turn(ProcessingJobName).request}

    def describe_training(self, TrainingJobName: str) -> dict[str, Any]:
        turn = self.turn(TrainingJobName)
        transitions = [
            {"Status": "Interrupted", "StartTime": turn.began} for _ in turn.attempts[1:]
        ]
        request = {"TrainingJobName": TrainingJobName, **turn.request}
        if turn.ended:  # API_DescribeTrainingJob: the savings of spot are 1 - billable / training
            seconds = max(1, round(turn.ended - turn.began))
            spot = turn.request.get("EnableManagedSpotTraining")
            billable = max(1, round(seconds * 0.3)) if spot else seconds
            request |= {"TrainingTimeInSeconds": seconds, "BillableTimeInSeconds": billable}
        return {**request, "SecondaryStatusTransitions": transitions}

    def list_training(self, NameContains: str, NextToken: str = "0") -> dict[str, Any]:
        """API_ListTrainingJobs, two a page."""
        found = [t for t in self.turns() if NameContains in t.job and t.kind == "Training"]
        begin, arn = int(NextToken), f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job"
        more = {"NextToken": str(begin + 2)} if begin + 2 < len(found) else {}
        shown = [
            {
                "TrainingJobName": turn.job,
                "TrainingJobArn": f"{arn}/{turn.job}",
                "CreationTime": turn.began,
                "TrainingJobStatus": "Completed",
            }
            for turn in found[begin : begin + 2]
        ]
        return {"TrainingJobSummaries": shown, **more}

    def log_streams(
        self, logGroupName: str, logStreamNamePrefix: str, limit: int
    ) -> dict[str, Any]:
        found = sorted(self.streams(logGroupName, logStreamNamePrefix.rstrip("/")))
        if not found:
            raise Refused("ResourceNotFoundException", "The specified log group does not exist.")
        return {"logStreams": [{"logStreamName": name} for name in found[:limit]]}

    def log_events(
        self,
        logGroupName: str,
        logStreamName: str,
        startFromHead: bool = False,
        nextToken: str = "f/0",
    ) -> dict[str, Any]:
        """As many lines as fit; the same token again where there are no more."""
        if not startFromHead:  # API_GetLogEvents: with a forward token, too
            raise Refused("InvalidParameterException", "startFromHead must be true")
        streams = self.streams(logGroupName, logStreamName.partition("/")[0])
        begin = int(nextToken.removeprefix("f/"))
        lines = streams[logStreamName].splitlines()[begin : begin + _PAGE]
        now = int(time.time() * 1000)
        return {
            "events": [{"message": line, "timestamp": now} for line in lines],
            "nextForwardToken": f"f/{begin + len(lines)}",
            "nextBackwardToken": f"b/{begin}",
        }

    def streams(self, group: str, job: str) -> dict[str, str]:
        """What the machines of a job printed so far, by the names of their streams."""
        try:
            turn = self.turn(job)
        except Refused:
            return {}
        assert group == f"/aws/sagemaker/{turn.kind}Jobs"
        return {
            f"{job}/{host.name}-{int(turn.began)}{number}": host.log
            for number, hosts in enumerate(turn.attempts)
            for host in hosts
        }

    def turns(self) -> list[Turn]:
        """Of all executions, also those that another one followed."""
        of = (run.execution for run in self.runs.values())
        return [turn for one in of for turn in (*one.before, *one.turns.values())]

    def turn(self, job: str) -> Turn:
        found = [turn for turn in self.turns() if turn.job == job]
        if not found:
            raise Refused("ValidationException", f"Could not find requested job {job}")
        return found[0]

    def pipeline(self, name: str) -> list[dict[str, Any]]:
        if name not in self.pipelines:
            raise Refused("ResourceNotFound", f"there is no pipeline {name}")
        return self.pipelines[name]

    def run(self, arn: str) -> Run:
        if arn not in self.runs:
            raise Refused("ResourceNotFound", f"there is no execution {arn}")
        return self.runs[arn]


@contextlib.contextmanager
def serving(account: Account) -> Iterator[str]:
    """The URL of a server that answers for the account."""

    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
            service, _, call = self.headers["X-Amz-Target"].partition(".")
            scope = {"SageMaker": "sagemaker", "Logs_20140328": "logs"}[service]
            assert f"/{REGION}/{scope}/" in self.headers["Authorization"], "signed for elsewhere"
            try:
                status, found = account.answer(service, call, body)
            except ConnectionError:
                self.close_connection = True
                return
            content = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
    for run in account.runs.values():
        if run.thread:
            run.thread.join()


def _arn(pipeline: str) -> str:
    return f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:pipeline/{pipeline}"


def _step(turn: Turn) -> dict[str, Any]:
    """As ListPipelineExecutionSteps has it."""
    found: dict[str, Any] = {
        "StepName": turn.step,
        "StepStatus": turn.status,
        "StartTime": turn.began,
        "AttemptCount": 1,
    }
    metadata: dict[str, Any] = {"Condition": {}} if turn.kind == "Condition" else {}
    if turn.job:
        arn = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:{turn.kind.lower()}-job/{turn.job}"
        metadata = {f"{turn.kind}Job": {"Arn": arn}}
    if turn.cached:
        found["CacheHitResult"] = {"SourcePipelineExecutionArn": _arn("before")}
    if turn.ended:
        found["EndTime"] = turn.ended
    if turn.reason:
        found["FailureReason"] = turn.reason
    return {**found, "Metadata": metadata}


def _checked(definition: str) -> None:
    try:
        assert json.loads(definition)["Version"] == "2020-12-01"
    except (ValueError, KeyError, AssertionError) as error:
        raise Refused("ValidationException", f"no definition: {error!r}") from error


def _beyond(value: Any, shape: Any, path: str) -> Iterator[str]:
    """Lengths and patterns, which botocore knows and does not look at."""
    if shape.type_name == "structure":
        for name, member in shape.members.items():
            if name in value:
                yield from _beyond(value[name], member, f"{path}.{name}")
    elif shape.type_name == "list":
        for i, item in enumerate(value):
            yield from _beyond(item, shape.member, f"{path}[{i}]")
    elif shape.type_name == "map":
        for key, item in value.items():
            yield from _beyond(key, shape.key, f"{path}: {key}")
            yield from _beyond(item, shape.value, f"{path}.{key}")
    elif shape.type_name == "string":
        yield from _beyond_text(value, shape, path)


def _beyond_text(value: str, shape: Any, path: str) -> Iterator[str]:
    least, most = shape.metadata.get("min", 0), shape.metadata.get("max", len(value))
    if not least <= len(value) <= most:
        yield f"{path}: {len(value)} characters, not {least} to {most}"
    # classes of Unicode, and a quantifier of `$` that Java lets pass
    pattern = re.sub(r"\$\{\d+,\d+\}$", "", shape.metadata.get("pattern", ".*"))
    pattern = re.sub(r"\\p\{[SP]\}", r"!-/:-@\\[-`{-~", pattern)
    pattern = re.sub(r"\\p\{\w+\}", r"\\w\\s", pattern)
    if not re.fullmatch(pattern, value, re.DOTALL):
        yield f"{path}: {value[:80]!r} does not fit"
    if shape.enum and value not in shape.enum:
        yield f"{path}: {value!r} is not in {shape.enum}"
