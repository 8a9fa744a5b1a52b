"""SageMaker Pipelines, as far as a definition needs it: executes the definition against the container
contract (container.py), with real processes.

Processing and Training jobs get their inputs from S3 (a moto_server), the service's config files,
their environment, and their outputs go back to S3. Hosts of a Training job run side by side; on spot
machines they are taken away when a test says so (SIGTERM, 120 s, SIGKILL) and started again from
nothing. Parameters, `Get`, `Std:Join`, `Std:JsonGet` on property files, conditions, DependsOn,
and caching by the service's own key are what the documentation says of them. What it
does not know it refuses: a definition that runs here uses nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import re
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.servers.aws.container import Failed, Host, download, inside, read, start, upload, wait

_GET = re.compile(
    r"Steps\.([\w-]+)\.ProcessingOutputConfig\.Outputs\['([\w-]+)'\]\.S3Output\.S3Uri"
)
_PROPERTY = re.compile(r"Steps\.([\w-]+)\.(TrainingJobName|OutputDataConfig\.S3OutputPath)")
_FILE = re.compile(r"Steps\.([\w-]+)\.PropertyFiles\.([\w-]+)")
_PATH = re.compile(r"\['([^']+)'\]|\.?([^.\[\]]+)")
_COMPARE = {
    "Equals": lambda a, b: a == b,
    "LessThan": lambda a, b: a < b,
    "LessThanOrEqualTo": lambda a, b: a <= b,
    "GreaterThan": lambda a, b: a > b,
    "GreaterThanOrEqualTo": lambda a, b: a >= b,
}


@dataclasses.dataclass
class Job:
    """One job that ran, or was taken from the cache."""

    step: str
    outputs: dict[str, str]
    property_files: dict[str, str]
    cached: bool
    log: str = ""
    properties: dict[str, str] = dataclasses.field(default_factory=dict)
    statuses: list[str] = dataclasses.field(default_factory=list)
    name: str = ""


@dataclasses.dataclass
class Turn:
    """One step of an execution as it goes on. `job` is its job's name, `request` what that was asked
    for, `attempts` the machines of each."""

    step: str
    kind: str
    began: float = dataclasses.field(default_factory=time.time)
    ended: float = 0.0
    status: str = "Executing"
    reason: str = ""
    cached: bool = False
    job: str = ""
    request: dict[str, Any] = dataclasses.field(default_factory=dict)
    attempts: list[list[Host]] = dataclasses.field(default_factory=list)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One training job of all tests that run at once: torch's store listens at the job's port on all
    addresses of the machine, which no other job can then have on its own."""
    with Path(tempfile.gettempdir(), "rekindle-played-training.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclasses.dataclass
class Execution:
    """What came of one execution of a pipeline so far. Whoever sets `stopping` has its jobs end."""

    identifier: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex[:12])
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    turns: dict[str, Turn] = dataclasses.field(default_factory=dict)
    before: list[Turn] = dataclasses.field(default_factory=list)  # of steps that were tried again
    stopping: threading.Event = dataclasses.field(default_factory=threading.Event)
    conditions: dict[str, bool] = dataclasses.field(default_factory=dict)

    def result(self, step: str, s3: Any) -> dict[str, Any]:
        """result.json of a step."""
        return json.loads(read(s3, f"{self.jobs[step].outputs['rekindle-result']}/result.json"))


