"""What a job of a step mounts, the task that it runs, and the bundle that carries the task to it;
mounted.py reads them all.

A bundle is a folder called by its content: code and constants of a KFP executor do not fit into a
container's arguments (SageMaker: 100 x 256 characters). It brings all that runs it, so that a step
runs in any image with Python."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rekindle
from rekindle.ir.flatten import FirstOf, Flat, Given, Guard, Listed, Output, Source, Text, sources
from rekindle.ir.graph import Constant, Importer, Step
from rekindle.ir.placeholders import Template, lower

RESULT = "rekindle-result"  # an artifact may be called `result`
Flats = Mapping[str, Flat]
_PACKAGE = Path(rekindle.__file__).parent
_MODULES = ("launch/node.py", "launch/shim.py", "platforms/mounted.py")
_WITH = {"errors.py": ("masking.py",)}  # what a module imports itself


def packed(entry: Path, more: tuple[str, ...], task: str) -> tuple[str, dict[str, bytes]]:
    """The folder of a bundle, which says what is in it, and its files. `more` are modules of
    rekindle that it needs beside those that every step does."""
    files = {"entry.py": entry.read_bytes(), "task.json": task.encode()}
    for name in (*_MODULES, *more, *(one for other in more for one in _WITH.get(other, ()))):
        files |= {f"{folder}/__init__.py": b"" for folder in _packages(name)}
        files[f"rekindle/{name}"] = _PACKAGE.joinpath(name).read_bytes()
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return f"bundles/{digest.hexdigest()[:32]}", files


def _packages(module: str) -> Iterator[str]:
    """The packages around a module, which a bundle has empty."""
    for folder in Path("rekindle", module).parents:
        if folder.name:
            yield folder.as_posix()


def channels_of(flat: Flat, guards: tuple[Guard, ...] = ()) -> dict[str, Output]:
    """What is mounted under which name: results of steps that the step and `guards` read, and
    artifacts."""
    results = _results_of(flat, guards)
    found = {channel: Output(path, RESULT) for path, channel in results.items()}
    return found | {channel: output for output, channel in _artifacts_of(flat).items()}


def _artifacts_of(flat: Flat) -> dict[Output, str]:
    read = dict.fromkeys(
        source
        for artifact in flat.artifacts.values()
        for source in sources(artifact)
        if isinstance(source, Output)
    )
    return {output: f"artifact-{i}" for i, output in enumerate(read)}


def _results_of(flat: Flat, guards: tuple[Guard, ...]) -> dict[str, str]:
    """Channels of results by the step's path."""
    guarding = [source for guard in guards for source in guard.values.values()]
    read = [
        source.path
        for value in (*flat.parameters.values(), *guarding)
        for source in sources(value)
        if isinstance(source, Output)
    ]
    return {path: f"result-{i}" for i, path in enumerate(dict.fromkeys(read))}


def lowered_container(step: Step) -> dict[str, Any]:
    """What a step executes, as launch/shim.py takes it: its words with what stands for their
    placeholders, its packages, and what it promises to leave."""
    container = step.container
    return {
        "source": container.source,
        "command": [lower(word) for word in container.command],
        "args": [lower(word) for word in container.args],
        "env": {name: lower(value) for name, value in container.env.items()},
        "pip": {
            "needed": list(container.requirements),
            "runtime": list(container.runtime_requirements),
            "options": list(container.pip_options),
        },
        "outputs": {
            "parameters": {n: p.type for n, p in step.outputs.parameters.items()},
            "artifacts": {
                n: {"schema_title": a.schema_title, "schema_version": a.schema_version}
                for n, a in step.outputs.artifacts.items()
            },
        },
    }


def task_of(
    flat: Flat,
    step: Step,
    flats: Flats,
    given: Mapping[str, tuple[str, str]],
    known: Mapping[str, Any],
    guards: tuple[Guard, ...] = (),
) -> dict[str, Any]:
    """task.json. `given` are the pipeline's parameters that the job is given, as name there and
    type, `known` those whose value is fixed; others have none. `guards` are conditions that the
    step itself has to look at."""
    return {
        **lowered_container(step),
        "name": step.name,
        "retry": {
            "count": step.retry.count, "pause_seconds": step.retry.pause_seconds,
            "factor": step.retry.factor, "cap_seconds": step.retry.cap_seconds,
        },
        "pipeline_parameters": {name: list(place) for name, place in given.items()},
        "results": _results_of(flat, guards),
        "parameters": {n: _encoded(s, given, known) for n, s in flat.parameters.items()},
        "artifacts": {n: _artifacts(flat, s, flats) for n, s in flat.artifacts.items()},
        "guards": [
            {
                "text": guard.text,
                "values": {n: _encoded(s, given, known) for n, s in guard.values.items()},
            }
            for guard in guards
        ],
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
        case FirstOf(items):
            return {"first": [_encoded(item, given, known) for item in items]}
        case Text(value, values):
            inner = {name: _encoded(item, given, known) for name, item in values.items()}
            return {"text": _lowered(value), "values": inner}


def _lowered(value: Any) -> Any:
    if isinstance(value, Template):
        return {"template": lower(value)}
    if isinstance(value, list):
        return [_lowered(item) for item in value]
    return {k: _lowered(v) for k, v in value.items()} if isinstance(value, dict) else value


def _artifacts(flat: Flat, source: Source, flats: Flats) -> dict[str, Any]:
    """Where each artifact of an input is mounted, and whose it is; `first` means a choice."""
    channels = _artifacts_of(flat)
    found = []
    for one in sources(source):
        assert isinstance(one, Output)
        producer = flats[one.path].step
        artifact = producer.outputs.artifacts[one.name]
        entry: dict[str, Any] = {
            "channel": channels[one],
            "imported": isinstance(producer, Importer),
            "schema_title": artifact.schema_title,
            "schema_version": artifact.schema_version,
        }
        if isinstance(producer, Importer):
            entry["metadata"] = dict(producer.metadata)
        found.append(entry)
    return {"first": isinstance(source, FirstOf), "items": found}
