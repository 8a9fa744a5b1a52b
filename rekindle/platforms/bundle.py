"""What a job of a step mounts, the task that it runs, and the bundle that carries the
task to it; mounted.py reads them all.

A bundle is a folder called by its content, since code and constants of a KFP executor do
not fit into a container's arguments (SageMaker: 100 x 256 characters). It brings all that
runs it."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import rekindle
from rekindle.ir import flatten as ir
from rekindle.ir.edit.rewrite import OWN_IMAGES
from rekindle.ir.flatten import Flat, Guard, Output, Source, element, sources
from rekindle.ir.graph import Constant, Importer, Ports, Step
from rekindle.ir.placeholders import filled, lower
from rekindle.platforms.submission import digest_of
from rekindle.protojson import Json, carried

RESULT = "rekindle-result"  # an artifact may be called `result`
Flats = Mapping[str, Flat]
_PACKAGE = Path(rekindle.__file__).parent
_ERRORS = ("errors.py", "masking.py")
_MODULES = (
    *_ERRORS,
    "ir/values.py",
    "launch/node.py",
    "launch/shim.py",
    "platforms/mounted.py",
    "protojson.py",
)
_CONDITIONS = ("ir/condition.py",)
RENDEZVOUS = ("launch/rendezvous.py",)  # what nodes need to find each other


def packed(entry: Path, task: Mapping[str, Any], more: Iterable[str] = ()) -> dict[str, bytes]:
    """The files of a bundle, in a folder that says what is in it. `more` are modules of
    rekindle that it needs beside those that every step, and one with conditions, does."""
    text = json.dumps(task, sort_keys=True, allow_nan=False)
    files = {"entry.py": entry.read_bytes(), "task.json": text.encode()}
    modules = [*_MODULES, *more]
    if task.get("guards"):
        modules += _CONDITIONS
    for name in modules:
        for package in Path("rekindle", name).parents[:-1]:  # which a bundle has empty
            files[f"{package.as_posix()}/__init__.py"] = b""
        files[f"rekindle/{name}"] = _PACKAGE.joinpath(name).read_bytes()
    folder = f"bundles/{digest_of(files, length=32)}"
    return {f"{folder}/{name}": content for name, content in files.items()}


def channels_of(flat: Flat, guards: tuple[Guard, ...]) -> dict[str, Output]:
    """What is mounted under which name: results that the step and `guards` read, and
    artifacts."""
    channels = {}
    for path, channel in _results_of(flat, guards).items():
        channels[channel] = Output(path, RESULT)
    for output, channel in _artifacts_of(flat).items():
        channels[channel] = output
    return channels


def _artifacts_of(flat: Flat) -> dict[Output, str]:
    """Channels of the artifacts that the step reads."""
    outputs = dict.fromkeys(_outputs_in(flat.artifacts.values()))
    return {output: f"artifact-{i}" for i, output in enumerate(outputs)}


def _outputs_in(values: Iterable[Source]) -> list[Output]:
    outputs = []
    for value in values:
        for source in sources(value):
            if isinstance(source, Output):
                outputs.append(source)
    return outputs


def _results_of(flat: Flat, guards: tuple[Guard, ...]) -> dict[str, str]:
    """Channels of results by the step's path."""
    read_sources = [*flat.parameters.values()]
    for guard in guards:
        read_sources += guard.values.values()
    paths = dict.fromkeys(output.path for output in _outputs_in(read_sources))
    return {path: f"result-{i}" for i, path in enumerate(paths)}


def lowered_container(step: Step) -> Json:
    """What a step executes, as launch/shim.py takes it."""
    container = step.container
    types = {name: parameter.type for name, parameter in step.outputs.parameters.items()}
    pip = {
        "needed": list(container.requirements),
        "options": list(container.pip_options),
        "runtime": list(container.runtime_requirements),
    }
    return {
        "source": container.source,
        "pip": pip,
        "command": list(map(lower, container.command)),
        "args": list(map(lower, container.args)),
        "env": {name: lower(value) for name, value in container.env.items()},
        "outputs": {"parameters": types, "artifacts": types_of(step.outputs)},
    }


