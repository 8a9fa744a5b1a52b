"""One KFP step between mounts: what runs where a platform puts the inputs into folders
and carries the outputs away (SageMaker, Azure ML).

The bundle of a step (bundle.py) brings this module, what it imports, and `task.json`, the
step as far as compile time knows it. A platform's entry.py says where everything lies
(`Place`) and calls `run`:

    inputs[bundle]                       the bundle
    inputs[result-K]/result.json         parameters of the K-th step that is read
    inputs[artifact-K]/data, .rekindle   an artifact that this step reads, and its metadata
    outputs[rekindle-result]/result.json what this step leaves for others, and for conditions
    outputs[NAME]/data, .rekindle        its artifacts

A mark (`.rekindle`) and the result say the same of an artifact. `elsewhere` is the URI
that the component gave it, if that is not a place of this container: readers get it as it
is. `within` is the file of its own folder that it named, if that is not `data`. What it
named elsewhere in the container (the place of an input) is copied into the artifact's own
folder.

Where the platform knows no conditions, those around the step are in its task: a step
whose condition does not hold leaves a result that says so and nothing else. shim.py hands
SIGTERM on to the step, and the exit code is the step's. Standard library only, and what
the bundle brings."""

import dataclasses
import glob
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rekindle.ir.values import element, received
from rekindle.launch import node, shim
from rekindle.protojson import Json, carried

if TYPE_CHECKING:
    from rekindle.launch.rendezvous import Rendezvous

