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

An artifact is described twice, in its mark (`.rekindle`) for the steps that mount it, and
in the result. Where its component did not write it to `data`, there is one member more:
`elsewhere` is a URI outside of this container, which readers get as it is; `within` is
another file of the artifact's own folder. What the component left in another folder of
the container, such as that of an input, is copied into the artifact's own.

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
    """Where the step finds its inputs in this container, and leaves its outputs."""

    inputs: Mapping[str, Path]
    outputs: Mapping[str, Path]
    values: Mapping[str, str]
    """The pipeline's parameters as text, by the names that the task has for them."""
    facts: Mapping[str, str]
    """What `{{$.pipeline_job_name}}` and its like stand for."""
    message: Path | None = None
    """The file from which the platform reads why a step failed, if there is one."""
    node: int = 0
    """The rank of this node; only node rank 0 leaves outputs."""

    def of_node(self, node: int) -> "Place":
        """The same for a node rank; outputs of all but 0 go where no step sees them."""
        if node == 0:
            return self
        outputs = {name: WORK / "outputs" / name for name in self.outputs}
        return dataclasses.replace(self, outputs=outputs, node=node)


def load_task(bundle: Path) -> Task:
    """The step as far as compile time knew it: `task.json`, which bundle.py wrote."""
    task: Task = json.loads((bundle / "task.json").read_text(encoding="utf-8"))
    return task


def run(task: Task, place: Place) -> int:
    """Run the step, write its outputs, and return its exit code.

    If it fails, the reason goes into the log and into the message of `place`."""
    try:
        inputs = _Inputs(task, place)
        for folder in place.outputs.values():
            folder.mkdir(parents=True, exist_ok=True)
        WORK.mkdir(parents=True, exist_ok=True)
        if not all(inputs.holds(guard) for guard in task["guards"]):
            sys.stdout.write("its condition does not hold: nothing to do\n")
            if place.node == 0:
                _write_outputs(place, {"parameters": {}, "artifacts": {}, "skipped": True})
            return 0
        step_input = _step_input(task, inputs, place)
        facts = {**place.facts, "pipeline_task_name": task["name"]}
        is_first = place.node == 0
        arguments = node.prepared(task, step_input, facts, WORK, leads=is_first, cwd=Path.cwd())
    except (shim.TaskError, OSError, ValueError, KeyError) as error:
        return record_failure(place, f"{type(error).__name__}: {error}")
    code = node.installed(task["pip"])
    if code:
        return record_failure(place, f"pip ended with {code}; see the log")
    with _Log() as log:
        code = _run_with_retries(task, arguments, place)
    result = node.left(WORK)
    if code:
        record_failure(place, result.get("error") or f"{log.last_line}, exit code {code}")
        return code
    if place.node == 0:
        content = {"parameters": result["parameters"], "artifacts": result["artifacts"]}
        _write_outputs(place, content)
    return 0


def record_failure(place: Place, message: str) -> int:
    """Write why the step failed, into the log and for the platform; returns exit code 1."""
    sys.stderr.write(f"{message}\n")
    if place.message is not None:
        place.message.parent.mkdir(parents=True, exist_ok=True)
        place.message.write_text(message[:1_000], encoding="utf-8")
    return 1


def facts(job: str, task: str) -> dict[str, str]:
    """The values of `{{$.pipeline_job_name}}` and its like: names and ids of a run are its
    `job`, a task's id is `task`."""
    names = ("pipeline_job_name", "pipeline_job_uuid", "pipeline_job_resource_name")
    return {**dict.fromkeys(names, job), "pipeline_task_uuid": task}


def export_rendezvous(rendezvous: "Rendezvous", nodes: int, kind: str, job: str) -> int:
    """Put what this node needs to find the others into the environment; returns its rank.

    ValueError if the job has another number of nodes than the step wants; `kind` is the
    platform's word for them."""
    if rendezvous.nodes != nodes:
        raise ValueError(f"the job has {rendezvous.nodes} {kind}, the step wants {nodes}")
    os.environ.update(rendezvous.keyed(os.environ, job).environment())
    return rendezvous.node_rank


