"""The server in a container of a platform: where it finds the model, what it refuses; and the proof by any way to it."""

import dataclasses
import shutil
import sys
from pathlib import Path

import pytest

from rekindle.errors import RequestError, StepError
from rekindle.serve.messages import LogTo
from rekindle.serve.smoke import prove
from rekindle.serve.staging import SERVED, stage, staged_in
from rekindle.train.modelfolder import ANY_CODE, digest_of, open_model
from tests.ports import free_port
from tests.quick import first
from tests.serve.models import made, own
from tests.serve.servers import Running

COMMAND = [sys.executable, "-P", "-m", "rekindle.serve.container"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return own(tmp_path_factory.mktemp("own"))


def test_a_staged_version_is_found_again_and_copied_once(model, tmp_path):
    place = stage(model, str(tmp_path))
    assert place == f"{tmp_path}/deployments/tickets/v3-{model.digest[:8]}"
    found = staged_in(tmp_path / place)
    assert dataclasses.replace(found, path="", evidence="") == dataclasses.replace(
        model, path="", evidence=""
    )
    (tmp_path / place / "model" / "task.py").unlink()
    stage(model, str(tmp_path))
    with pytest.raises(RequestError, match="the files of version 3 are not those that were judged"):
        staged_in(tmp_path / place)


def test_a_version_that_is_published_plain_is_staged_again_as_it_is_to_be_served(model, tmp_path):
    hashed = LogTo("s3://lake/predictions", key="id")
    ways = [
        {},
        {"log": hashed},
        {"log": LogTo(hashed.root, "id", text=True)},
        {"precision": "int8"},
    ]
    for way in ways:
        made = dataclasses.replace(model, **way)
        found = staged_in(tmp_path / stage(made, str(tmp_path)))
        assert (found.log, found.precision) == (made.log, made.precision)


def test_a_version_is_staged_with_the_one_in_its_shadow(model, tmp_path):
    shadow = own(tmp_path / "next", version="4")
    place = stage(model.with_shadow(shadow), str(tmp_path))
    assert Path(place).name.startswith("v04-")
    found = staged_in(tmp_path / place)
    assert (found.version, found.shadow.version) == ("04", "4")
    assert (
        Path(found.shadow.path, "task.py").read_bytes() == Path(shadow.path, "task.py").read_bytes()
    )
    Path(found.shadow.path, "task.py").write_text("other")
    with pytest.raises(RequestError, match="the files of version 4 are not those that were judged"):
        staged_in(tmp_path / place)


def test_a_copy_that_was_interrupted_is_completed(model, tmp_path):
    place = stage(model, str(tmp_path))
    (tmp_path / place / SERVED).unlink()
    (tmp_path / place / "model" / "task.py").write_text("half")
    with pytest.raises(RequestError, match="holds no model that `rekindle deploy` put there"):
        staged_in(tmp_path / place)
    assert staged_in(tmp_path / stage(model, str(tmp_path))).version == "3"


@pytest.mark.parametrize(
    "way", first(1, ["AIP_STORAGE_URI", "AZUREML_MODEL_DIR", "REKINDLE_MODEL"])
)
def test_each_platform_s_word_for_the_model_is_understood(model, tmp_path, way):
    place, port = stage(model, str(tmp_path / "root")), free_port()
    where = f"file://{place}" if way == "AIP_STORAGE_URI" else place
    where = str(tmp_path / "root") if way == "AZUREML_MODEL_DIR" else where
    vertex = {"AIP_HTTP_PORT": str(port), "AIP_HEALTH_ROUTE": "/h", "AIP_PREDICT_ROUTE": "/p"}
    server = Running(COMMAND, port, tmp_path, **{way: where}, **vertex)
    try:
        server.ready()
        assert server.client.get("/h").status_code == server.client.get("/ping").status_code == 200
        prove(model, lambda body: server.client.post("/p", json=body).json())
        asked = []
        with pytest.raises(StepError, match="smoke: the server answered"):
            prove(model, lambda body: asked.append(body) or {"error": "no"})
        assert asked == [{"instances": [{"text": "1"}]}]
    finally:
        server.stop()
    assert server.process.returncode == 0


@pytest.mark.slow
def test_damaged_files_and_no_files_end_with_2(model, tmp_path):
    place = stage(model, str(tmp_path))
    (tmp_path / place / "model" / "task.py").write_text("other")
    for named in (place, str(tmp_path / "nothing")):
        server = Running(COMMAND, free_port(), tmp_path, REKINDLE_MODEL=named)
        assert server.ended() == 2
        assert "error: " in server.log.read_text()


@pytest.mark.slow
def test_a_language_model_is_proven_by_what_it_writes(tmp_path):
    model, port = made(tmp_path / "lm", "text-lm"), free_port()
    place = stage(model, str(tmp_path / "root"))
    server = Running(COMMAND, port, tmp_path, REKINDLE_MODEL=place, AIP_HTTP_PORT=str(port))
    try:
        server.ready()
        prove(model, lambda body: server.client.post("/predict", json=body).json())
    finally:
        server.stop()


def test_opening_a_model_of_a_task_of_ones_own_leaves_its_files_alone(model, tmp_path, monkeypatch):
    """Not even bytecode may lie there: the next server would refuse the files."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    copy = shutil.copytree(model.path, tmp_path / "model")
    assert open_model(copy, ANY_CODE).task.modality == "text"
    assert digest_of(copy) == model.digest
