"""Models of a registry elsewhere, a real MLflow server: one copy of each below the home, hashed at each use, and removed once
no version with an alias and no deployment has it."""

import tempfile
import uuid

import pytest

from rekindle.cli.main import invoke
from rekindle.errors import ChangedModelError
from rekindle.registry.models import FETCHED, Registry, aliased, champion_state, fetch_model
from rekindle.registry.promotion import promote
from rekindle.serve.messages import WANTED_JSON, ServedModel, Wanted
from rekindle.spec.model import ColumnsSpec, RegisterSpec
from rekindle.train.modelfolder import digest_of
from tests.registry.versions import model_in, registered
from tests.servers.mlflow_server import mlflow_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    with mlflow_server(folder) as url:
        yield url, folder


@pytest.mark.slow
def test_a_model_is_fetched_once_hashed_at_each_use_and_removed_when_nothing_has_it(
    server, tmp_path, monkeypatch
):
    url, folder = server
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    home = tmp_path / "home"
    where = Registry(RegisterSpec(tracking_uri=url), f"m-{uuid.uuid4().hex[:8]}", str(home))
    promote(where, *registered(where, model_in(tmp_path / "1", b"one")))
    first = champion_state(where).digest
    places = [fetch_model(where, "1", first) for _ in range(3)]
    assert len(set(places)) == 1
    assert places[0].is_relative_to(home / FETCHED)
    assert digest_of(places[0]) == first
    assert len([*(home / FETCHED).iterdir()]) == 1
    assert [*temporary.rglob("*.safetensors")] == [], "nothing is left among temporary files"

    (places[0] / "model.safetensors").write_bytes(b"other")  # a copy that was changed is replaced
    assert digest_of(fetch_model(where, "1", first)) == first
    kept = {"champion_version": "1", "champion_digest": first}
    promote(where, *registered(where, model_in(tmp_path / "2", b"two"), **kept))
    second = champion_state(where).digest
    fetch_model(where, "2", second)
    assert aliased(where) == {second}
    assert len([*(home / FETCHED).iterdir()]) == 2

    for original in folder.rglob("model.safetensors"):  # the registry's own files
        original.write_bytes(b"other")
    assert digest_of(fetch_model(where, "2", second)) == second, "the copy is what was proven"
    (fetch_model(where, "2", second) / "model.safetensors").write_bytes(b"third")
    with pytest.raises(ChangedModelError):
        fetch_model(where, "2", second)


def test_gc_keeps_what_a_deployment_has_and_removes_the_rest(tmp_path):
    home = tmp_path / "home"
    for name in ("a" * 32, "b" * 32, "c" * 32 + "-0123abcd"):
        (home / FETCHED / name).mkdir(parents=True)
        (home / FETCHED / name / "model.safetensors").write_bytes(b"x")
    deployed = ServedModel("m", "1", "b" * 32, "p", "", "", ColumnsSpec(), None)
    folder = home / "deployments" / "m" / "local"
    folder.mkdir(parents=True)
    wanted = Wanted(1, "127.0.0.1", 1, (deployed,), {"1": 100})
    (folder / "wanted.json").write_bytes(WANTED_JSON.dump_json(wanted))
    assert invoke(["gc", f"--home={home}", "--yes"]) == 0
    assert [path.name for path in (home / FETCHED).iterdir() if path.name[0] != "."] == ["b" * 32]
    (folder / "wanted.json").write_text("{")  # what it names is not known
    (home / FETCHED / ("d" * 32)).mkdir()
    assert invoke(["gc", f"--home={home}", "--yes"]) == 0
    assert (home / FETCHED / ("d" * 32)).is_dir()
