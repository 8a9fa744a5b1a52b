"""What tests share with platforms/azureml/test_compile.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.azureml.compile import compile, identifiers
from rekindle.platforms.azureml.section import AzureMLSpec
from rekindle.platforms.submission import Definition
from tests.platforms.local.runs import content, module
from tests.servers.azure.jobs import Workspace
from tests.support.moto import can_mount

SAME, BEHAVIOUR = module("same"), module("behaviour")


IMAGE = "lake.azurecr.io/train@sha256:" + "0" * 64


def compiled(made: Any, arguments: dict[str, Any] | None = None, **place: Any) -> Definition:
    text = made if isinstance(made, str) else compile_function(made)
    settings = AzureMLSpec(**{"image": IMAGE, **place})
    return compile(text, read(text), arguments or {}, settings)


def stored(made: Definition, folder: Path) -> Path:
    """The files where they belong; the job's."""
    for name, code in made.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(code)
    (job,) = folder.glob("*.azureml.yaml")
    return job


def job_of(made: Definition) -> dict[str, Any]:
    (name,) = (name for name in made.files if name.endswith(".azureml.yaml"))
    found: dict[str, Any] = yaml.safe_load(made.files[name])
    return found


def validated(file: Path) -> dict[str, Any]:
    """What Azure's own code sends for the job."""
    pytest.importorskip("azure.ai.ml", reason="azure-ai-ml is a developer's dependency")
    from azure.ai.ml import load_job

    job = load_job(str(file))
    result = job._validate()  # the public one wants a workspace
    assert result.passed, result.error_messages
    sent: dict[str, Any] = job._to_rest_object().as_dict()
    return sent


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    if not can_mount():
        pytest.skip("this machine lets us mount nothing")
    (tmp_path / "runs").mkdir()
    return Workspace(tmp_path / "runs", {"PYTHONPATH": str(Path(__file__).parents[2])})


def what_came_of_it(done: dict[str, Path]) -> dict[str, Any]:
    found = {}
    for name, home in done.items():
        result = json.loads((home / "outputs" / "rekindle_result" / "result.json").read_text())
        if "skipped" not in result:
            artifacts = {
                n: [a["schema_title"], a["metadata"], content(_place(home, n))]
                for n, a in result["artifacts"].items()
            }
            found[name] = [result["parameters"], artifacts]
    return found


def _place(home: Path, artifact: str) -> Path:
    """The files of an artifact; Azure's names are small."""
    (folder,) = (
        f for f in (home / "outputs").iterdir() if f.name == identifiers({artifact: None})[artifact]
    )
    return folder / "data"
