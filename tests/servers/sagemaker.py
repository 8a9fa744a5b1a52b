"""SageMaker Pipelines, as far as a definition needs it: executes the definition against the container
contract, with real processes.

Every Processing job gets a /opt/ml of its own (a mount in a namespace of its own), its inputs from
S3 (a moto_server), the service's config files, its environment and nothing else, and its outputs go
back to S3. Parameters, `Get`, `Std:Join`, `Std:JsonGet` on property files, conditions, DependsOn and
caching by the service's own key are what the documentation says of them. What it does not know it
refuses: a definition that runs here uses nothing else."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_GET = re.compile(
    r"Steps\.([\w-]+)\.ProcessingOutputConfig\.Outputs\['([\w-]+)'\]\.S3Output\.S3Uri"
)
_FILE = re.compile(r"Steps\.([\w-]+)\.PropertyFiles\.([\w-]+)")
_PATH = re.compile(r"\['([^']+)'\]|\.?([^.\[\]]+)")
_COMPARE = {
    "Equals": lambda a, b: a == b,
    "LessThan": lambda a, b: a < b,
    "LessThanOrEqualTo": lambda a, b: a <= b,
    "GreaterThan": lambda a, b: a > b,
    "GreaterThanOrEqualTo": lambda a, b: a >= b,
}


class Failed(Exception):
    """A step failed; the text is the job's exit message, then the end of its log."""


@dataclasses.dataclass
class Job:
    """One job that ran, or was taken from the cache."""

    step: str
    outputs: dict[str, str]
    property_files: dict[str, str]
    cached: bool
    log: str = ""


@dataclasses.dataclass
class Execution:
    """What came of one execution of a pipeline."""

    identifier: str
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    conditions: dict[str, bool] = dataclasses.field(default_factory=dict)

    def result(self, step: str, s3: Any) -> dict[str, Any]:
        """result.json of a step."""
        return json.loads(_read(s3, f"{self.jobs[step].outputs['rekindle-result']}/result.json"))


class Pipelines:
    """The service: a cache that outlives executions, and the store."""

    def __init__(self, s3: Any, folder: Path) -> None:
        self.s3, self.folder = s3, folder
        self.cache: dict[str, Job] = {}

    def execute(self, definition: Mapping[str, Any], **parameters: Any) -> Execution:
        """Run `definition` to its end; Failed with the first step's message."""
        assert definition["Version"] == "2020-12-01"
        known = {p["Name"]: p for p in definition["Parameters"]}
        assert parameters.keys() <= known.keys(), "an unknown parameter"
        values = {name: parameters.get(name, p["DefaultValue"]) for name, p in known.items()}
        for name, value in values.items():
            kinds = {"String": str, "Integer": int, "Float": (int, float), "Boolean": bool}
            assert isinstance(value, kinds[known[name]["Type"]]), name
        run = _Run(self, Execution(uuid.uuid4().hex[:12]), values)
        names = [step["Name"] for step in _every(definition["Steps"])]
        assert len(set(names)) == len(names), "two steps of one name"
        run.steps(definition["Steps"])
        return run.execution


def holds_all(
    service: Pipelines,
    execution: Execution,
    values: dict[str, Any],
    conditions: list[dict[str, Any]],
) -> bool:
    """Whether a Condition step with these conditions takes its first branch."""
    run = _Run(service, execution, values)
    return all(run.holds(one) for one in conditions)