MARK = ".rekindle"
RESULT = "rekindle-result"
WORK = Path("/tmp/rekindle")  # noqa: S108 - the container is ours alone
Task: TypeAlias = Json


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a container finds and leaves what. `message` is a file for what failed the
    step, if the platform reads one; `values` are the pipeline's parameters as text, by
    the names that the task has for them; `facts` stand for `{{$.pipeline_job_name}}` and
    its like; only node rank 0 (`node`) leaves anything."""

    inputs: Mapping[str, Path]
    outputs: Mapping[str, Path]
    values: Mapping[str, str]
    facts: Mapping[str, str]
    message: Path | None = None
    node: int = 0

    def of_node(self, node: int) -> "Place":
        """This for another node rank, whose outputs no step sees."""
        if node == 0:
            return self
        outputs = {name: WORK / "outputs" / name for name in self.outputs}
        return dataclasses.replace(self, outputs=outputs, node=node)


def load_task(bundle: Path) -> Task:
    """What compile time knew of the step."""
    task: Task = json.loads((bundle / "task.json").read_text(encoding="utf-8"))
    return task


def run(task: Task, place: Place) -> int:
    """Run the step, and return its exit code. What failed it goes into the message."""
    try:
        inputs = _Inputs(task, place)
        for folder in place.outputs.values():
            folder.mkdir(parents=True, exist_ok=True)
        WORK.mkdir(parents=True, exist_ok=True)
        if not all(inputs.holds(guard) for guard in task["guards"]):
            sys.stdout.write("its condition does not hold: nothing to do\n")
            if place.node == 0:
                _leave(place, {"parameters": {}, "artifacts": {}, "skipped": True})
            return 0
        step_input = _step_input(task, inputs, place)
        facts = {**place.facts, "pipeline_task_name": task["name"]}
        leads = place.node == 0
        arguments = node.prepared(task, step_input, facts, WORK, leads=leads, cwd=Path.cwd())
    except (shim.TaskError, OSError, ValueError, KeyError) as error:
        return failed(place, f"{type(error).__name__}: {error}")
    code = node.installed(task["pip"])
    if code:
        return failed(place, f"pip ended with {code}; see the log")
    with _Log() as log:
        code = _attempts(task, arguments, place)
    result = node.left(WORK)
    if code:
        failed(place, result.get("error") or f"{log.last_line}, exit code {code}")
        return code
    if place.node == 0:
        _leave(place, {"parameters": result["parameters"], "artifacts": result["artifacts"]})
    return 0


def failed(place: Place, message: str) -> int:
    """Write why the step failed, for the log and for the platform; returns exit code
    1."""
    sys.stderr.write(f"{message}\n")
    if place.message is not None:
        place.message.parent.mkdir(parents=True, exist_ok=True)
        place.message.write_text(message[:1_000], encoding="utf-8")
    return 1


def facts(job: str, task: str) -> dict[str, str]:
    """The values of `{{$.pipeline_job_name}}` and its like."""
    names = ("pipeline_job_name", "pipeline_job_uuid", "pipeline_job_resource_name")
    return {**dict.fromkeys(names, job), "pipeline_task_uuid": task}


def met(rendezvous: "Rendezvous", nodes: int, kind: str, job: str) -> int:
    """Put what this node needs to find the others into the environment; returns its
    rank."""
    if rendezvous.nodes != nodes:
        raise ValueError(f"the job has {rendezvous.nodes} {kind}, the step wants {nodes}")
    os.environ.update(rendezvous.keyed(os.environ, job).environment())
    return rendezvous.node_rank


class _Inputs:
    """What the task's sources stand for in this container."""

    def __init__(self, task: Task, place: Place) -> None:
        self.types = task["pipeline_parameters"]
        self.place = place
        self.results: dict[str, Json] = {}
        for path, channel in task["results"].items():
            file = place.inputs[channel] / "result.json"
            self.results[path] = json.loads(file.read_text(encoding="utf-8"))

    def ran(self, step: str) -> bool:
        """Whether a step that is read did anything; an importer always did."""
        return step not in self.results or "skipped" not in self.results[step]

    def holds(self, guard: Json) -> bool:
        """Whether a condition around the step holds; it does not where what it reads was
        skipped."""
        from rekindle.errors import StepError
        from rekindle.ir.condition import evaluate, parse

        sources = guard["values"]
        values = {name: self.parameter(name, source, {}) for name, source in sources.items()}
        for source in sources.values():
            if "step" in source and not self.ran(source["step"]):
                return False
        try:
            return evaluate(parse(guard["text"]), values)
        except StepError as error:
            raise shim.TaskError(str(error)) from error

    def value(self, source: Json) -> Any:
        """The value that a source of a parameter has; None where it has none."""
        match source:
            case {"constant": value}:
                return value
            case {"parameter": name, "keys": keys}:
                variable, kind = self.types[name]
                return element(_typed(self.place.values.get(variable, ""), kind), keys)
            case {"step": step} if not self.ran(step):
                return None
            case {"step": step, "output": output, "keys": keys}:
                return element(self.results[step]["parameters"].get(output), keys)
            case {"received": inner, "type": kind}:
                return self._received(inner, kind)
            case {"first": items}:
                return self._first(items)
            case {"list": items}:
                values = [self.value(item) for item in items]
                return [value for value in values if value is not None]
            case {"text": lowered, "values": sources}:
                parameters = {name: self.value(item) for name, item in sources.items()}
                return self.formatted(lowered, _without_none(parameters))
        raise shim.TaskError(f"unknown source {source}")

    def _received(self, source: Json, kind: str) -> Any:
        value = self.value(source)
        # a constant null is a value, which the type may refuse
        if value is None and source != {"constant": None}:
            return None
        return received(value, kind)

    def _first(self, sources: list[Json]) -> Any:
        for source in sources:
            value = self.value(source)
            if value is not None:
                return value
        return None

    def parameter(self, name: str, source: Json, types: Json) -> Any:
        """What the step's own input `name` receives; None where it has no value."""
        try:
            value = self.value(source)
            if value is None or name not in types:
                return value
            return received(value, types[name]["type"], types[name]["literals"])
        except ValueError as error:
            raise shim.TaskError(f"the input `{name}`: {error}") from error

    def formatted(self, value: Any, parameters: Json) -> Any:
        """A value with its templates filled in."""
        if isinstance(value, dict) and set(value) == {"template"}:
            inputs = {"parameterValues": parameters, "artifacts": {}}
            context = {"executor_input": {"inputs": inputs}, "run": self.place.facts}
            return "".join(shim.render(value["template"], context))
        if isinstance(value, dict):
            return {key: self.formatted(item, parameters) for key, item in value.items()}
        if isinstance(value, list):
            return [self.formatted(item, parameters) for item in value]
        return value

    def artifacts(self, name: str, source: Json) -> list[Json]:
        """All artifacts of an input: of steps that ran, and of a choice the first."""
        artifacts = []
        for item in source["items"]:
            artifact = self.artifact(name, item)
            if artifact is not None:
                artifacts.append(artifact)
        return artifacts[:1] if source["first"] else artifacts

    def artifact(self, name: str, source: Json) -> Json | None:
        """An artifact as KFP's executor wants it; None where the step that makes it was
        skipped."""
        place = self.place.inputs[source["channel"]]
        if source["imported"]:
            metadata = source.get("metadata", {})
            return artifact_of(name, source, _imported_path(place), carried(metadata))
        mark = json.loads((place / MARK).read_text(encoding="utf-8"))
        if "skipped" in mark:
            return None
        return artifact_of(name, source, place_of(mark, place), carried(mark["metadata"]))


def _without_none(values: Json) -> Json:
    return {name: value for name, value in values.items() if value is not None}


def _imported_path(place: Path) -> Path:
    """An imported object: the one file in a folder, or the folder."""
    files = list(place.iterdir()) if place.is_dir() else []
    if len(files) == 1 and files[0].is_file():
        return files[0]
    return place


def _typed(text: str, kind: str) -> Any:
    """A pipeline's parameter, which arrives as text."""
    try:
        if kind in ("NUMBER_INTEGER", "NUMBER_DOUBLE"):
            return carried(float(text))
        if kind == "BOOLEAN":
            return {"true": True, "false": False}[text.lower()]
        if kind in ("LIST", "STRUCT"):
            return json.loads(text)
        return text
    except (ValueError, KeyError):
        raise shim.TaskError(f"the parameter {text[:60]!r} is not a {kind}") from None


