"""What a container of SageMaker starts: one KFP step, from the mounts to its outputs.

    python3 <inputs>/bundle/entry.py

The folder of this file holds `task.json`, written by compile.py, and `shim.py`, which runs the
step. A Processing job has its inputs under /opt/ml/processing/input and its outputs under
/opt/ml/processing/output, a Training job under /opt/ml/input/data and /opt/ml/model:

    <inputs>/bundle                      this folder
    <inputs>/result-K/result.json        parameters and metadata of the K-th step that is read
    <inputs>/artifact-K/data             an artifact that this one reads
    <outputs>/rekindle-result/result.json    what this step leaves for others, and for conditions
    <outputs>/NAME/data                  its artifacts

The environment holds the pipeline's parameters that the step reads, as REKINDLE_P0, REKINDLE_P1...,
and names of secrets, as REKINDLE_SECRET_NAME; everything else of it is the step's own. The hosts of
a Training job find a Rendezvous in it; the first of them writes the outputs. This process is the
container's first: shim.py hands SIGTERM on to the step, and its exit code is the job's.

Standard library only, and nothing of rekindle but what the bundle brings: it runs in anybody's
image that has Python."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import shim  # type: ignore[import-not-found]

MARK, RESULT = ".rekindle", "rekindle-result"
SECRET = "REKINDLE_SECRET_"  # noqa: S105 - the beginning of a name
JOB = Path("/opt/ml/config/processingjobconfig.json")
WORK = Path("/tmp/rekindle")  # noqa: S108 - the container is ours alone


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a container finds and leaves what; `node` is this host's rank."""

    inputs: Path
    outputs: Path
    message: Path
    node: int = 0


PROCESSING = Place(
    Path("/opt/ml/processing/input"),
    Path("/opt/ml/processing/output"),
    Path("/opt/ml/output/message"),
)
TRAINING = Place(Path("/opt/ml/input/data"), Path("/opt/ml/model"), Path("/opt/ml/output/failure"))


class _Inputs:
    """What the task's sources stand for in this container."""

    def __init__(self, task: dict[str, Any], place: Place) -> None:
        self.types, self.folder = task["pipeline_parameters"], place.inputs
        self.results = {
            path: json.loads((self.folder / channel / "result.json").read_text(encoding="utf-8"))
            for path, channel in task["results"].items()
        }

    def value(self, source: dict[str, Any]) -> Any:
        """A parameter: None where it has no value."""
        match source:
            case {"constant": value}:
                return value
            case {"parameter": name, "keys": keys}:
                variable, kind = self.types[name]
                return _element(_typed(os.environ.get(variable, ""), kind), keys)
            case {"step": step, "output": output, "keys": keys}:
                return _element(self.results[step]["parameters"].get(output), keys)
            case {"list": items}:
                values = [self.value(item) for item in items]
                return [value for value in values if value is not None]
            case {"text": lowered, "values": values}:
                known = {name: self.value(item) for name, item in values.items()}
                return self.formatted(lowered, {n: v for n, v in known.items() if v is not None})
        raise shim.TaskError(f"unknown source {source}")

    def formatted(self, value: Any, known: dict[str, Any]) -> Any:
        if isinstance(value, dict) and set(value) == {"template"}:
            inputs = {"parameterValues": known, "artifacts": {}}
            context = {"executor_input": {"inputs": inputs}, "run": facts()}
            return "".join(shim.render(value["template"], context))
        if isinstance(value, dict):
            return {key: self.formatted(item, known) for key, item in value.items()}
        return [self.formatted(item, known) for item in value] if isinstance(value, list) else value

    def artifact(self, name: str, source: dict[str, Any]) -> dict[str, Any]:
        """An artifact as KFP's executor wants it, at its place in this container."""
        told: dict[str, Any] = {"metadata": source.get("metadata", {})}
        if "step" in source:
            told = self.results[source["step"]]["artifacts"][source["output"]]
        place = self.folder / source["channel"]
        return {
            "name": name,
            "type": {
                "schemaTitle": source["schema_title"],
                "schemaVersion": source["schema_version"],
            },
            "uri": str(place / "data" if "step" in source else _only(place)),
            "metadata": told["metadata"],
        }