def types_of(ports: Ports) -> dict[str, dict[str, str]]:
    """The types of artifacts, as launch/shim.py takes them."""
    types = {}
    for name, artifact in ports.artifacts.items():
        types[name] = {
            "schema_title": artifact.schema_title,
            "schema_version": artifact.schema_version,
        }
    return types


def scalar(value: Any) -> Any:
    """A parameter's value where a platform knows neither lists nor structs: these as
    JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def image_of(step: Step, ours: str | None) -> str:
    """The image that a step runs in: `ours`, if there is one, where it names one of
    rekindle's."""
    image = step.container.image
    if ours and image.startswith(OWN_IMAGES):
        return ours
    return image


def task_of(
    flat: Flat,
    step: Step,
    flats: Flats,
    given: Mapping[str, tuple[str, str]],
    known: Mapping[str, Any],
    guards: tuple[Guard, ...],
) -> Json:
    """task.json. `given` are the pipeline's parameters that the job is given, as name
    there and type, `known` those whose value is fixed; others have none. `guards` are
    conditions that the step itself has to look at."""

    def encoded(values: Mapping[str, Source]) -> Json:
        return {name: _encoded(source, given, known) for name, source in values.items()}

    types = {}
    for name, parameter in step.inputs.parameters.items():
        # a constant is of its type already
        if not isinstance(flat.parameters.get(name), Constant | None):
            types[name] = {"type": parameter.type, "literals": list(parameter.literals)}
    artifacts = {}
    for name, source in flat.artifacts.items():
        artifacts[name] = _artifacts(flat, source, flats)
    return {
        **lowered_container(step),
        "name": step.name,
        "retry": dataclasses.asdict(step.retry),
        "pipeline_parameters": {name: list(reference) for name, reference in given.items()},
        "results": _results_of(flat, guards),
        "parameters": encoded(flat.parameters),
        "types": types,
        "artifacts": artifacts,
        "guards": [{"text": guard.text, "values": encoded(guard.values)} for guard in guards],
    }


def _encoded(
    source: Source, given: Mapping[str, tuple[str, str]], known: Mapping[str, Any]
) -> Json:
    """A source as mounted.py reads it."""
    match source:
        case Constant(value):
            return {"constant": value}
        case ir.Given(name, keys):
            if name in given:
                return {"parameter": name, "keys": list(keys)}
            value = known.get(name)
            if value is not None:
                value = element(value, keys, name)
            return {"constant": value}
        case Output(path, name, keys):
            return {"step": path, "output": name, "keys": list(keys)}
        case ir.Listed(items):
            return {"list": [_encoded(item, given, known) for item in items]}
        case ir.FirstOf(items):
            return {"first": [_encoded(item, given, known) for item in items]}
        case ir.Typed(inner_source, kind):
            return {"received": _encoded(inner_source, given, known), "type": kind}
        case ir.TemplatedConstant(value, values):
            inner = {name: _encoded(item, given, known) for name, item in values.items()}
            text = filled(value, lambda template: {"template": lower(template)})
            return {"text": text, "values": inner}


def _artifacts(flat: Flat, source: Source, flats: Flats) -> Json:
    """Where each artifact of an input is mounted, and whose it is; `first` means a
    choice."""
    channels = _artifacts_of(flat)
    items = []
    for output in _outputs_in([source]):
        producer = flats[output.path].step
        item: Json = {"channel": channels[output], "imported": False}
        item |= types_of(producer.outputs)[output.name]
        if isinstance(producer, Importer):
            item["imported"] = True
            item["metadata"] = carried(producer.metadata)
        items.append(item)
    return {"first": isinstance(source, ir.FirstOf), "items": items}
