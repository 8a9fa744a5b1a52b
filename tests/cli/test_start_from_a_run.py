"""`model.init_from: run:ID` stands for the model that the run made, and for no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.app.prepared import with_model_of_run
from rekindle.errors import RequestError
from rekindle.platforms.local.content import describe, digest
from rekindle.records import ArtifactRecord, RunRecord, StepRecord
from rekindle.spec.load import load_target

CONFIG = """
name: m
task: image_classification
data: {source: "sklearn:digits"}
model: {init_from: "run:one"}
train: {lr: 1e-4}
"""


def test_a_model_that_changed_since_its_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    spec, model = load_target(tmp_path / "c.yaml"), tmp_path / "home" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"weights")
    artifact = ArtifactRecord(
        uri=str(model), schema_title="system.Model", digest=digest(describe(model))
    )
    step = StepRecord(name="finetune", artifacts={"network": artifact})
    RunRecord(
        run_id="one", name="m", platform="local", status="succeeded", started_at="", steps=(step,)
    ).write(tmp_path / "home" / "runs" / "one" / "run.json")
    assert with_model_of_run(spec, tmp_path / "home").model.init_from == str(model)
    (model / "model.safetensors").write_bytes(b"weighty")
    with pytest.raises(RequestError, match="the model of the run one changed on disk"):
        with_model_of_run(spec, tmp_path / "home")