def _only(place: Path) -> Path:
    """An imported object: the one file in a folder, or the folder."""
    found = list(place.iterdir()) if place.is_dir() else []
    return found[0] if len(found) == 1 and found[0].is_file() else place


def _element(value: Any, keys: list[str]) -> Any:
    for key in keys:
        value = json.loads(value) if isinstance(value, str) else value
        if not isinstance(value, dict) or key not in value:
            raise shim.TaskError(f"there is no `{key}` in {str(value)[:60]!r}")
        value = value[key]
    return value


def _typed(text: str, kind: str) -> Any:
    """A pipeline's parameter, which arrives as text."""
    try:
        if kind == "NUMBER_INTEGER":
            return int(float(text))
        if kind == "NUMBER_DOUBLE":
            return float(text)
        if kind == "BOOLEAN":
            return {"true": True, "false": False}[text.lower()]
        return json.loads(text) if kind in ("LIST", "STRUCT") else text
    except (ValueError, KeyError):
        raise shim.TaskError(f"the parameter {text[:60]!r} is no {kind}") from None


def facts() -> dict[str, str]:
    """What `{{$.pipeline_job_name}}` and its like stand for: the job is called
    `pipelines-<execution>-<step>-<random>`."""
    name = os.environ.get("TRAINING_JOB_NAME", "")
    if not name and JOB.exists():
        name = str(json.loads(JOB.read_text(encoding="utf-8")).get("ProcessingJobName", ""))
    words = name.split("-")
    execution = words[1] if words[0] == "pipelines" and len(words) > 2 else name
    return {
        "pipeline_job_name": execution,
        "pipeline_job_uuid": execution,
        "pipeline_job_resource_name": execution,
        "pipeline_task_uuid": name,
    }


def main() -> int:
    """Run the step; what failed it is the job's exit message."""
    task = json.loads(Path(__file__).with_name("task.json").read_text(encoding="utf-8"))
    if channel := task.get("copies"):
        _copy_result(PROCESSING, channel)
        return 0
    place = TRAINING if "training" in task else PROCESSING
    result = WORK / "result.json"
    try:
        if place is TRAINING:
            place = _joined(task["training"])
        _read_secrets()
        inputs = _Inputs(task, place)
        for name in (RESULT, *task["outputs"]["artifacts"]):
            (place.outputs / name).mkdir(parents=True, exist_ok=True)
        WORK.mkdir(parents=True, exist_ok=True)
        told = _shim_task(task, inputs, place, result)
    except (shim.TaskError, OSError, ValueError, KeyError) as error:
        return _failed(place, f"{type(error).__name__}: {error}")
    if code := _installed(task["pip"]):
        return _failed(place, f"pip ended with {code}; see the log")
    (WORK / "task.json").write_text(json.dumps(told), encoding="utf-8")
    with _Log() as log:
        code = _attempts(task, WORK / "task.json", place)
    left = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if code:
        _failed(place, left.get("error") or f"{log.last_line}, exit code {code}")
        return code
    if place.node == 0:
        _leave(place, {"parameters": left["parameters"], "artifacts": left["artifacts"]})
    return 0


class _Log(threading.Thread):
    """What this process and its children print, on its way to the container's log; its end is what
    a failed job says."""

    def __enter__(self) -> _Log:
        self.source, sink = os.pipe()
        self.log, self.end = os.dup(1), b""
        self.redirect(sink)
        os.close(sink)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.redirect(self.log)  # nobody has the pipe's other end by now
        self.join()

    def redirect(self, file: int) -> None:
        """Let everything printed go there."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)

    def run(self) -> None:
        """Copy until the last one who prints is gone."""
        while content := os.read(self.source, 1 << 16):
            os.write(self.log, content)
            self.end = (self.end + content)[-800:]

    @property
    def last_line(self) -> str:
        """What was printed last, but for what belongs to it: Python ends with the error, ours is
        followed by indented advice."""
        lines = self.end.decode(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line and line[0] != " "), "no word")


def _joined(training: dict[str, int]) -> Place:
    """This host's place among the others, which the environment then says too."""
    from rekindle.platforms.sagemaker.rendezvous import rendezvous

    found = rendezvous(training["ranks_per_node"])
    if found.nodes != training["nodes"]:
        raise ValueError(f"the job has {found.nodes} hosts, the step wants {training['nodes']}")
    os.environ.update(found.environment())
    if found.node_rank == 0:
        return TRAINING
    return dataclasses.replace(TRAINING, outputs=WORK / "outputs", node=found.node_rank)


