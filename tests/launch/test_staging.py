"""Artifacts between their URIs and a node's disk: files and folders, on disks and in S3."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from rekindle.errors import StorageError
from rekindle.launch import staging
from tests.support.refusing_store import refusing_root


@pytest.fixture(scope="module")
def bucket():
    """One server for all: fsspec keeps the client that it made first."""
    pytest.importorskip("moto", reason="moto[server] is a developer's dependency")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
    ):
        assert server.stderr is not None
        found = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in server.stderr)
        patch.setenv("AWS_ENDPOINT_URL", next(match[0] for match in found if match))
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        store = fsspec.filesystem("s3", skip_instance_cache=True)
        store.clear_instance_cache()  # other tests of this process had stores of their own
        store.mkdir("store")
        yield
        server.terminate()


@pytest.fixture(params=["file", "s3", "minio"])
def root(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/store"
    request.getfixturevalue("bucket")
    return f"{request.param}://store/{tmp_path.name}"


def test_an_artifact_comes_back_as_it_was_stored(root, tmp_path):
    folder = tmp_path / "model"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "a b.txt").write_text("1")
    (folder / "top.bin").write_bytes(bytes(range(256)))
    file = tmp_path / "data.csv"
    file.write_text("x,y")
    staging.store(folder, f"{root}/model")
    staging.store(file, f"{root}/data")
    staging.fetch(f"{root}/model", tmp_path / "back")
    staging.fetch(f"{root}/data", tmp_path / "data-back")
    assert _content(tmp_path / "back") == _content(folder)
    assert (tmp_path / "data-back").read_text() == "x,y"


def test_what_an_earlier_attempt_left_is_gone(root, tmp_path):
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").write_text(name)
        staging.store(tmp_path / name, f"{root}/model")
    staging.fetch(f"{root}/model", tmp_path / "back")
    assert _content(tmp_path / "back") == {"new.txt": b"new"}


def test_what_does_not_exist_stays_so(root, tmp_path):
    staging.fetch(f"{root}/nothing", tmp_path / "back")
    staging.store(tmp_path / "nowhere", f"{root}/nothing")
    assert not (tmp_path / "back").exists()
    with pytest.raises(FileNotFoundError):
        staging.read_text(f"{root}/nothing")
    staging.write_text(f"{root}/said", "é")
    assert staging.read_text(f"{root}/said") == "é"


def test_a_step_gets_places_on_its_node_and_its_artifacts_go_where_they_were_planned(tmp_path):
    (tmp_path / "in").write_text("input")
    names = ("model", "elsewhere", "endpoint")
    uris = {name: f"file://{tmp_path}/out/{name}" for name in names}
    given = {
        "inputs": {
            "artifacts": {"data": {"artifacts": [{"uri": f"file://{tmp_path}/in"} for _ in "ab"]}}
        },
        "outputs": {
            "parameters": {"n": {"outputFile": "/tmp/kfp/n"}},
            "artifacts": {n: {"artifacts": [{"name": n, "uri": uri}]} for n, uri in uris.items()},
        },
    }
    before = json.dumps(given)
    here = staging.localised(given, tmp_path / "node")
    assert json.dumps(given) == before
    several = [Path(one["uri"]) for one in here["inputs"]["artifacts"]["data"]["artifacts"]]
    assert [path.read_text() for path in several] == ["input", "input"]
    assert len(set(several)) == 2
    assert here["inputs"]["parameterValues"] == {}
    place = Path(here["outputs"]["artifacts"]["model"]["artifacts"][0]["uri"])
    assert place.is_relative_to(tmp_path / "node")
    place.parent.mkdir(parents=True)
    place.write_text("model")
    kind = {"schema_title": "system.Model", "schema_version": "0.0.1"}
    made = {
        "model": {**kind, "uri": str(place), "metadata": {"a": 1}},
        "elsewhere": {**kind, "uri": "hf://its/own", "metadata": {}},
        "endpoint": {**kind, "uri": "projects/1/endpoints/2", "metadata": {}},
    }
    output = staging.delivered(made, given)
    assert (tmp_path / "out" / "model").read_text() == "model"
    (model,) = output["model"]["artifacts"]
    assert (model["uri"], model["metadata"]) == (uris["model"], {"a": 1})
    assert model["type"] == {"schemaTitle": "system.Model", "schemaVersion": "0.0.1"}
    assert output["elsewhere"]["artifacts"][0]["uri"] == "hf://its/own"
    assert output["endpoint"]["artifacts"][0]["uri"] == "projects/1/endpoints/2"
    read = {"inputs": {"artifacts": {"endpoint": output["endpoint"]}}}
    given = staging.localised(read, tmp_path / "reader")["inputs"]["artifacts"]["endpoint"]
    assert given["artifacts"][0]["uri"] == "projects/1/endpoints/2"


def test_a_store_that_refuses_an_artifact_names_it(tmp_path):
    (tmp_path / "model").write_text("model")
    uri = f"{refusing_root()}/model"
    with pytest.raises(StorageError) as refused:
        staging.store(tmp_path / "model", uri)
    (problem,) = refused.value.problems
    assert problem.what == "the artifact cannot be written: PermissionError: Access Denied"
    assert problem.where == uri


def _content(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_kfps_own_store_has_an_endpoint_and_keys_of_its_own(bucket, tmp_path):
    """fsspec reads them when it is imported, and what is S3 at AWS goes elsewhere."""
    program = (
        "import sys; from rekindle.launch import staging; "
        "staging.write_text('minio://store/own/said', 'a'); "
        "print(staging.read_text('minio://store/own/said'))"
    )
    environment = {
        **os.environ,
        "FSSPEC_MINIO_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"],
        "FSSPEC_MINIO_KEY": "k",
        "FSSPEC_MINIO_SECRET": "s",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "",
    }
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "a", done.stderr
