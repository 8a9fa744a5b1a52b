"""Model folders of nothing but bytes, their evidence and versions."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import numpy as np

from rekindle.records import Evidence, Fingerprint, TrainingSummary
from rekindle.registry.models import Registry, register
from rekindle.spec.model import RegisterSpec
from rekindle.train.modelfolder import digest_of, weights_sha256

DESCRIPTION = {
    "task": "image_classification",
    "labels": ["0", "1"],
    "settings": {"image_shape": [8, 8, 1]},
}


@functools.cache
def _empty_database() -> bytes:
    """An embedded registry that holds nothing: making one takes seconds."""
    with tempfile.TemporaryDirectory() as home:
        with Registry(RegisterSpec(), "none", home).open("make it"):
            pass
        return (Path(home) / "mlflow.db").read_bytes()


def registry_in(folder):
    """An embedded registry in a folder."""
    folder.mkdir(exist_ok=True)
    (folder / "mlflow.db").write_bytes(_empty_database())
    return Registry(RegisterSpec(), "digits", str(folder))


def model_in(folder, weights):
    """A model folder, whose weights nothing here computes with, and its evidence."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "rekindle.json").write_text(json.dumps({**DESCRIPTION, "run_key": weights.hex()}))
    np.save(folder / "trained_on.npy", np.zeros(0, np.uint64))
    return folder


def registered(where, model, judged=None, code="", better=True, **champion):
    """The registration of a model that its evidence says to promote if it is `better`, and the evidence; of the model
    in the folder `judged`, if it is given."""
    run_key = json.loads((model / "rekindle.json").read_text())["run_key"]
    evidence = Evidence(
        run_key=run_key,
        model_digest=digest_of(judged or model),
        promote=better,
        reason="judged",
        metrics={},
        rows=9,
        examples="e",
        **{"checks": (), **champion},
    )
    path = model.parent / f"{model.name}-evidence.json"
    evidence.write(path)
    known = Fingerprint(
        data="d",
        window="",
        files=1,
        bytes=1,
        run_key=run_key,
        work_key=run_key,
        init_from="base",
        champion=evidence.champion_version,
        champion_digest=evidence.champion_digest,
    )
    training = TrainingSummary(
        run_key=run_key,
        task="image_classification",
        engine="native",
        world_size=1,
        steps=1,
        epochs=1,
        global_batch_size=8,
        seed=0,
        precision="fp32",
        parameters=1,
        init_from="base",
        weights_sha256=weights_sha256(model),
        train_rows=9,
        validation={},
    )
    return register(where, model, path, known, training, "", code), path