def _read_secrets() -> None:
    """Every secret that the environment names becomes a variable of the step."""
    named = {n: arn for n, arn in os.environ.items() if n.startswith(SECRET)}
    if not named:
        return
    import boto3  # type: ignore[import-untyped]

    store = boto3.client("secretsmanager")
    for name in named:
        value = store.get_secret_value(SecretId=os.environ.pop(name))["SecretString"]
        os.environ[name.removeprefix(SECRET)] = value


def _copy_result(place: Place, channel: str) -> None:
    """What another job left for conditions, as a file of this one."""
    target = place.outputs / RESULT
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy2(place.inputs / channel / "result.json", target)


def _leave(place: Place, content: dict[str, Any]) -> None:
    """What the platform carries away."""
    for name, artifact in content["artifacts"].items():
        folder, actual = place.outputs / name, Path(artifact["uri"])
        if actual != folder / "data" and actual.exists():  # a component may return its own place
            (shutil.copytree if actual.is_dir() else shutil.copy2)(actual, folder / "data")
        # nobody can mount a place in S3 with nothing in it
        (folder / MARK).write_text("{}", encoding="utf-8")
    (place.outputs / RESULT / "result.json").write_text(json.dumps(content), encoding="utf-8")


def _installed(pip: dict[str, list[str]]) -> int:
    """What KFP's own preamble would do; its runtime only where the image lacks it."""
    wanted = [*pip["needed"], *(pip["runtime"] if find_spec("kfp") is None else [])]
    if not wanted:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", *pip["options"], *wanted]
    return subprocess.run(command, check=False).returncode


def _attempts(task: dict[str, Any], file: Path, here: Place) -> int:
    """Run the step until it succeeds or no retry is left."""
    retry, code = task["retry"], 1
    for attempt in range(int(retry["count"]) + 1):
        if attempt:
            pause = retry["pause_seconds"] * retry["factor"] ** (attempt - 1)
            sys.stderr.write(f"--- attempt {attempt} failed; the next one begins in {pause:g} s\n")
            time.sleep(min(pause, retry["cap_seconds"]))
            for name in task["outputs"]["artifacts"]:
                place = here.outputs / name
                shutil.rmtree(place)
                place.mkdir()
        code = shim.main(["", str(file)])
        if code == 0 or code == shim.PREEMPTED:
            break
    return code


def _shim_task(task: dict[str, Any], inputs: _Inputs, place: Place, result: Path) -> dict[str, Any]:
    values = {name: inputs.value(source) for name, source in task["parameters"].items()}
    given = {
        name: {"artifacts": [inputs.artifact(name, source) for source in several]}
        for name, several in task["artifacts"].items()
    }
    made = {
        name: {
            "artifacts": [
                {
                    "name": name,
                    "type": {
                        "schemaTitle": a["schema_title"],
                        "schemaVersion": a["schema_version"],
                    },
                    "uri": str(place.outputs / name / "data"),
                    "metadata": {},
                }
            ]
        }
        for name, a in task["outputs"]["artifacts"].items()
    }
    executor_input = {
        "inputs": {
            "parameterValues": {n: v for n, v in values.items() if v is not None},
            "artifacts": given,
        },
        "outputs": {
            "parameters": {
                name: {"outputFile": str(WORK / "parameters" / name)}
                for name in task["outputs"]["parameters"]
            },
            "artifacts": made,
            "outputFile": str(WORK / "executor_output.json"),
        },
    }
    return {
        **{key: task[key] for key in ("source", "command", "args", "env")},
        # only the first host has any
        "outputs": {"parameters": {}, "artifacts": {}} if place.node else task["outputs"],
        "executor_input": executor_input,
        "run": {**facts(), "pipeline_task_name": task["name"]},
        "work": str(WORK),
        "cwd": str(Path.cwd()),
        "result": str(result),
        "parent": None,
    }


def _failed(place: Place, message: str) -> int:
    sys.stderr.write(f"{message}\n")
    place.message.parent.mkdir(parents=True, exist_ok=True)
    place.message.write_text(message[:1_000], encoding="utf-8")
    return 1


if __name__ == "__main__":
    sys.exit(main())
