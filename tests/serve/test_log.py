"""What a real server logs of its predictions, and that it serves on where it cannot."""

import dataclasses
import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rekindle.modalities import load_modality
from rekindle.records import Evidence
from rekindle.serve import log
from rekindle.serve.inputs import Inputs
from rekindle.serve.log import PredictionLog
from rekindle.serve.messages import LogTo
from rekindle.serve.smoke import instance_of, proof_contents
from rekindle.serve.wire import predict
from rekindle.train.modelfolder import open_model
from tests.monitor.watched import texts, watched
from tests.serve import models
from tests.serve.servers import running


def rows_in(folder):
    files = sorted((folder / "tickets").rglob("*.parquet"))
    return [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]


@pytest.mark.slow
def test_each_answer_is_logged_with_its_id_and_signals_and_no_text(tmp_path):
    model, asked = watched(tmp_path / "m", tmp_path / "log"), texts(40, seed=3)
    proof = Evidence.read(model.evidence).smoke.rows[0].content
    with running(model) as server:
        body = {"instances": [{"body": text, "id": f"r{i}"} for i, text in enumerate(asked)]}
        answers = server.client.post("/predict", json=body).json()["predictions"]
        tensor = {"name": "body", "shape": [1], "datatype": "BYTES", "data": ["word01 neu01"]}
        infer = {"id": "one", "inputs": [tensor]}
        assert server.client.post("/v2/models/tickets/infer", json=infer).status_code == 200
        without = {
            "instances": [{"body": "no id", "id": None}]
        }  # which is not one that is called None
        assert server.client.post("/predict", json=without).status_code == 200
        assert server.predict(proof).status_code == 200
        assert server.client.post("/predict", json={"instances": [{"body": ""}]}).status_code == 400
        pid = server.process.pid
        server.until(lambda: rows_in(tmp_path / "log"))  # without the server's end
        assert server.predict("late", "later").status_code == 200
        os.kill(pid, signal.SIGTERM)
        assert server.ended() == 0
    rows = rows_in(tmp_path / "log")
    assert sorted(row["id"] for row in rows) == sorted(
        [f"r{i}" for i in range(40)] + ["one", "", "", ""]
    )
    by = {row["id"]: row for row in rows}
    for i, (text, answer) in enumerate(zip(asked, answers, strict=True)):
        row = by[f"r{i}"]
        assert (row["label"], row["probability"]) == (answer["label"], answer["probability"])
        words = text.split()
        assert row["length"] == len(words)
        assert row["unknown"] == pytest.approx(
            sum(word.startswith("neu") for word in words) / len(words)
        )
        assert (row["model"], row["version"], row["text"]) == (model.digest, "3", None)
    assert by["one"]["unknown"] == 0.5
    assert len({row["hash"] for row in rows}) == len(
        {*asked, "word01 neu01", "no id", "late", "later"}
    )


@pytest.mark.slow
def test_a_log_that_takes_nothing_costs_no_answer_and_is_counted(tmp_path, monkeypatch, caplog):
    (tmp_path / "log").write_text("a file")
    model = watched(tmp_path / "m", tmp_path / "log")
    with running(model) as server:
        assert server.predict("a text").status_code == 200
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.ended() == 0
        assert "predictions cannot be logged at" in server.log.read_text()
    monkeypatch.setattr(log, "MOST_ROWS", 5)
    kept = PredictionLog(model.log, model, load_modality("text"))
    kept.put([], ["x"] * 8, [{"label": "other", "probability": 0.5}] * 8, 0.1)
    assert kept.dropped == 3
    kept.close(1)


def test_contents_that_wait_are_bounded_in_bytes(tmp_path, monkeypatch):
    """A queue of images would else take gigabytes where the storage is away."""
    monkeypatch.setattr(log, "MOST_BYTES", 10 * 3 * 8 * 8)
    (tmp_path / "log").write_text("a file")
    model = models.made(tmp_path / "m", "image")
    kept = PredictionLog(LogTo(str(tmp_path / "log"), ""), model, load_modality("image"))
    for _ in range(4):
        pixels = [np.zeros((8, 8, 3), np.uint8)] * 4
        kept.put([], pixels, [{"label": "other", "probability": 0.5}] * 4, 0.1)
    assert kept.dropped == 6
    kept.close(1)


def test_keys_are_logged_as_labels_have_them(tmp_path):
    """A column of numbers with a gap comes as 17.0, and its labels as 17 or 17.0."""
    model = watched(tmp_path / "m", tmp_path / "log")
    inputs = Inputs.of(model, open_model(Path(model.path), model.code))
    rows = [{"body": "a text", "id": key} for key in (17.0, 18, True, "x", 1.5, None)]
    asked = predict(json.dumps({"instances": rows}).encode(), {}, inputs, None)
    assert asked.ids == ["17", "18", "true", "x", "1.5", ""]


def test_images_are_scaled_as_the_version_was_trained(tmp_path):
    """Also where the config of today has another size."""
    model = dataclasses.replace(models.made(tmp_path / "m", "image"), image_size=(16, 16))
    inputs = Inputs.of(model, open_model(Path(model.path), model.code))
    assert (inputs.question.size, inputs.question.shape) == ((8, 8), (8, 8, 1))


def test_texts_are_kept_only_where_they_are_wanted(tmp_path):
    model = watched(tmp_path / "m", tmp_path / "log")
    for text, wanted in ((True, "the text"), (False, None)):
        folder = tmp_path / f"log-{text}"
        kept = PredictionLog(LogTo(str(folder), "", text), model, load_modality("text"))
        kept.put([], ["the text"], [{"label": "other", "probability": 0.5}], 0.1)
        kept.close()
        assert [row["text"] for row in rows_in(folder)] == [wanted]


@pytest.mark.parametrize("kind", ["text", "words", "image", "chat"])
def test_rows_that_prove_a_deployment_are_no_requests_whatever_they_hold(kind, tmp_path):
    """The proofs of a deployment elsewhere come as requests do; the evidence has images as base64, and words as JSON."""
    model = models.made(tmp_path / "m", kind)
    inputs = Inputs.of(model, open_model(Path(model.path), model.code))
    rows = Evidence.read(model.evidence).smoke.rows
    requested = inputs.contents([instance_of(row, inputs) for row in rows])
    others = {
        "text": "no proof",
        "words": ["no", "proof"],
        "image": np.zeros((8, 8, 1), np.uint8),
        "chat": [("user", "no proof")],
    }
    to = LogTo(str(tmp_path / "log"), "")
    kept = PredictionLog(to, model, inputs.modality, proof_contents(model, inputs))
    contents = [*requested, others[kind]]
    kept.put([], contents, [{"label": "other", "probability": 0.5}] * len(contents), 0.1)
    kept.close()
    assert len(rows_in(tmp_path / "log")) == 1


def test_the_end_writes_all_that_waits_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "FILE_ROWS", 3)
    monkeypatch.setattr(log, "FLUSH_SECONDS", 60)
    model = watched(tmp_path / "m", tmp_path / "log")
    kept = PredictionLog(model.log, model, load_modality("text"))
    contents = [f"text {i}" for i in range(8)]
    kept.put([], contents, [{"label": "other", "probability": 0.5}] * 8, 0.1)
    kept.close()
    assert (len(rows_in(tmp_path / "log")), kept.dropped) == (8, 0)
