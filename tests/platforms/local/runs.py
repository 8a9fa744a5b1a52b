"""Run pipelines of tests/platforms/pipelines in this process, and read what came of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rekindle.app.runs import numbered
from rekindle.ir.compile import compile_function
from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.platforms.local.execute import execute
from rekindle.platforms.local.step import StepSettings
from rekindle.records import ArtifactRecord, RunRecord

PIPELINES = Path(__file__).parents[1] / "pipelines"


@functools.cache
def module(name: str) -> ModuleType:
    """The file `name`.py of pipelines/."""
    spec = importlib.util.spec_from_file_location(f"pipelines_{name}", PIPELINES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


@functools.cache
def graph(name: str, file: str = "behaviour") -> Graph:
    """The Graph of the pipeline `name` in pipelines/`file`.py."""
    return read(compile_function(getattr(module(file), name)))


def run(
    pipeline: Graph | str, home: Path, arguments: Mapping[str, Any] | None = None, **options: Any
) -> RunRecord:
    """One run with a fresh run id, unless `run_id` is given; errors of the run are raised."""
    run_id = options.pop("run_id", f"run-{uuid.uuid4().hex[:8]}")
    record = RunRecord(
        run_id=run_id,
        name=options.pop("name", "test"),
        platform="local",
        status="running",
        started_at="2026-01-01T00:00:00Z",
    )
    record = numbered(record, home)
    settings = {"env": os.environ, "source_hash": "code"}
    for field in dataclasses.fields(StepSettings):
        if field.name in options:
            settings[field.name] = options.pop(field.name)
    return execute(
        graph(pipeline) if isinstance(pipeline, str) else pipeline,
        arguments or {},
        StepSettings(**settings),
        home=home,
        record=record,
        **options,
    )


def stored(home: Path, run_id: str) -> RunRecord:
    """The record as it is on disk."""
    return RunRecord.read(home / "runs" / run_id / "run.json")


def plain(value: Any) -> Any:
    """An output as the oracle prints it."""
    if not isinstance(value, ArtifactRecord):
        return [type(value).__name__, value]
    path = Path(value.uri)
    files = sorted(p for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
    content = {p.relative_to(path).as_posix(): p.read_text() for p in files}
    return [
        "artifact",
        {"schema": value.schema_title, "metadata": dict(value.metadata), "files": content},
    ]


# what a platform has to show in the quick tests; the other cases of same.py are for `make test-all`
def content(place: Path) -> dict[str, str]:
    """What lies at a place: the hash of each file by its path below; a file itself is "."."""
    files = [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.is_file())
    return {
        str(file.relative_to(place)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


def left_by(record: RunRecord) -> dict[str, Any]:
    """What each step left, but importers: its parameters, and of its artifacts the schema, the
    metadata and what is in them."""
    return {
        step.name: [
            dict(step.parameters),
            {
                n: [a.schema_title, dict(a.metadata), content(Path(a.uri))]
                for n, a in step.artifacts.items()
            },
        ]
        for step in record.steps
        if step.status == "succeeded" and not step.reason.startswith("imported")
    }


def unnamed(left: Mapping[str, Any]) -> list[str]:
    """The same without the names of steps, which platforms have their own for."""
    return sorted(json.dumps(one, sort_keys=True) for one in left.values())


QUICK = ("nested pipelines", "loop over structs", "OneOf over artifacts")
# cases of same.py for platforms that take a pipeline flat
_FLAT = [
    "one step",
    "names that are ours elsewhere",
    "all kinds of parameters",
    "all kinds of arguments",
    "constants",
    "named tuple",
    "artifacts and metadata",
    "metrics",
    "output paths",
    "input path",
    "defaults",
    "integers",
    "nested pipelines",
    "environment",
    "loop over constants",
    "loop over structs",
    "list of artifacts",
    "nested loops with the item of the outer one",
    "loop over nested pipelines",
    "artifact as a return value",
    "branch on a number: if",
    "branch on a number: elif",
    "branch on a number: else",
    "branch on a bool: if",
    "branch on a bool: else",
    "branch on text",
    "branch on text, not taken",
    "branch on formatted text",
    "branch on a share",
    "branches inside a nested pipeline",
    "loop over an argument",
    "loops over what was given",
    "loop with a limit",
    "loop in a branch",
    "loop in a branch not taken",
    "OneOf over artifacts",
]
FLAT = [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in _FLAT]
