"""The notebooks as a reader runs them, in a copy, with this Python as their kernel."""

from __future__ import annotations

import ast
import re

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager

import rekindle
from rekindle.app.api import Run
from rekindle.records import Deployment
from rekindle.report.ledger import path_of, turns
from tests.docs.conftest import DEPLOYED, NOTEBOOK, PLANNED, PLATFORMS, WATCHED

PLOTTING = {"matplotlib", "numpy", "pandas"}


@pytest.fixture(
    scope="module",
    params=[NOTEBOOK, PLANNED, PLATFORMS, DEPLOYED, WATCHED],
    ids=lambda path: path.stem,
)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def trees(path):
    notebook = nbformat.read(path, as_version=4)
    shell = TransformerManager()  # `!rekindle ...`
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return [ast.parse(shell.transform_cell(source)) for source in code]


def _attributes_of(trees, *names):
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    }


def test_a_notebook_is_committed_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_it_imports_rekindle_and_plotting_only(path, trees):
    imported = {
        alias.name.split(".")[0]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    more = {n.module for t in trees for n in ast.walk(t) if isinstance(n, ast.ImportFrom)}
    if path == PLATFORMS:
        assert (imported, more) == (
            {"rekindle", "subprocess", "sys"},
            {"IPython.display", "pathlib"},
        )
    elif path == DEPLOYED:
        standard = {"json", "threading", "time", "urllib"}
        assert (imported, more) == (
            {"rekindle", "matplotlib", "pandas", *standard},
            {"sklearn.datasets"},
        )
    elif path == WATCHED:
        assert (imported, more) == ({"rekindle", "json", "matplotlib", "pandas"}, set())
    else:
        assert (imported, more) == ({"rekindle", *PLOTTING}, set())


def test_it_uses_public_names_only(trees):
    assert _attributes_of(trees, "rekindle") <= set(rekindle.__all__)
    runs = _attributes_of(trees, "run", "first", "second", "sent")
    plans = _attributes_of(trees, "plan", "each", "late")
    deployments = _attributes_of(trees, "deployment")
    assert runs | plans | deployments
    kinds = ((runs, Run), (plans, rekindle.Forecast))
    assert deployments <= set(Deployment.model_fields)
    for names, kind in kinds:
        assert not [name for name in names if name.startswith("_") or not hasattr(kind, name)]


@pytest.mark.slow
def test_it_runs_and_the_second_candidate_replaces_the_first(executed):
    folder, notebook = executed
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 3
    first, second = rekindle.runs(folder / ".rekindle")
    assert (first.model["version"], second.model["version"]) == ("1", "2")
    assert first.metrics["accuracy"] < second.metrics["accuracy"] > 0.95
    assert second.gate["promoted"]
    assert second.gate["champion_version"] == "1"
    ran = {step.name for step in second.record.steps if not step.cached}
    assert {"ingest", "shard"}.isdisjoint(ran)


@pytest.mark.slow
def test_a_plan_shows_itself_as_the_command_line_does(executed_plan):
    folder, notebook = executed_plan
    outputs = [out.get("data", {}) for c in notebook.cells for out in c.get("outputs", [])]
    plan, table, rejected, *_ = [data["text/html"] for data in outputs if "text/html" in data]
    assert plan.startswith("<pre")
    assert "█" in plan
    assert "on demand" in plan
    assert "<th>shard 8</th>" in table
    assert "reason" in rejected
    assert sum("image/png" in data for data in outputs) == 1
    assert list(folder.glob(".rekindle")) == []


@pytest.mark.slow
def test_a_pipeline_is_compiled_for_all_and_submitted_to_a_server_that_runs_it(executed_platforms):
    folder, notebook = executed_platforms
    outputs = [out for c in notebook.cells for out in c.get("outputs", [])]
    printed = "".join(out.get("text", "") for out in outputs)
    shown = [str(out.get("data", {})) for out in outputs]
    for file in (
        "word-count.yaml",
        "word-count.vertex.json",
        "word-count.sagemaker.json",
        "word-count.azureml.yaml",
    ):
        assert (folder / "compiled" / file).is_file()
        assert f"compiled/{file}" in printed
    assert any("text/markdown" in data and "| azureml |" in data for data in shown)
    assert re.search(r"kubeflow:\n.*\bcount +cached .*\n.*\bmost +runs again", printed)
    assert "6 words, 4 of them different" in printed
    (run,) = rekindle.runs(folder / ".rekindle")
    assert (run.status, run.record.platform) == ("succeeded", "kubeflow")


@pytest.mark.slow
def test_a_deployment_rolls_out_and_back_under_requests(executed_deployment):
    folder, notebook = executed_deployment
    outputs = [out for c in notebook.cells for out in c.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1
    champion = rekindle.champion("digits", folder / ".rekindle")
    assert [change.version for change in champion.history] == ["1", "2", "1"]
    assert champion.change.reason == "to see how it looks"
    assert champion.serves_at == (), "the last cell ended it"
    printed = "".join(out.get("text", "") for out in outputs)
    assert "digits is not deployed any more" in printed


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_months_are_watched_and_explained_as_they_come(executed_watch):
    folder, notebook = executed_watch
    outputs = [out for c in notebook.cells for out in c.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 1
    decided = turns(path_of(folder / ".rekindle", "reviews"))
    expected = ["refused", "", "promoted", "", "refused", "", "promoted", "", "refused", "", ""]
    gates = {run.id: run.gate["decision"] for run in rekindle.runs(folder / ".rekindle")}
    assert [gates.get(one.run_id, "") for one in decided] == expected, "what the text says"
    assert decided[-1].because.startswith("the data have not changed")
    champion = rekindle.champion("reviews", folder / ".rekindle")
    assert [change.version for change in champion.history] == ["2", "4"]
