"""A server is ready only once it answers the rows of the evidence as the model was judged: each of these differs in one thing
whose digest is right, as after a careless copy."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import safetensors.torch

from rekindle.records import Evidence
from tests.serve import models
from tests.serve.servers import Running, running


def another_tokenizer(model: Path) -> None:
    """The numbers of two words are exchanged."""
    path = model / "tokenizer.json"
    told = json.loads(path.read_text())
    words = told["model"]["vocab"]
    words["the"], words["a"] = words["a"], words["the"]
    path.write_text(json.dumps(told))


def other_weights(model: Path) -> None:
    """One bias, by as much as hardly changes a label."""
    path = model / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors["classifier.bias"][0] += 0.05
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


def another_image_processor(model: Path) -> None:
    """Images are read as of another height and width."""
    path = model / "rekindle.json"
    told = json.loads(path.read_text())
    told["settings"]["image_shape"] = [4, 16, 1]
    path.write_text(json.dumps(told))


CASES = {
    "another tokenizer": ("text", another_tokenizer),
    "other weights": ("text", other_weights),
    "other weights of a tagger": ("words", other_weights),
    "another image processor": ("image", another_image_processor),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_model_that_answers_otherwise_is_not_served(tmp_path, name):
    kind, change = CASES[name]
    model = models.made(tmp_path, kind)
    with running(model):
        pass  # as it was judged it is served
    change(Path(model.path))
    size = (4, 16) if kind == "image" else None
    server = Running.of(dataclasses.replace(models.again(model), image_size=size))
    try:
        assert server.ended() == 1
        said = server.log.read_text()
        assert re.search(
            r"error: smoke: to row \d of its test split the model answers .*, and was judged by",
            said,
        ), said
    finally:
        server.stop()


@pytest.mark.slow
def test_without_rows_it_is_served_only_if_that_is_asked_for(tmp_path):
    model = models.made(tmp_path, "image")
    evidence = Evidence.read(model.evidence)
    evidence.model_copy(update={"smoke": None}).write(model.evidence)
    server = Running.of(model)
    try:
        assert server.ended() == 2
        assert "was registered without rows to prove it by" in server.log.read_text()
        assert "pass --no-smoke" in server.log.read_text()
    finally:
        server.stop()
    with running(model, smoke=False) as server:
        assert server.predict(models.contents("image")[0][0], column="image").status_code == 200
        assert "proven by nothing, as you asked" in server.log.read_text()
        for wrong in ("é", "a", "", 3, [[[]]], {"b64": "aGk="}):
            assert server.predict(wrong, column="image").status_code == 400, wrong


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "column"), [("image", "image"), ("words", "tokens")])
def test_images_and_words_are_answered(tmp_path, kind, column):
    model = models.made(tmp_path, kind)
    rows = Evidence.read(model.evidence).smoke.rows
    values = [row.content if kind == "image" else json.loads(row.content) for row in rows]
    with running(model) as server:
        found = server.predict(*values, column=column).json()["predictions"]
        name = "label" if kind == "image" else "tags"
        assert [one[name] for one in found] == [row.answer[name] for row in rows]
        assert len({str(row.answer[name]) for row in rows}) > 1
        data = values if kind == "image" else [json.dumps(words) for words in values]
        body = {
            "inputs": [{"name": column, "shape": [len(data), 1], "datatype": "BYTES", "data": data}]
        }
        outputs = server.client.post("/v2/models/tickets/infer", json=body).json()["outputs"]
        same = outputs[0]["data"] if kind == "image" else list(map(json.loads, outputs[0]["data"]))
        assert same == [one[name] for one in found]
        if kind == "image":
            pixels = models.contents("image")[0][1][:, :, 0].tolist()
            assert server.predict(pixels, column="image").json()["predictions"] == found[:1]
            wrong = {"[[1, 2], [3, 4]]": [[1, 2], [3, 4]], "not base64": "?", "no image": "YQ=="}
            for case, value in wrong.items():
                assert server.predict(value, column="image").status_code == 400, case
        else:
            long = server.predict(["order"] * 40, column="tokens").json()["predictions"][0]
            assert long["truncated"]
            assert long["tags"][-1] is None
            assert server.predict("a text", column="tokens").status_code == 400
