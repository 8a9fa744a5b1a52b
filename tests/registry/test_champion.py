"""The champion is its weights: a registry that was set up again gives out its version numbers again, and nothing that was
learned of the old version 1 counts for the new one."""

import json

import numpy as np
import pytest

from rekindle.errors import RegistryError
from rekindle.records import Evidence, Fingerprint, TrainingSummary
from rekindle.registry.models import Registry, champion_state, fetch_model, promote, register
from rekindle.spec.model import RegisterSpec
from rekindle.train.modelfolder import weights_sha256

DESCRIPTION = {
    "task": "image_classification", "labels": ["0", "1"], "settings": {"image_shape": [8, 8, 1]},
}  # fmt: skip


@pytest.fixture
def registry_in(monkeypatch):
    """An embedded registry in a folder."""
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return lambda folder: Registry(RegisterSpec(), "digits", str(folder))


def model_in(folder, weights):
    """A model folder, whose weights nothing here computes with, and its evidence."""
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "rekindle.json").write_text(json.dumps({**DESCRIPTION, "run_key": weights.hex()}))
    np.save(folder / "trained_on.npy", np.zeros(0, np.uint64))
    return folder


def registered(where, model, **champion):
    """The registration of a model that its evidence says to promote, and the evidence."""
    run_key = json.loads((model / "rekindle.json").read_text())["run_key"]
    evidence = Evidence(
        run_key=run_key, promote=True, reason="better", checks=(), metrics={}, rows=9, examples="e",
        **champion,
    )  # fmt: skip
    path = model.parent / f"{model.name}-evidence.json"
    evidence.write(path)
    known = Fingerprint(
        data="d", window="", files=1, bytes=1, run_key=run_key, work_key=run_key, init_from="base",
        champion=evidence.champion_version, champion_weights=evidence.champion_weights,
    )  # fmt: skip
    training = TrainingSummary(
        run_key=run_key, task="image_classification", engine="native", world_size=1, steps=1, epochs=1,
        global_batch_size=8, seed=0, precision="fp32", parameters=1, init_from="base",
        weights_sha256=weights_sha256(model), train_rows=9, validation={},
    )  # fmt: skip
    return register(where, model, path, known, training, ""), path


def test_a_version_number_that_is_given_out_again_is_another_champion(registry_in, tmp_path):
    first, other, better = (model_in(tmp_path / name, name.encode()) for name in ("1", "2", "3"))
    before, after = registry_in(tmp_path / "before"), registry_in(tmp_path / "after")
    for where, model in ((before, first), (after, other)):
        assert promote(where, *registered(where, model)).version == "1"
    states = [champion_state(where) for where in (before, after)]
    assert [state.version for state in states] == ["1", "1"]
    assert [state.weights for state in states] == [weights_sha256(first), weights_sha256(other)]

    assert weights_sha256(fetch_model(after, "1", states[1].weights)) == states[1].weights
    with pytest.raises(RegistryError, match="version 1 of digits holds other weights than when"):
        fetch_model(after, "1", states[0].weights)
    (fetch_model(before, "1") / "model.safetensors").unlink()
    with pytest.raises(RegistryError, match="are not those that were registered: files are miss"):
        fetch_model(before, "1", states[0].weights)

    stale = {"champion_version": "1", "champion_weights": states[0].weights}
    with pytest.raises(RegistryError, match="version 1, has other weights now than those that"):
        promote(after, *registered(after, better, **stale))
    assert champion_state(after).version == "1"
    fresh = {"champion_version": "1", "champion_weights": states[1].weights}
    assert promote(after, *registered(after, better, **fresh)).version == "2"
    state = champion_state(after)
    assert (state.version, state.beaten, state.beaten_weights) == ("2", "1", states[1].weights)


def test_a_champion_that_does_not_say_its_weights_is_refused(registry_in, tmp_path):
    where = registry_in(tmp_path)
    promote(where, *registered(where, model_in(tmp_path / "model", b"1")))
    with where.open("forget the weights") as client:
        client.delete_model_version_tag("digits", "1", "rekindle.weights_sha256")
    with pytest.raises(RegistryError, match=r"version 1 of digits has no tag rekindle\.weights"):
        champion_state(where)
