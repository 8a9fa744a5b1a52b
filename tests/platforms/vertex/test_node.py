"""What a replica runs needs nothing but Python, and keeps the exit code."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.platforms.vertex import node as bundle

NODES = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}


def node(folder: Path, script: str, rank: int = 0, **task: Any) -> subprocess.CompletedProcess[str]:
    """Run a node whose Python has no packages, of a shell step with the output `model`."""
    model = {"name": "m", "type": {}, "uri": str(folder / "place" / "model"), "metadata": {}}
    outputs = {"parameters": {}, "artifacts": {"model": {"artifacts": [model]}}, "outputFile": "/x"}
    told = {
        "source": "",
        "command": ["sh", "-c", script],
        "args": [{"ref": ["outputs", "artifacts", "model", "path"]}],
        "env": {"OWN": "own"},
        "outputs": {
            "parameters": {},
            "artifacts": {"model": {"schema_title": "system.Model", "schema_version": "0.0.1"}},
        },
        "pip": {"needed": [], "runtime": [], "options": []},
        "secrets": {},
        "gpus": 4,
        "executor_input": {"inputs": {"parameterValues": {}, "artifacts": {}}, "outputs": outputs},
        "facts": {},
        "run": "projects/1/locations/l/pipelineJobs/r",
        "region": "l",
        "watch_seconds": 60,
        "secret": "5" * 64,
        **task,
    }
    command = bundle.write(folder / "attempt", told)
    assert bundle.folder_of(tuple(command)) == folder / "attempt"
    kind = {"type": "workerpool1" if rank else "workerpool0", "index": 0}
    environment = {
        "PATH": "/usr/bin:/bin",
        "GCE_METADATA_HOST": "127.0.0.1:9",
        "CLUSTER_SPEC": json.dumps({**NODES, "task": kind}),
    }
    return subprocess.run(
        [sys.executable, "-I", "-S", command[-1]],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


def left(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "attempt" / name).read_text())
    return found


def test_a_node_needs_no_package(tmp_path: Path) -> None:
    done = node(tmp_path, 'echo "$REKINDLE_RENDEZVOUS $OWN"; printf hi > "$0"')
    assert done.returncode == 0, done.stderr
    place, _, own = done.stdout.strip().rpartition(" ")
    assert own == "own"
    assert json.loads(place) == {
        "nodes": 2,
        "node_rank": 0,
        "ranks_per_node": 4,
        "address": "a",
        "port": 1,
        "patience_seconds": 900.0,
        "secret": "5" * 64,
        "job": "",
    }
    assert (tmp_path / "place" / "model").read_text() == "hi"
    assert left(tmp_path, "ended-0.json") == {"exit_code": 0, "error": ""}
    assert left(tmp_path, "result.json")["artifacts"]["model"]["schema_title"] == "system.Model"


def test_a_node_that_is_not_the_first_leaves_its_word_only(tmp_path: Path) -> None:
    done = node(tmp_path, 'printf hi > "$0"', rank=1)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "place").exists()
    assert not (tmp_path / "attempt" / "result.json").exists()
    assert left(tmp_path, "ended-1.json") == {"exit_code": 0, "error": ""}


@pytest.mark.parametrize("code", [1, 75])
def test_the_exit_code_of_the_step_is_that_of_the_node(code: int, tmp_path: Path) -> None:
    assert node(tmp_path, f"exit {code}").returncode == code
    assert left(tmp_path, "ended-0.json")["exit_code"] == code
    assert not (tmp_path / "attempt" / "result.json").exists()


def test_what_travels_is_for_python_3_10() -> None:
    for module in bundle.MODULES:
        path = bundle.PACKAGE / Path(*module.split(".")).with_suffix(".py")
        ast.parse(path.read_text(), feature_version=(3, 10))


def test_a_node_that_lacks_an_input_says_so(tmp_path: Path) -> None:
    done = node(tmp_path, "true", args=[{"ref": ["inputs", "artifacts", "data", "path"]}])
    assert done.returncode == 1
    assert "the artifact `data`, which was not given" in left(tmp_path, "ended-0.json")["error"]
