"""The notebook as a reader runs it, in a copy, with this Python as its kernel."""

from __future__ import annotations

import ast

import nbformat
import pytest

import rekindle
from rekindle.cli.api import Run
from tests.docs.conftest import NOTEBOOK

LIBRARIES = {"matplotlib", "numpy", "pandas", "rekindle"}


@pytest.fixture(scope="module")
def trees():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    return [ast.parse(cell.source) for cell in notebook.cells if cell.cell_type == "code"]


def _attributes_of(trees, *names):
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
    }


def test_the_notebook_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)


def test_it_imports_rekindle_and_plotting_only(trees):
    imported = {
        alias.name.split(".")[0]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported == LIBRARIES
    assert not [n for t in trees for n in ast.walk(t) if isinstance(n, ast.ImportFrom)]


def test_it_uses_public_names_only(trees):
    assert _attributes_of(trees, "rekindle") <= set(rekindle.__all__)
    used = _attributes_of(trees, "run", "first", "second")
    assert used
    assert not [name for name in used if name.startswith("_") or not hasattr(Run, name)]


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
