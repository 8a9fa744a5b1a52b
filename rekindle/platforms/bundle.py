"""What a step's job mounts, the task that it runs, and the bundle that carries the task to
it; mounted.py reads them all.

A bundle is a folder, because code and constants of a KFP executor do not fit into a
container's arguments (SageMaker: 100 x 256 characters). Its name is a hash of its content.
It brings the modules of rekindle that run it, so that the image needs python3 alone."""

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
_CONDITIONS = ("ir/condition.py",)  # for steps that evaluate a condition themselves
RENDEZVOUS = ("launch/rendezvous.py",)  # for steps whose nodes have to find each other


def packed(entry: Path, task: Mapping[str, Any], more: Iterable[str] = ()) -> dict[str, bytes]:
    """The files of a bundle by path, `bundles/HASH/...`.

    `more` are modules of rekindle that it needs beside those of every bundle, and of one
    with conditions."""
    text = json.dumps(task, sort_keys=True, allow_nan=False)
    files = {"entry.py": entry.read_bytes(), "task.json": text.encode()}
    modules = [*_MODULES, *more]
    if task.get("guards"):
        modules += _CONDITIONS
    for name in modules:
        # packages need an __init__.py, and that of rekindle itself would import more
        for package in Path("rekindle", name).parents[:-1]:
            files[f"{package.as_posix()}/__init__.py"] = b""
        files[f"rekindle/{name}"] = _PACKAGE.joinpath(name).read_bytes()
    folder = f"bundles/{digest_of(files, length=32)}"
    return {f"{folder}/{name}": content for name, content in files.items()}


def channels_of(flat: Flat, guards: tuple[Guard, ...]) -> dict[str, Output]:
    """What is mounted, by the name of its channel: the results that the step and `guards`
    read, and the artifacts that the step reads."""
    channels = {}
    for path, channel in _results_of(flat, guards).items():
        channels[channel] = Output(path, RESULT)
    for output, channel in _artifacts_of(flat).items():
        channels[channel] = output
    return channels


def _artifacts_of(flat: Flat) -> dict[Output, str]:
    """The channel of each artifact that the step reads."""
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
    """The channel of each result that is read, by the path of the step that left it."""
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
    """A parameter's value for a platform that has neither lists nor structs: JSON for these."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def image_of(step: Step, ours: str | None) -> str:
    """The image that a step runs in. `ours`, which the config names, replaces rekindle's
    own images."""
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
    """The content of task.json.

    `given` has the pipeline's parameters that the job receives, each with its name there
    and its type, `known` those whose value is fixed now; all others have no value.
    `guards` are the conditions that the step itself evaluates."""

    def encoded(values: Mapping[str, Source]) -> Json:
        return {name: _encoded(source, given, known) for name, source in values.items()}

    types = {}
    for name, parameter in step.inputs.parameters.items():
        # flatten.py has converted constants to the type of the input already
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
    """A source as JSON; `_Inputs.value` of mounted.py reads all these forms."""
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
    """The artifacts of an input, each with its channel and types. `first` says that the
    input is one of them, the first that is there (OneOf), and not all."""
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
