"""What a job of a step mounts, the task that it runs, and the bundle that carries the task to it;
entry.py reads them all.

A bundle is a folder under `<artifact_root>/bundles/<hash>`: code and constants of a KFP executor do
not fit into the 100 x 256 characters of a container's arguments. It brings all that entry.py needs,
so that a step runs in any image with Python."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rekindle
from rekindle.ir.flatten import Flat, Given, Listed, Output, Source, Text, sources
from rekindle.ir.graph import Constant, Importer, Step
from rekindle.ir.placeholders import Template, lower

PROCESSING, TRAINING = "/opt/ml/processing", "/opt/ml/input/data"
RESULT = "rekindle-result"  # an artifact may be called `result`
Flats = Mapping[str, Flat]
_HERE = Path(__file__).parent
# what the nodes of a Training job need of rekindle to find each other
_RENDEZVOUS = ("errors.py", "launch/rendezvous.py", "platforms/sagemaker/rendezvous.py")


def packed(task: str, training: bool) -> tuple[str, dict[str, bytes]]:
    """The folder of a bundle, which says what is in it, and its files."""
    files = {**_programs(training), "task.json": task.encode()}
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"bundles/{digest.hexdigest()[:32]}", files


@functools.cache
def _programs(training: bool) -> Mapping[str, bytes]:
    package = Path(rekindle.__file__).parent
    files = {
        "entry.py": _HERE.joinpath("entry.py").read_bytes(),
        "shim.py": package.joinpath("launch/shim.py").read_bytes(),
    }
    for name in _RENDEZVOUS if training else ():
        for folder in Path(name).parents:
            files[f"rekindle/{folder}/__init__.py".replace("/./", "/")] = b""
        files[f"rekindle/{name}"] = package.joinpath(name).read_bytes()
    return files


def channels_of(flat: Flat, flats: Flats) -> dict[str, Output]:
    """What is mounted under which name: results of steps that are read, and artifacts."""
    found = {channel: Output(path, RESULT) for path, channel in _results_of(flat, flats).items()}
    return found | {channel: output for output, channel in _artifacts_of(flat).items()}


def _artifacts_of(flat: Flat) -> dict[Output, str]:
    read = dict.fromkeys(
        source
        for artifact in flat.artifacts.values()
        for source in sources(artifact)
        if isinstance(source, Output)
    )
    return {output: f"artifact-{i}" for i, output in enumerate(read)}


def _results_of(flat: Flat, flats: Flats) -> dict[str, str]:
    """Channels of results by the step's path; importers have none."""
    read = [
        source.path
        for value in (*flat.parameters.values(), *flat.artifacts.values())
        for source in sources(value)
        if isinstance(source, Output) and not isinstance(flats[source.path].step, Importer)
    ]
    return {path: f"result-{i}" for i, path in enumerate(dict.fromkeys(read))}


def task_of(
    flat: Flat,
    step: Step,
    flats: Flats,
    given: Mapping[str, tuple[str, str]],
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """task.json. `given` are the pipeline's parameters that come in the environment, as variable
    and type, `known` those whose value is fixed; others have none."""
    container = step.container
    return {
        "name": step.name,
        "source": container.source,
        "command": [lower(word) for word in container.command],
        "args": [lower(word) for word in container.args],
        "env": {name: lower(value) for name, value in container.env.items()},
        "pip": {
            "needed": list(container.requirements),
            "runtime": list(container.runtime_requirements),
            "options": list(container.pip_options),
        },
        "retry": {
            "count": step.retry.count, "pause_seconds": step.retry.pause_seconds,
            "factor": step.retry.factor, "cap_seconds": step.retry.cap_seconds,
        },
        "outputs": {
            "parameters": {n: p.type for n, p in step.outputs.parameters.items()},
            "artifacts": {
                n: {"schema_title": a.schema_title, "schema_version": a.schema_version}
                for n, a in step.outputs.artifacts.items()
            },
        },
        "pipeline_parameters": {name: list(place) for name, place in given.items()},
        "results": _results_of(flat, flats),
        "parameters": {n: _encoded(s, given, known) for n, s in flat.parameters.items()},
        "artifacts": {n: _artifacts(flat, s, flats) for n, s in flat.artifacts.items()},
    }  # fmt: skip


def _encoded(
    source: Source, given: Mapping[str, tuple[str, str]], known: Mapping[str, Any]
) -> dict[str, Any]:
    match source:
        case Constant(value):
            return {"constant": value}
        case Given(name, keys):
            if name in given:
                return {"parameter": name, "keys": list(keys)}
            value = known.get(name)
            for key in keys:
                value = value[key] if isinstance(value, dict) else None
            return {"constant": value}
        case Output(path, name, keys):
            return {"step": path, "output": name, "keys": list(keys)}
        case Listed(items):
            return {"list": [_encoded(item, given, known) for item in items]}
        case Text(value, values):
            inner = {name: _encoded(item, given, known) for name, item in values.items()}
            return {"text": _lowered(value), "values": inner}
    raise AssertionError(f"the feature table lets {source} through")


def _lowered(value: Any) -> Any:
    if isinstance(value, Template):
        return {"template": lower(value)}
    if isinstance(value, list):
        return [_lowered(item) for item in value]
    return {k: _lowered(v) for k, v in value.items()} if isinstance(value, dict) else value


def _artifacts(flat: Flat, source: Source, flats: Flats) -> list[dict[str, Any]]:
    """Where each artifact of an input is mounted, and whose it is."""
    channels = _artifacts_of(flat)
    found = []
    for one in sources(source):
        assert isinstance(one, Output)
        producer = flats[one.path].step
        artifact = producer.outputs.artifacts[one.name]
        entry: dict[str, Any] = {
            "channel": channels[one],
            "schema_title": artifact.schema_title,
            "schema_version": artifact.schema_version,
        }
        if isinstance(producer, Importer):
            entry["metadata"] = dict(producer.metadata)
        else:
            entry |= {"step": one.path, "output": one.name}
        found.append(entry)
    return found