def _every(steps: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for step in steps:
        yield step
        if step["Type"] == "Condition":
            yield from _every(step["Arguments"]["IfSteps"])
            yield from _every(step["Arguments"]["ElseSteps"])


class _Run:
    def __init__(self, service: Pipelines, execution: Execution, values: dict[str, Any]) -> None:
        self.service, self.execution, self.values = service, execution, values
        self.ended: set[str] = set()

    def steps(self, steps: list[dict[str, Any]]) -> None:
        """Run what is ready until all are done."""
        waiting = list(steps)
        while waiting:
            ready = [step for step in waiting if self.needs(step) <= self.ended]
            if not ready:
                raise Failed(f"these wait for ever: {[step['Name'] for step in waiting]}")
            step = ready[0]
            waiting.remove(step)
            if step["Type"] == "Condition":
                self.condition(step)
            elif step["Type"] == "Processing":
                self.processing(step)
            else:
                raise Failed(f"unknown type {step['Type']}")
            self.ended.add(step["Name"])

    def needs(self, step: dict[str, Any]) -> set[str]:
        """The steps that have to be done before: named by DependsOn, or read."""
        shallow = dict(step)
        if step["Type"] == "Condition":
            shallow["Arguments"] = {"Conditions": step["Arguments"]["Conditions"]}
        text = json.dumps(shallow)
        return {*step.get("DependsOn", []), *re.findall(r"Steps\.([\w-]+)\.", text)}

    def condition(self, step: dict[str, Any]) -> None:
        arguments = step["Arguments"]
        holds = all(self.holds(one) for one in arguments["Conditions"])
        self.execution.conditions[step["Name"]] = holds
        self.steps(arguments["IfSteps" if holds else "ElseSteps"])

    def holds(self, condition: dict[str, Any]) -> bool:
        kind = condition["Type"]
        if kind == "Not":
            return not self.holds(condition["Condition"])
        if kind == "Or":
            return any(map(self.holds, condition["Conditions"]))
        left, right = (self.value(condition[side]) for side in ("LeftValue", "RightValue"))
        return bool(_COMPARE[kind](left, right))

    def value(self, raw: Any) -> Any:
        """What a property reference stands for."""
        if isinstance(raw, list):
            return [self.value(item) for item in raw]
        if not isinstance(raw, dict):
            return raw
        match raw:
            case {"Get": "Execution.PipelineExecutionId"}:
                return self.execution.identifier
            case {"Get": str(path)} if path.startswith("Parameters."):
                return self.values[path.removeprefix("Parameters.")]
            case {"Get": str(path)} if match := _GET.fullmatch(path):
                return self.execution.jobs[match[1]].outputs[match[2]]
            case {"Std:Join": {"On": on, "Values": values}}:
                return on.join(_text(self.value(value)) for value in values)
            case {"Std:JsonGet": {"PropertyFile": {"Get": path}, "Path": where}}:
                match = _FILE.fullmatch(path)
                assert match, path
                found = json.loads(
                    _read(self.service.s3, self.execution.jobs[match[1]].property_files[match[2]])
                )
                for quoted, plain in _PATH.findall(where):
                    found = found[quoted or plain]
                return found
        return {key: self.value(item) for key, item in raw.items()}

    def processing(self, step: dict[str, Any]) -> None:
        job = self.value(step["Arguments"])
        inputs = {i["InputName"]: i["S3Input"] for i in job.get("ProcessingInputs", [])}
        key = json.dumps([job["AppSpecification"], job.get("Environment"), inputs], sort_keys=True)
        if step.get("CacheConfig", {}).get("Enabled") and key in self.service.cache:
            self.execution.jobs[step["Name"]] = dataclasses.replace(
                self.service.cache[key], cached=True
            )
            return
        done = self.run_container(step, job, inputs)
        self.execution.jobs[step["Name"]] = done
        self.service.cache[key] = done

    def run_container(
        self, step: dict[str, Any], job: dict[str, Any], inputs: dict[str, Any]
    ) -> Job:
        name = f"pipelines-{self.execution.identifier}-{step['Name'][:20]}-{uuid.uuid4().hex[:6]}"
        root = self.service.folder / name
        for place in (_inside(root, i["LocalPath"]) for i in inputs.values()):
            place.mkdir(parents=True)
        for given in inputs.values():
            _download(self.service.s3, given["S3Uri"], _inside(root, given["LocalPath"]))
        outputs = {o["OutputName"]: o["S3Output"] for o in job["ProcessingOutputConfig"]["Outputs"]}
        asked = len(job["ProcessingOutputConfig"]["Outputs"]), len(job.get("ProcessingInputs", []))
        assert asked == (len(outputs), len(inputs)), "two inputs or outputs of one name"
        for made in outputs.values():
            _inside(root, made["LocalPath"]).mkdir(parents=True)
        (root / "config").mkdir()
        config = {"ProcessingJobName": name, **job}
        (root / "config" / "processingjobconfig.json").write_text(json.dumps(config))
        hosts = {"current_host": "algo-1", "hosts": ["algo-1"]}
        (root / "config" / "resourceconfig.json").write_text(json.dumps(hosts))
        application = job["AppSpecification"]
        words = [*application["ContainerEntrypoint"], *application.get("ContainerArguments", [])]
        words = [sys.executable if word == "python3" else word for word in words]
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", _MOUNT, str(root), *words],
            env={"PATH": "/usr/bin:/bin", **job.get("Environment", {})},
            cwd=root, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        log = done.stdout + done.stderr
        if done.returncode:
            message = root / "output" / "message"
            told = message.read_text() if message.exists() else f"exit code {done.returncode}"
            raise Failed(f"{step['Name']}: {told}\n{log[-2000:]}")
        for made in outputs.values():
            _upload(self.service.s3, _inside(root, made["LocalPath"]), made["S3Uri"])
        files = {
            f["PropertyFileName"]: f"{outputs[f['OutputName']]['S3Uri']}/{f['FilePath']}"
            for f in step.get("PropertyFiles", [])
        }
        return Job(step["Name"], {n: o["S3Uri"] for n, o in outputs.items()}, files, False, log)


# a /opt/ml and a scratch folder that no other job sees
_MOUNT = (
    'mkdir -p /opt/ml /tmp/rekindle && mount --bind "$0" /opt/ml && '
    'mount -t tmpfs tmpfs /tmp/rekindle && exec "$@"'
)


def _inside(root: Path, path: str) -> Path:
    assert path.startswith("/opt/ml/"), path
    return root / path.removeprefix("/opt/ml/")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _split(uri: str) -> tuple[str, str]:
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def _read(s3: Any, uri: str) -> bytes:
    bucket, key = _split(uri)
    content: bytes = s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def _download(s3: Any, uri: str, folder: Path) -> None:
    bucket, key = _split(uri)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key)
    found = [item["Key"] for page in pages for item in page.get("Contents", [])]
    assert found, f"nothing at {uri}"
    for name in found:
        relative = name.removeprefix(key).lstrip("/") or Path(name).name
        (folder / relative).parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(bucket, name, str(folder / relative))


def _upload(s3: Any, folder: Path, uri: str) -> None:
    bucket, key = _split(uri)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        s3.upload_file(str(path), bucket, f"{key}/{path.relative_to(folder).as_posix()}")
