"""What tests share with conformance/test_recorded.py: pipelines that a real KFP ran, and what it gave.

The table (one line a task) was recorded from KFP 2.17.0 on 2026-11-29. It lies beside the checkout with
the pipelines that people brought, as KFP's samples do (samples.py); tests skip without them.
`recorded_values.json` holds the core of it, and its pipelines are in pipelines/typed.py."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import RekindleError
from rekindle.ir.compile import compile_function
from rekindle.ir.graph import Graph
from rekindle.ir.read.pipeline import read
from rekindle.records import RunRecord
from tests.platforms.local.runs import module, run, stored
from tests.support.conformance import arguments as usual_arguments

SHARED = Path(os.environ.get("REKINDLE_SHARED") or Path(__file__).parents[3] / "shared")
TABLE = SHARED / "facts" / "kubeflow-recorded" / "pipelines.jsonl"
needs_the_record = pytest.mark.skipif(
    not TABLE.exists(), reason="what KFP was recorded to give does not lie beside the checkout"
)
CORE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "conformance" / "recorded_values.json").read_text("utf-8")
)["cases"]
# states as the record has them, by those of a run here
STATES = {"succeeded": "succeeded", "failed": "failed", "cancelled": "failed", "skipped": "not run"}


@functools.cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """What KFP gave, by pipeline and task; "" stands for the pipeline itself."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    if TABLE.exists():
        for line in TABLE.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            found.setdefault(row["pipeline"], {})[row["task"] or ""] = row["kfp"]
    return found


# arguments that the recorded outputs show
_GIVEN: dict[str, dict[str, Any]] = {
    "b_watched": {"text": "bad"},
    "c_preprocess": {
        "message": "m",
        "input_dict_parameter": {"A": 1.0, "B": 2.5},
        "input_list_parameter": ["a", "b"],
    },
}


def source_of(name: str) -> str | None:
    """The IR of a recorded pipeline; None where its source is not among the inputs."""
    made = _written(name)
    if made is None or isinstance(made, str):
        return made
    return compile_function(made)


def _written(name: str) -> Any:
    kind, _, plain = name.partition("_")
    if kind == "t":
        cases = {**module("same").CASES, **module("same").KNOWN_BUGS}
        return {_plain(case): pipeline for case, (pipeline, *_) in cases.items()}.get(plain)
    if kind == "b":
        return getattr(module("behaviour"), plain, None)
    if kind == "c":
        files = [file for file in (SHARED / "kfp-corpus").rglob("*.yaml") if file.stem == plain]
        return files[0].read_text(encoding="utf-8") if files else None
    if kind.startswith("s"):
        return _loaded(SHARED / "inputs" / "pipelines-brought" / f"{name}.py").pipeline
    return getattr(_loaded(SHARED / "inputs" / "pipelines-on-kfp" / "own.py"), name, None)


def _plain(case: str) -> str:
    return case.replace(":", "").replace(",", "").replace(" ", "_")


def arguments_of(name: str, graph: Graph, folder: Path) -> dict[str, Any]:
    """What the pipeline was given when it was recorded; `folder` is an empty one."""
    cases = {**module("same").CASES, **module("same").KNOWN_BUGS}
    given = {f"t_{_plain(case)}": row[1] for case, row in cases.items()}.get(name, {})
    found = {**usual_arguments(graph), **given, **_GIVEN.get(name, {})}
    if "folder" in graph.inputs.parameters:
        found["folder"] = str(folder)
    return found


@functools.cache
def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"recorded_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def graph_of(name: str) -> Graph | None:
    """The recorded pipeline; None where its source is not among the inputs."""
    text = source_of(name)
    return None if text is None else read(text)


def run_here(graph: Graph, arguments: dict[str, Any], home: Path) -> RunRecord:
    """The record of a run that may fail; errors of the request are raised."""
    try:
        return run(graph, home, arguments, run_id="r")
    except RekindleError:
        if not (home / "runs" / "r").exists():
            raise
        return stored(home, "r")


def left_here(record: RunRecord) -> dict[str, dict[str, Any]]:
    """State and outputs by task, in the record's form."""
    return {
        step.name: {"state": STATES[step.status], "outputs": dict(step.parameters)}
        for step in record.steps
    }


def differences(
    recorded_tasks: dict[str, dict[str, Any]], tasks: dict[str, dict[str, Any]]
) -> list[str]:
    """Where `tasks` are not what KFP gave: their states, and the outputs of those that succeeded.

    Nodes that are no task here (a condition, a turn that never began) are left out, as are places
    in KFP's store."""
    found = []
    for name, expected in recorded_tasks.items():
        if not name or name not in tasks:
            continue
        task = tasks[name]
        if task["state"] != expected["state"]:
            found.append(f"{name}: {expected['state']} on KFP, {task['state']} here")
            continue
        for output, value in expected.get("outputs", {}).items():
            if "/mlpipeline/v2/" not in str(value) and task["outputs"].get(output) != value:
                here = task["outputs"].get(output)
                found.append(f"{name}.{output}: {value!r} on KFP, {here!r} here")
    return found