class _Log(threading.Thread):
    """What this process and its children print, on its way to the container's log."""

    def __enter__(self) -> "_Log":
        self.source, sink = os.pipe()
        self.log = os.dup(1)
        self.end = b""
        self.redirect(sink)
        os.close(sink)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.redirect(self.log)  # no process has the pipe's other end by now
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
        """What was printed last, without the indented advice that follows an error of
        ours."""
        for line in reversed(self.end.decode(errors="replace").split("\n")):
            if line and not line.startswith(" "):
                return line
        return "no word"


def _leave(place: Place, content: Json) -> None:
    """Write what the platform carries away."""
    artifacts = {}
    for name, artifact in content["artifacts"].items():
        artifacts[name] = _settled(artifact, place.outputs[name])
    content = {**content, "artifacts": artifacts}
    for name, folder in place.outputs.items():  # a place with nothing in it cannot be mounted
        mark = content if "skipped" in content else artifacts.get(name, {})
        (folder / MARK).write_text(json.dumps(mark), encoding="utf-8")
    (place.outputs[RESULT] / "result.json").write_text(json.dumps(content), encoding="utf-8")


def _settled(artifact: Json, folder: Path) -> Json:
    """An artifact as others read it, with its place; what its component put elsewhere in
    this container is copied into `folder`, the artifact's own."""
    uri = artifact["uri"]
    mark = {key: value for key, value in artifact.items() if key != "uri"}
    actual = Path(os.path.normpath(uri.removeprefix("file://")))
    if actual == folder / "data":
        return mark
    if not actual.is_absolute():  # which a URI with a scheme is not either
        return {**mark, "elsewhere": uri}
    if actual.is_relative_to(folder):
        return {**mark, "within": actual.relative_to(folder).as_posix()}
    # components add an ending to the path that they are given: `model.joblib`
    with_endings = list(actual.parent.glob(f"{glob.escape(actual.name)}.*"))
    if not actual.exists() and not with_endings:
        return {**mark, "elsewhere": uri}
    if actual.exists():
        _copy(actual, folder / "data")
    for path in with_endings:
        _copy(path, folder / f"data{path.name.removeprefix(actual.name)}")
    return mark


def place_of(artifact: Mapping[str, Any], folder: Path | str) -> str:
    """Where readers find an artifact of which `folder` is the place, by its mark or
    result."""
    elsewhere = artifact.get("elsewhere")
    return str(elsewhere) if elsewhere else f"{folder}/{artifact.get('within', 'data')}"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _attempts(task: Task, words: list[str], place: Place) -> int:
    """Run the step until it succeeds, was told to end, or has no retry left."""
    retry = task["retry"]
    code = 1
    for attempt in range(int(retry["count"]) + 1):
        if attempt:
            shim.end_when_told()
            pause = retry["pause_seconds"] * retry["factor"] ** (attempt - 1)
            sys.stderr.write(f"--- attempt {attempt} failed; the next one begins in {pause:g} s\n")
            time.sleep(min(pause, retry["cap_seconds"]))
            for name in task["outputs"]["artifacts"]:  # of the attempt that failed
                shutil.rmtree(place.outputs[name])
                place.outputs[name].mkdir()
        code = shim.main(words)
        # a step that hears the signal may end with any code
        if code in (0, shim.PREEMPTED, 128 + signal.SIGTERM) or node.left(WORK).get("told_to_end"):
            break
    return code


def _step_input(task: Task, inputs: _Inputs, place: Place) -> Json:
    """The ExecutorInput of the step in this container."""
    values = {}
    for name, source in task["parameters"].items():
        values[name] = inputs.parameter(name, source, task["types"])
    artifacts = {}
    for name, source in task["artifacts"].items():
        artifacts_of_input = inputs.artifacts(name, source)
        if artifacts_of_input:
            artifacts[name] = artifacts_of_input
    promised = {}
    for name, schema in task["outputs"]["artifacts"].items():
        promised[name] = artifact_of(name, schema, place.outputs[name] / "data", {})
    files = {name: WORK / "parameters" / name for name in task["outputs"]["parameters"]}
    return executor_input(_without_none(values), artifacts, promised, files, WORK)


def executor_input(
    values: Mapping[str, Any],
    artifacts: Mapping[str, list[Json]],
    promised: Mapping[str, Json],
    files: Mapping[str, Path],
    folder: Path,
) -> Json:
    """KFP's ExecutorInput: the values of parameters, the artifacts of each input, what
    each output is `promised` to be, the file of each output parameter, and the folder
    where the executor says what it did."""
    return {
        "inputs": {
            "parameterValues": dict(values),
            "artifacts": {name: {"artifacts": several} for name, several in artifacts.items()},
        },
        "outputs": {
            "parameters": {name: {"outputFile": str(file)} for name, file in files.items()},
            "artifacts": {name: {"artifacts": [output]} for name, output in promised.items()},
            "outputFile": str(folder / "executor_output.json"),
        },
    }


def artifact_of(name: str, schema: Mapping[str, Any], uri: Path | str, metadata: Any) -> Json:
    """An artifact as KFP's executor wants it."""
    kind = {"schemaTitle": schema["schema_title"], "schemaVersion": schema["schema_version"]}
    return {"name": name, "type": kind, "uri": str(uri), "metadata": metadata}