class _Inputs:
    """What the task's sources stand for in this container.

    A source is JSON that says where a value comes from; `_encoded` of bundle.py writes all
    its forms."""

    def __init__(self, task: Task, place: Place) -> None:
        self.types = task["pipeline_parameters"]
        self.place = place
        self.run_facts = {**place.facts, "pipeline_task_name": task["name"]}
        self.results: dict[str, Json] = {}
        for path, channel in task["results"].items():
            file = place.inputs[channel] / "result.json"
            self.results[path] = json.loads(file.read_text(encoding="utf-8"))

    def ran(self, step: str) -> bool:
        """Whether a step that is read was not skipped; an importer has no result, and never
        is."""
        return step not in self.results or "skipped" not in self.results[step]

    def holds(self, guard: Json) -> bool:
        """Whether a condition around the step holds; not where a step that it reads was
        skipped."""
        from rekindle.errors import StepError

        # bundles of steps without conditions do not have this module
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
        """The value of a source of a parameter; None where it has none."""
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
            context = {"executor_input": {"inputs": inputs}, "run": self.run_facts}
            return "".join(shim.render(value["template"], context))
        if isinstance(value, dict):
            return {key: self.formatted(item, parameters) for key, item in value.items()}
        if isinstance(value, list):
            return [self.formatted(item, parameters) for item in value]
        return value

    def artifacts(self, name: str, source: Json) -> list[Json]:
        """The artifacts of an input, without those of skipped steps. Of a choice (OneOf) it
        is the first."""
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
    """The path of an imported object. Platforms mount a single object as a folder with one
    file, which then is meant."""
    files = list(place.iterdir()) if place.is_dir() else []
    if len(files) == 1 and files[0].is_file():
        return files[0]
    return place


def _typed(text: str, kind: str) -> Any:
    """The value of a pipeline's parameter, which arrives as text."""
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
    """Passes what this process and its children print on to the container's log, and keeps
    the end of it, for the message of a failure."""

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
        """Have stdout and stderr, those of children included, go to a file descriptor."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(file, 1)
        os.dup2(file, 2)

    def run(self) -> None:
        """Copy until no process has the writing end of the pipe any more."""
        while content := os.read(self.source, 1 << 16):
            os.write(self.log, content)
            self.end = (self.end + content)[-800:]

    @property
    def last_line(self) -> str:
        """The last line that was printed, without the indented lines `where` and `fix`
        below an error of rekindle's."""
        for line in reversed(self.end.decode(errors="replace").split("\n")):
            if line and not line.startswith(" "):
                return line
        return "no word"


def _write_outputs(place: Place, content: Json) -> None:
    """Write the result and the marks of artifacts, which the platform carries away."""
    artifacts = {}
    for name, artifact in content["artifacts"].items():
        artifacts[name] = _collect_artifact(artifact, place.outputs[name])
    content = {**content, "artifacts": artifacts}
    # each output gets a file, also that of a skipped step: platforms cannot mount an empty one
    for name, folder in place.outputs.items():
        mark = content if "skipped" in content else artifacts.get(name, {})
        (folder / MARK).write_text(json.dumps(mark), encoding="utf-8")
    (place.outputs[RESULT] / "result.json").write_text(json.dumps(content), encoding="utf-8")


def _collect_artifact(artifact: Json, folder: Path) -> Json:
    """Copy what the component put elsewhere in this container into `folder`, the
    artifact's own; returns its mark, which tells readers where it is."""
    uri = artifact["uri"]
    mark = {key: value for key, value in artifact.items() if key != "uri"}
    actual = Path(os.path.normpath(uri.removeprefix("file://")))
    if actual == folder / "data":
        return mark
    if not actual.is_absolute():  # a URI with a scheme is not absolute either
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
    """The path or URI at which readers find an artifact that is mounted at `folder`.

    `artifact` is its mark, or what the result says of it."""
    elsewhere = artifact.get("elsewhere")
    return str(elsewhere) if elsewhere else f"{folder}/{artifact.get('within', 'data')}"


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _run_with_retries(task: Task, arguments: list[str], place: Place) -> int:
    """Run the step until it succeeds, was told to end, or has no retry left; returns the
    exit code of the last attempt."""
    retry = task["retry"]
    code = 1
    for attempt in range(int(retry["count"]) + 1):
        if attempt:
            shim.end_when_told()
            pause = retry["pause_seconds"] * retry["factor"] ** (attempt - 1)
            sys.stderr.write(f"--- attempt {attempt} failed; the next one begins in {pause:g} s\n")
            time.sleep(min(pause, retry["cap_seconds"]))
            for name in task["outputs"]["artifacts"]:  # what the failed attempt left
                shutil.rmtree(place.outputs[name])
                place.outputs[name].mkdir()
        code = shim.main(arguments)
        # a step that handles SIGTERM may end with any code, so the shim notes that it came
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
    """KFP's ExecutorInput.

    `values` are those of parameters, `artifacts` those of each input, `promised` the
    artifacts that the outputs are to become, `files` those of output parameters; in
    `folder` the executor writes what it did."""
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
