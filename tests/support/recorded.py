"""What tests share with conformance/test_recorded.py: pipelines that a real KFP ran, and what it gave.

The table (one line a task) was recorded from KFP 2.17.0 on 2026-11-29. It lies beside the checkout with
the pipelines that people brought, as KFP's samples do (samples.py); tests skip without them.
`recorded_values.json` holds the core of it, and its pipelines are in pipelines/typed.py."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
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
from tests.support.values import arguments as usual_arguments

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

# how a recorded pipeline may differ here, and why; the tasks that do not differ are compared anyway
DOCUMENTED = "KFP's documentation and kfp.local have it as a run here does"
SUCCEEDS_HERE = "KFP fails for a fault of its own, which the step here does not meet"
SPECIFIC = "times, names of runs and places of stores are each platform's own"
NO_MORE = "after a failure nothing begins here, while KFP's parallel parts go on"
EXCEPTIONS = {
    "b_containers": "KFP knows neither Concat nor defaults in arguments of containers (VB11)",
    "b_nan": f"NaN as an output (VB6): {SUCCEEDS_HERE}",
    "b_odd": f"a lone surrogate (VB6): {SUCCEEDS_HERE}",
    "b_one_turn_fails": NO_MORE,
    "b_undecidable": NO_MORE,
    "c_components_with_optional_artifacts": f"optional artifacts (VB16), gs:// without a network: {SUCCEEDS_HERE}",
    "c_conditional_producer_and_consumers": f"Collected behind a condition (VB4): {SUCCEEDS_HERE}",
    "c_parameters_complex": f"Collected of nested loops is a list of lists (VA2): {DOCUMENTED}",
    "c_pipeline_producer_consumer": f"Collected of nested loops is a list of lists (VA2): {DOCUMENTED}",
    "c_pipeline_with_multiple_exit_handlers": NO_MORE,
    "c_pipeline_with_nested_loops": f"a loop over a field of an item (VB9): {SUCCEEDS_HERE}",
    "k7c_default": f"defaults in arguments of containers (VB11): {SUCCEEDS_HERE}",
    "k7e_facts": f"placeholders inside of a text (VA12): {DOCUMENTED}; {SPECIFIC}",
    "k7f_ignore_two": SPECIFIC,
    "k7g_ignore_reads": f"the default where the producer failed (VA8): {DOCUMENTED}",
    "k7h_ignore_behind": f"KFP takes no such pipeline (VB12): {SUCCEEDS_HERE}",
    "k7i_importers": f"importers of https:// (VB13): {SUCCEEDS_HERE}",
    "k7j_importer_gs": "there was no network to read gs:// by",
    "k7k_importer_minio": f"KFP's store wraps lists and mappings in metadata (VA10): {DOCUMENTED}",
    "k8b_retry": f"KFP 2.17.0 retries nothing (VB2): {SUCCEEDS_HERE}",
    "k8c_retry": f"KFP 2.17.0 retries nothing (VB2): {SUCCEEDS_HERE}",
    "s1_uri": f"an s3:// URI of another store (VB10): {SUCCEEDS_HERE}",
    "s2_facts": f"placeholders inside of a text (VA12): {DOCUMENTED}; {SPECIFIC}",
    "s5_vertex": f"importers of https:// (VB13): {SUCCEEDS_HERE}",
    "t_OneOf_over_artifacts": f"the class of an artifact is its own (VA9): {DOCUMENTED}",
    "t_artifact_as_a_return_value": f"the class of an artifact is its own (VA9): {DOCUMENTED}",
    "t_artifacts_and_metadata": f"the class of an artifact is its own (VA9): {DOCUMENTED}",
    "t_branch_on_formatted_text": f"a nested pipeline gets the text, not its placeholders (VA1): {DOCUMENTED}",
    "t_loop_over_nothing": f"Collected of nothing (VB4): {SUCCEEDS_HERE}",
    "t_loops_over_what_was_given": f"a loop over a field of an item (VB9): {SUCCEEDS_HERE}",
    "t_names_that_are_ours_elsewhere": f"the class of an artifact is its own (VA9): {DOCUMENTED}",
    "t_nested_pipelines": f"the class of an artifact is its own (VA9): {DOCUMENTED}",
    "t_optional_parameter_into_a_nested_pipeline": f"optional through two levels (VB8): {SUCCEEDS_HERE}",
    "t_text_of_200_KB": f"templates over 131,072 bytes (VB3): {SUCCEEDS_HERE}",
    "v10_nan": f"NaN as an output (VB6): {SUCCEEDS_HERE}",
    "v15_fquote": f"a quotation mark in an f-string (VB5): {SUCCEEDS_HERE}",
    "v5_null": NO_MORE,
    "v7_fstrings": f"a quotation mark in an f-string (VB5): {SUCCEEDS_HERE}",
    "v8_outputs": f"a DEL in a text (VB7): {SUCCEEDS_HERE}",
}
# what is refused here before it runs, and KFP takes
REFUSED = {
    "k7m_plain": "fields of a pod as variables: there is no pod here",
    "s6_escape": "json_escape[0] is a placeholder that only Vertex AI fills in",
    "s7_fstring": "KFP's compiler writes an input that does not exist; KFP fails as well",
}
# recorded, but their sources are not among what lies beside the checkout
WITHOUT_SOURCE = re.compile(r"k10_\d+|k7x_\w+|t_OneOf_again_cached|v12c_text|v8c_outputs")


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    """The rows of the table, of KFP and of a run here, as they were recorded."""
    if not TABLE.exists():
        return ()
    return tuple(json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines())


@functools.cache
def recorded() -> dict[str, dict[str, dict[str, Any]]]:
    """What KFP gave, by pipeline and task; "" stands for the pipeline itself."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in table():
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
