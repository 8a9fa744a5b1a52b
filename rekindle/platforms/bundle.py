"""What a job of a step mounts, the task that it runs, and the bundle that carries the task to it;
mounted.py reads them all.

A bundle is a folder called by its content, since code and constants of a KFP executor do not fit
into a container's arguments (SageMaker: 100 x 256 characters). It brings all that runs it."""

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
from rekindle.protojson import carried

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
    """The files of a bundle, in a folder that says what is in it. `more` are modules of rekindle
    that it needs beside those that every step, and one with conditions, does."""
    text = json.dumps(task, sort_keys=True, allow_nan=False)
    files = {"entry.py": entry.read_bytes(), "task.json": text.encode()}
    for name in (*_MODULES, *(_CONDITIONS if task.get("guards") else ()), *more):
        around = Path("rekindle", name).parents[:-1]  # packages, which a bundle has empty
        files |= {f"{folder.as_posix()}/__init__.py": b"" for folder in around}
        files[f"rekindle/{name}"] = _PACKAGE.joinpath(name).read_bytes()
    folder = f"bundles/{digest_of(files, length=32)}"
    return {f"{folder}/{name}": content for name, content in files.items()}


def channels_of(flat: Flat, guards: tuple[Guard, ...]) -> dict[str, Output]:
    """What is mounted under which name: results that the step and `guards` read, and artifacts."""
    results = _results_of(flat, guards)
    found = {channel: Output(path, RESULT) for path, channel in results.items()}
    return found | {channel: output for output, channel in _artifacts_of(flat).items()}


def _artifacts_of(flat: Flat) -> dict[Output, str]:
    read = dict.fromkeys(_outputs_in(flat.artifacts.values()))
    return {output: f"artifact-{i}" for i, output in enumerate(read)}


def _outputs_in(values: Iterable[Source]) -> list[Output]:
    return [one for value in values for one in sources(value) if isinstance(one, Output)]


def _results_of(flat: Flat, guards: tuple[Guard, ...]) -> dict[str, str]:
    """Channels of results by the step's path."""
    guarding = [source for guard in guards for source in guard.values.values()]
    read = _outputs_in((*flat.parameters.values(), *guarding))
    paths = dict.fromkeys(output.path for output in read)
    return {path: f"result-{i}" for i, path in enumerate(paths)}


def lowered_container(step: Step) -> dict[str, Any]:
    """What a step executes, as launch/shim.py takes it."""
    container = step.container
    kinds = {name: parameter.type for name, parameter in step.outputs.parameters.items()}
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
        "outputs": {"parameters": kinds, "artifacts": types_of(step.outputs)},
    }


def types_of(ports: Ports) -> dict[str, dict[str, str]]:
    """The types of artifacts, as launch/shim.py takes them."""
    return {
        name: {"schema_title": a.schema_title, "schema_version": a.schema_version}
        for name, a in ports.artifacts.items()
    }


def scalar(value: Any) -> Any:
    """A parameter's value where a platform knows neither lists nor structs: these as JSON."""
    return json.dumps(value) if isinstance(value, list | dict) else value


def image_of(step: Step, ours: str | None) -> str:
    """The image that a step runs in: `ours`, if there is one, where it names one of rekindle's."""
    image = step.container.image
    return ours if ours and image.startswith(OWN_IMAGES) else image


def task_of(
    flat: Flat,
    step: Step,
    flats: Flats,
    given: Mapping[str, tuple[str, str]],
    known: Mapping[str, Any],
    guards: tuple[Guard, ...],
) -> dict[str, Any]:
    """task.json. `given` are the pipeline's parameters that the job is given, as name there and
    type, `known` those whose value is fixed; others have none. `guards` are conditions that the
    step itself has to look at."""

    def encoded(values: Mapping[str, Source]) -> dict[str, Any]:
        return {name: _encoded(source, given, known) for name, source in values.items()}

    types = {
        name: {"type": parameter.type, "literals": list(parameter.literals)}
        for name, parameter in step.inputs.parameters.items()
        if not isinstance(flat.parameters.get(name), Constant | None)  # which is as received
    }
    return {
        **lowered_container(step),
        "name": step.name,
        "retry": dataclasses.asdict(step.retry),
        "pipeline_parameters": {name: list(place) for name, place in given.items()},
        "results": _results_of(flat, guards),
        "parameters": encoded(flat.parameters),
        "types": types,
        "artifacts": {n: _artifacts(flat, s, flats) for n, s in flat.artifacts.items()},
        "guards": [{"text": guard.text, "values": encoded(guard.values)} for guard in guards],
    }


def _encoded(
    source: Source, given: Mapping[str, tuple[str, str]], known: Mapping[str, Any]
) -> dict[str, Any]:
    match source:
        case Constant(value):
            return {"constant": value}
        case ir.Given(name, keys):
            if name in given:
                return {"parameter": name, "keys": list(keys)}
            value = known.get(name)
            return {"constant": None if value is None else element(value, keys, name)}
        case Output(path, name, keys):
            return {"step": path, "output": name, "keys": list(keys)}
        case ir.Listed(items):
            return {"list": [_encoded(item, given, known) for item in items]}
        case ir.FirstOf(items):
            return {"first": [_encoded(item, given, known) for item in items]}
        case ir.Typed(inner_source, kind):
            return {"received": _encoded(inner_source, given, known), "type": kind}
        case ir.Text(value, values):
            inner = {name: _encoded(item, given, known) for name, item in values.items()}
            text = filled(value, lambda template: {"template": lower(template)})
            return {"text": text, "values": inner}


def _artifacts(flat: Flat, source: Source, flats: Flats) -> dict[str, Any]:
    """Where each artifact of an input is mounted, and whose it is; `first` means a choice."""
    channels = _artifacts_of(flat)
    found = list[dict[str, Any]]()
    for one in _outputs_in([source]):
        producer = flats[one.path].step
        kind = types_of(producer.outputs)[one.name]
        more = {}
        if isinstance(producer, Importer):
            more = {"metadata": carried(producer.metadata)}
        found.append({"channel": channels[one], "imported": bool(more), **kind, **more})
    return {"first": isinstance(source, ir.FirstOf), "items": found}
