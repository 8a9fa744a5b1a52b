"""SageMaker's API for pipelines over HTTP, as far as we ask it: pipelines with versions, executions
that run (sagemaker.py), are listed, looked at, stopped and tried again.

Every request is held against botocore's model: unknown and missing members, types, lengths,
patterns. A definition has to be one, bundles that it names have to be in S3 when it starts, an
execution with the token of another is that one. `faults` are answered in place of, or after, the
next call that they fit; what is refused stands in `refused`."""

from __future__ import annotations

import collections
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

from tests.servers.sagemaker import Pipelines
from tests.servers.sagemaker_container import Failed

ACCOUNT, REGION = "123456789012", "eu-central-1"
_MODEL = botocore.session.get_session().get_service_model("sagemaker")
_BUNDLE = re.compile(r's3://([a-z0-9.-]+)/([^"]*bundles/[0-9a-f]{32})')


@dataclasses.dataclass
class Fault:
    """`call` is an operation, such as `StartPipelineExecution`; `status` 0 breaks the connection;
    `after` lets the call take effect first."""

    call: str
    status: int
    code: str = "InternalFailure"
    after: bool = False


class Refused(Exception):
    def __init__(self, code: str, message: str) -> None:
        self.code, self.message = code, message


@dataclasses.dataclass
class Run:
    """An execution: what it runs, and how far it is."""

    arn: str
    pipeline: str
    name: str
    version: int
    status: str = "Executing"
    reason: str = ""
    began: float = dataclasses.field(default_factory=time.time)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    thread: threading.Thread | None = None


class Account:
    """An account in one region. With `service`, executions really run."""

    def __init__(self, s3: Any, service: Pipelines | None = None) -> None:
        self.s3, self.service = s3, service
        self.pipelines: dict[str, list[dict[str, Any]]] = {}  # versions, the oldest first
        self.runs: dict[str, Run] = {}
        self.tokens: dict[str, str] = {}
        self.faults: list[Fault] = []
        self.refused: list[str] = []
        self.calls: collections.Counter[str] = collections.Counter()
        self.lock = threading.Lock()
        self.operations: dict[str, Callable[..., dict[str, Any]]] = {
            "CreatePipeline": self.create, "UpdatePipeline": self.update,
            "DescribePipeline": self.describe, "ListPipelineVersions": self.versions,
            "StartPipelineExecution": self.start, "ListPipelineExecutions": self.list,
            "DescribePipelineExecution": self.describe_run, "StopPipelineExecution": self.stop,
            "ListPipelineExecutionSteps": self.list_steps, "DeletePipeline": self.delete,
        }  # fmt: skip

    def answer(self, call: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """HTTP's status and the answer; ConnectionError where there shall be none."""
        with self.lock:
            self.calls[call] += 1
            fault = next((f for f in self.faults if f.call == call), None)
            if fault:
                self.faults.remove(fault)
            try:
                if not fault or fault.after:
                    found = self.done(call, body)
            except Refused as error:
                self.refused.append(f"{call}: {error.message}")
                return 400, {"__type": error.code, "message": error.message}
            if not fault:
                return 200, found
            if fault.status == 0:
                raise ConnectionError
            return fault.status, {"__type": fault.code, "message": "as the test wants it"}

    def done(self, call: str, body: dict[str, Any]) -> dict[str, Any]:
        if call not in self.operations:
            raise Refused("UnknownOperationException", call)
        shape = _MODEL.operation_model(call).input_shape
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
        self, PipelineName: str, ClientRequestToken: str, PipelineVersionId: int,
        PipelineExecutionDisplayName: str, PipelineParameters: Any = (),
    ) -> dict[str, Any]:  # fmt: skip
        if known := self.tokens.get(ClientRequestToken):
            return {"PipelineExecutionArn": known}
        text = self.pipeline(PipelineName)[PipelineVersionId - 1]["PipelineDefinition"]
        for bucket, prefix in sorted(set(_BUNDLE.findall(text))):
            listed = self.s3.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/entry.py")
            if not listed["KeyCount"]:
                raise Refused("ValidationException", f"nothing is in s3://{bucket}/{prefix}")
        arn = f"{_arn(PipelineName)}/execution/{len(self.runs):012d}"
        run = Run(arn, PipelineName, PipelineExecutionDisplayName, PipelineVersionId)
        self.runs[arn] = self.runs.get(arn, run)
        self.tokens[ClientRequestToken] = arn
        if self.service:
            given = {one["Name"]: one["Value"] for one in PipelineParameters}
            run.thread = threading.Thread(target=self.execute, args=(run, json.loads(text), given))
            run.thread.start()
        return {"PipelineExecutionArn": arn}

    def execute(self, run: Run, definition: dict[str, Any], given: dict[str, Any]) -> None:
        assert self.service is not None
        try:
            execution = self.service.execute(definition, **given)
        except Failed as error:
            run.status, run.reason = "Failed", str(error)[:1024]
            return
        run.steps = [
            {"StepName": name, "StepStatus": "Succeeded", "StartTime": run.began, "EndTime": run.began}
            for name in execution.jobs
        ]  # fmt: skip
        run.status = "Succeeded"

    def list(
        self, PipelineName: str, SortBy: str, SortOrder: str, MaxResults: int = 10,
        NextToken: str = "0",
    ) -> dict[str, Any]:  # fmt: skip
        self.pipeline(PipelineName)
        assert (SortBy, SortOrder) == ("CreationTime", "Descending")
        found = [run for run in self.runs.values() if run.pipeline == PipelineName][::-1]
        begin = int(NextToken)
        summaries = [
            {"PipelineExecutionArn": run.arn, "PipelineExecutionDisplayName": run.name}
            for run in found[begin : begin + MaxResults]
        ]
        more = {"NextToken": str(begin + MaxResults)} if begin + MaxResults < len(found) else {}
        return {"PipelineExecutionSummaries": summaries, **more}

    def describe_run(self, PipelineExecutionArn: str) -> dict[str, Any]:
        run = self.run(PipelineExecutionArn)
        return {
            "PipelineExecutionArn": run.arn, "PipelineExecutionStatus": run.status,
            "PipelineExecutionDisplayName": run.name, "PipelineVersionId": run.version,
            "CreationTime": run.began, **({"FailureReason": run.reason} if run.reason else {}),
        }  # fmt: skip

    def stop(self, PipelineExecutionArn: str, ClientRequestToken: str) -> dict[str, Any]:
        run = self.run(PipelineExecutionArn)
        if run.status != "Executing":
            raise Refused("ValidationException", f"{run.arn} is {run.status}")
        run.status = "Stopped"
        return {"PipelineExecutionArn": run.arn}

    def list_steps(self, PipelineExecutionArn: str, **_: Any) -> dict[str, Any]:
        return {"PipelineExecutionSteps": self.run(PipelineExecutionArn).steps}

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
            assert service == "SageMaker"
            assert f"/{REGION}/sagemaker/" in self.headers["Authorization"], "signed for elsewhere"
            try:
                status, found = account.answer(call, body)
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
    elif shape.type_name == "string":
        least, most = shape.metadata.get("min", 0), shape.metadata.get("max", len(value))
        if not least <= len(value) <= most:
            yield f"{path}: {len(value)} characters, not {least} to {most}"
        if not re.fullmatch(shape.metadata.get("pattern", ".*"), value, re.DOTALL):
            yield f"{path}: {value[:80]!r} does not fit"
        if shape.enum and value not in shape.enum:
            yield f"{path}: {value!r} is none of {shape.enum}"
