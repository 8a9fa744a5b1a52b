"""What a training starts from, learns from or imports: files that changed are another work, or refused."""

import pytest

from rekindle.data.fingerprint import content_behind, fingerprint
from rekindle.errors import DataError
from rekindle.registry.models import Registry, starting_weights
from rekindle.spec.model import DataSpec, ModelSpec, RegisterSpec, TrainSpec


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"one")
    return tmp_path / "model"


def key_of(**model):
    found = fingerprint(
        "image_classification",
        DataSpec(source="sklearn:digits"),
        ModelSpec.model_validate(model),
        TrainSpec(lr=1e-3),
        champion=None,
    )
    return found.run_key


@pytest.mark.parametrize("field", ["init_from", "teacher"])
def test_other_files_in_the_same_folder_are_another_training(folder, field):
    named = (
        {"init_from": str(folder)} if field == "init_from" else {"teacher": {"source": str(folder)}}
    )
    before = key_of(**named)
    assert key_of(**named) == before
    (folder / "model.safetensors").write_bytes(b"two")
    assert key_of(**named) != before


def test_a_start_that_changed_since_the_run_began_is_refused(folder, tmp_path):
    where = Registry(RegisterSpec(), "m", str(tmp_path))
    seen = content_behind(str(folder))
    assert starting_weights(where, str(folder), seen) == str(folder)
    (folder / "model.safetensors").write_bytes(b"two")
    with pytest.raises(DataError, match="changed since the run began"):
        starting_weights(where, str(folder), seen)