class Pipelines:
    """The service: a cache that outlives executions, and the store. `environment` is what images
    and roles bring to every container; `taken_away` says, by step, when its spot machines go."""

    def __init__(self, s3: Any, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.s3, self.folder, self.environment = s3, folder, dict(environment or {})
        self.cache: dict[str, Job] = {}
        self.taken_away: dict[str, Callable[[], bool]] = {}

    def execute(
        self, definition: Mapping[str, Any], execution: Execution | None = None, **parameters: Any
    ) -> Execution:
        """Run `definition` to its end; Failed with the first step's message. An execution that ended
        so does again what did not succeed."""
        assert definition["Version"] == "2020-12-01"
        known = {p["Name"]: p for p in definition["Parameters"]}
        assert parameters.keys() <= known.keys(), "an unknown parameter"
        values = {name: parameters.get(name, p["DefaultValue"]) for name, p in known.items()}
        for name, value in values.items():
            kinds = {"String": str, "Integer": int, "Float": (int, float), "Boolean": bool}
            assert isinstance(value, kinds[known[name]["Type"]]), name
        run = _Run(self, execution or Execution(), values)
        names = [step["Name"] for step in _every(definition["Steps"])]
        assert len(set(names)) == len(names), "two steps of one name"
        run.steps(definition["Steps"])
        if run.failures:
            raise run.failures[0]
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
        for steps in ("IfSteps", "ElseSteps"):
            yield from _every(step["Arguments"].get(steps, []))


class _Run:
    def __init__(self, service: Pipelines, execution: Execution, values: dict[str, Any]) -> None:
        self.service, self.execution, self.values = service, execution, values
        self.ended: set[str] = set()
        self.failures: list[Failed] = []
        self.broken: set[str] = set()  # failed, or never begun because something before did
        self.job_name = ""  # that values are for

    def steps(self, steps: list[dict[str, Any]]) -> None:
        """Run what is ready until all are done; what is behind a failure does not begin, unless it
        waits for any end."""
        waiting = list(steps)
        while waiting:
            ready = [step for step in waiting if self.needs(step) <= self.ended | self.broken]
            if not ready:
                raise Failed(f"these wait for ever: {[step['Name'] for step in waiting]}")
            step = ready[0]
            waiting.remove(step)
            if self.needs(step, at_any_end=False) & self.broken:
                self.broken.add(step["Name"])
                continue
            try:
                self.step(step)
                self.ended.add(step["Name"])
            except Failed as failure:
                self.failures.append(failure)
                self.broken.add(step["Name"])

    def step(self, step: dict[str, Any]) -> None:
        run = {"Condition": self.condition, "Processing": self.job, "Training": self.job}
        assert step["Type"] in run, step["Type"]
        self.turn(step, run[step["Type"]])

    def turn(self, step: dict[str, Any], do: Callable[[dict[str, Any]], None]) -> None:
        """Do a step, and let everybody see how far it is."""
        if step["Name"] in self.execution.jobs:
            return  # it succeeded before
        turn = Turn(step["Name"], step["Type"])
        if turn.step in self.execution.turns:
            self.execution.before.append(self.execution.turns[turn.step])
        self.execution.turns[turn.step] = turn
        try:
            if self.execution.stopping.is_set():
                raise Failed("the execution was stopped")
            do(step)
            turn.status = "Succeeded"
        except Failed as error:
            turn.status = "Stopped" if self.execution.stopping.is_set() else "Failed"
            turn.reason = str(error).partition("\n")[0].removeprefix(f"{turn.step}: ")[:1024]
            raise
        finally:
            turn.ended = time.time()

    def needs(self, step: dict[str, Any], at_any_end: bool = True) -> set[str]:
        """The steps that have to be done before: named by DependsOn, or read."""
        waits = step.get("DependsOn", [])
        named = {wait for wait in waits if isinstance(wait, str)}
        if at_any_end:
            named |= {wait["Step"] for wait in waits if isinstance(wait, dict)}
            assert all(w["Trigger"] == "Any" for w in waits if isinstance(w, dict))
        shallow = dict(step)
        if step["Type"] == "Condition":
            shallow["Arguments"] = {"Conditions": step["Arguments"]["Conditions"]}
        text = json.dumps(shallow)
        return {*named, *re.findall(r"Steps\.([\w-]+)\.", text)}

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

    def here(self) -> dict[str, str]:
        """What is known of the execution and the job that values are for."""
        known = {
            "Execution.PipelineExecutionId": self.execution.identifier,
            "Execution.ProcessingJobName": self.job_name,
        }
        return {name: value for name, value in known.items() if value}

    def value(self, raw: Any) -> Any:
        """What a property reference stands for."""
        if isinstance(raw, list):
            return [self.value(item) for item in raw]
        if not isinstance(raw, dict):
            return raw
        match raw:
            case {"Get": str(path)} if path in (here := self.here()):
                return here[path]
            case {"Get": str(path)} if path.startswith("Parameters."):
                return self.values[path.removeprefix("Parameters.")]
            case {"Get": str(path)} if match := _GET.fullmatch(path):
                return self.execution.jobs[match[1]].outputs[match[2]]
            case {"Get": str(path)} if match := _PROPERTY.fullmatch(path):
                return self.execution.jobs[match[1]].properties[match[2]]
            case {"Std:Join": {"On": on, "Values": values}}:
                return on.join(_text(self.value(value)) for value in values)
            case {"Std:JsonGet": {"PropertyFile": {"Get": path}, "Path": where}}:
                match = _FILE.fullmatch(path)
                assert match, path
                found = json.loads(
                    read(self.service.s3, self.execution.jobs[match[1]].property_files[match[2]])
                )
                for quoted, plain in _PATH.findall(where):
                    found = found[quoted or plain]
                return found
        return {key: self.value(item) for key, item in raw.items()}

    def job(self, step: dict[str, Any]) -> None:
        name = f"pipelines-{self.execution.identifier}-{step['Name'][:20]}-{uuid.uuid4().hex[:6]}"
        self.job_name = name
        job = self.value(step["Arguments"])
        members = _CACHED_BY[step["Type"]]
        key = json.dumps([step["Type"], *map(job.get, members)], sort_keys=True)
        if step.get("CacheConfig", {}).get("Enabled") and key in self.service.cache:
            known = dataclasses.replace(self.service.cache[key], cached=True)
            self.execution.jobs[step["Name"]] = known
            turn = self.execution.turns[step["Name"]]
            turn.cached, turn.job = True, known.name
            return
        turn = self.execution.turns[step["Name"]]
        turn.job, turn.request = name, job
        run = self.processing if step["Type"] == "Processing" else self.training
        made = dataclasses.replace(run(step, job, name), name=name)
        self.execution.jobs[step["Name"]] = self.service.cache[key] = made

    def processing(self, step: dict[str, Any], job: dict[str, Any], name: str) -> Job:
        inputs = {i["InputName"]: i["S3Input"] for i in job.get("ProcessingInputs", [])}
        outputs = {o["OutputName"]: o["S3Output"] for o in job["ProcessingOutputConfig"]["Outputs"]}
        asked = len(job["ProcessingOutputConfig"]["Outputs"]), len(job.get("ProcessingInputs", []))
        assert asked == (len(outputs), len(inputs)), "two inputs or outputs of one name"
        assert job["ProcessingResources"]["ClusterConfig"]["InstanceCount"] == 1
        root = self.service.folder / name
        for given in inputs.values():
            place = inside(root, given["LocalPath"])
            place.mkdir(parents=True)
            download(self.service.s3, given["S3Uri"], place)
        for made in outputs.values():
            inside(root, made["LocalPath"]).mkdir(parents=True)
        (root / "config").mkdir()
        config = json.dumps({"ProcessingJobName": name, **job})
        (root / "config" / "processingjobconfig.json").write_text(config)
        application = job["AppSpecification"]
        words = [*application["ContainerEntrypoint"], *application.get("ContainerArguments", [])]
        host = start(root, "algo-1", ["algo-1"], words, self.environment(job))
        self.execution.turns[step["Name"]].attempts.append([host])
        seconds = job["StoppingCondition"]["MaxRuntimeInSeconds"]
        if wait([host], seconds, self.execution.stopping.is_set):
            raise Failed("the execution was stopped")
        _check(step, [host], "message")
        for made in outputs.values():
            upload(self.service.s3, inside(root, made["LocalPath"]), made["S3Uri"])
        files = {
            f["PropertyFileName"]: f"{outputs[f['OutputName']]['S3Uri']}/{f['FilePath']}"
            for f in step.get("PropertyFiles", [])
        }
        return Job(
            step["Name"], {n: o["S3Uri"] for n, o in outputs.items()}, files, False, host.log
        )

    def environment(self, job: dict[str, Any], **more: str) -> dict[str, str]:
        return {**self.service.environment, **more, **job.get("Environment", {})}

    def training(self, step: dict[str, Any], job: dict[str, Any], name: str) -> Job:
        """Attempts until one is not taken away."""
        assert "PropertyFiles" not in step, "Training steps have none"
        stopping, statuses, logs = job["StoppingCondition"], [], []
        spot = job.get("EnableManagedSpotTraining", False)
        assert spot == ("MaxWaitTimeInSeconds" in stopping)
        while True:
            with _alone():
                hosts = self.hosts(job, self.service.folder / name / str(len(statuses)), name)
                self.execution.turns[step["Name"]].attempts.append(hosts)
                again = wait(hosts, stopping["MaxRuntimeInSeconds"], self.gone(step, spot))
            if self.execution.stopping.is_set():
                raise Failed("the execution was stopped")
            logs += [f"[{host.name}] {line}" for host in hosts for line in host.log.splitlines()]
            if not again:
                break
            del self.service.taken_away[step["Name"]]
            statuses += ["Interrupted"]
        _check(step, hosts, "failure")
        folder = job["OutputDataConfig"]["S3OutputPath"]
        assert job["OutputDataConfig"]["CompressionType"] == "NONE"
        model, left = f"{folder}/{name}/output/model", set[str]()
        for host in hosts:
            made = upload(self.service.s3, host.root / "model", model)
            assert not made & left, f"two hosts wrote {made & left}"
            left |= made
        properties = {"TrainingJobName": name, "OutputDataConfig.S3OutputPath": folder}
        outputs = {top: f"{model}/{top}" for top in {file.split("/")[0] for file in left}}
        return Job(
            step["Name"], outputs, {}, False, "\n".join(logs), properties, [*statuses, "Completed"]
        )

    def gone(self, step: dict[str, Any], spot: bool) -> Callable[[], bool]:
        """Whether the machines are to end now: taken away, or the execution is being stopped."""
        stopped = self.execution.stopping.is_set
        taken = self.service.taken_away.get(step["Name"]) if spot else None
        return lambda: stopped() or bool(taken and taken())

    def hosts(self, job: dict[str, Any], folder: Path, name: str) -> list[Host]:
        """Start every host with what it reads, and nothing else."""
        algorithm, resources = job["AlgorithmSpecification"], job["ResourceConfig"]
        peers = [f"algo-{i + 1}" for i in range(resources["InstanceCount"])]
        channels = {
            c["ChannelName"]: c["DataSource"]["S3DataSource"] for c in job["InputDataConfig"]
        }
        assert len(channels) == len(job["InputDataConfig"]), "two channels of one name"
        for peer in peers:
            for channel, source in channels.items():
                place = folder / peer / "input" / "data" / channel
                place.mkdir(parents=True)
                download(self.service.s3, source["S3Uri"], place)
            (folder / peer / "model").mkdir()
        environment = self.environment(job, TRAINING_JOB_NAME=name)
        words = algorithm["ContainerEntrypoint"]
        return [start(folder / peer, peer, peers, words, environment) for peer in peers]


# docs.aws.amazon.com/sagemaker/latest/dg/pipelines-default-keys.html
_CACHED_BY = {
    "Processing": ("AppSpecification", "Environment", "ProcessingInputs"),
    "Training": (
        "AlgorithmSpecification",
        "CheckpointConfig",
        "Environment",
        "HyperParameters",
        "InputDataConfig",
    ),
}


def _check(step: dict[str, Any], hosts: list[Host], file: str) -> None:
    """Failed with what the first host that failed said."""
    failed = [host for host in hosts if host.failed] or [h for h in hosts if h.process.returncode]
    if failed:
        told = "\n".join(f"{host.name}: {host.log[-2000:]}" for host in hosts)
        raise Failed(f"{step['Name']}: {failed[0].told(file)}\n{told}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
