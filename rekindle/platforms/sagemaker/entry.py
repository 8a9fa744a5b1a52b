"""What a Processing container of SageMaker starts: one KFP step, from the mounts to its outputs.

    python3 /opt/ml/processing/input/bundle/entry.py

The folder of this file holds `task.json`, written by compile.py, and `shim.py`, which runs the
step. Under /opt/ml/processing lie

    input/bundle                 this folder
    input/result-K/result.json   parameters and metadata of the K-th step that this one reads
    input/artifact-K/data        an artifact that this one reads
    output/rekindle-result/result.json    what this step leaves for others, and for conditions
    output/NAME/data             its artifacts

The environment holds the pipeline's parameters that the step reads, as REKINDLE_P0, REKINDLE_P1...;
everything else of it is the step's own. Standard library only, and nothing of rekindle: it runs in
anybody's image that has Python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import shim  # type: ignore[import-not-found]

BASE = Path("/opt/ml/processing")
MESSAGE = Path("/opt/ml/output/message")
MARK, RESULT = ".rekindle", "rekindle-result"
JOB = Path("/opt/ml/config/processingjobconfig.json")


class _Inputs:
    """What the task's sources stand for in this container."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.types = task["pipeline_parameters"]
        self.results = {
            path: json.loads((BASE / "input" / channel / "result.json").read_text(encoding="utf-8"))
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
        place = BASE / "input" / source["channel"]
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
    name = ""
    if JOB.exists():
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
    work = Path("/tmp/rekindle")  # noqa: S108 - the container is ours alone
    result = work / "result.json"
    try:
        inputs = _Inputs(task)
        for name in (RESULT, *task["outputs"]["artifacts"]):
            (BASE / "output" / name).mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        told = _shim_task(task, inputs, work, result)
    except (shim.TaskError, OSError, ValueError, KeyError) as error:
        return _failed(f"{type(error).__name__}: {error}")
    if code := _installed(task["pip"]):
        return _failed(f"pip ended with {code}; see the log")
    (work / "task.json").write_text(json.dumps(told), encoding="utf-8")
    code = _attempts(task, work / "task.json")
    left = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    if code:
        _failed(left.get("error") or f"exit code {code}")
        return code
    content = {"parameters": left["parameters"], "artifacts": left["artifacts"]}
    (BASE / "output" / RESULT / "result.json").write_text(json.dumps(content), encoding="utf-8")
    for name, artifact in content["artifacts"].items():
        place, actual = BASE / "output" / name, Path(artifact["uri"])
        if actual != place / "data" and actual.exists():  # a component may return its own place
            (shutil.copytree if actual.is_dir() else shutil.copy2)(actual, place / "data")
        # nobody can mount a place in S3 with nothing in it
        (place / MARK).write_text("{}", encoding="utf-8")
    return 0


def _installed(pip: dict[str, list[str]]) -> int:
    """What KFP's own preamble would do; its runtime only where the image lacks it."""
    wanted = [*pip["needed"], *(pip["runtime"] if find_spec("kfp") is None else [])]
    if not wanted:
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", *pip["options"], *wanted]
    return subprocess.run(command, check=False).returncode


def _attempts(task: dict[str, Any], file: Path) -> int:
    """Run the step until it succeeds or no retry is left."""
    retry, code = task["retry"], 1
    for attempt in range(int(retry["count"]) + 1):
        if attempt:
            pause = retry["pause_seconds"] * retry["factor"] ** (attempt - 1)
            sys.stderr.write(f"--- attempt {attempt} failed; the next one begins in {pause:g} s\n")
            time.sleep(min(pause, retry["cap_seconds"]))
            for name in task["outputs"]["artifacts"]:
                place = BASE / "output" / name
                shutil.rmtree(place)
                place.mkdir()
        code = shim.main(["", str(file)])
        if code == 0 or code == shim.PREEMPTED:
            break
    return code


def _shim_task(task: dict[str, Any], inputs: _Inputs, work: Path, result: Path) -> dict[str, Any]:
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
                    "uri": str(BASE / "output" / name / "data"),
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
                name: {"outputFile": str(work / "parameters" / name)}
                for name in task["outputs"]["parameters"]
            },
            "artifacts": made,
            "outputFile": str(work / "executor_output.json"),
        },
    }
    return {
        **{key: task[key] for key in ("source", "command", "args", "env", "outputs")},
        "executor_input": executor_input,
        "run": {**facts(), "pipeline_task_name": task["name"]},
        "work": str(work),
        "cwd": str(Path.cwd()),
        "result": str(result),
        "parent": None,
    }


def _failed(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    MESSAGE.parent.mkdir(parents=True, exist_ok=True)
    MESSAGE.write_text(message[:1_000], encoding="utf-8")
    return 1


if __name__ == "__main__":
    sys.exit(main())
