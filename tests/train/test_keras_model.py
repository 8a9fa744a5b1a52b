"""A model.keras as a network of PyTorch: what it answers, and what is refused."""

import os
import sys
import zipfile

import numpy as np
import pytest
import torch

from rekindle.errors import StepError
from rekindle.train.keras_model import load_keras

SHAPE = (8, 6, 3)


@pytest.fixture(scope="module")
def keras():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERAS_BACKEND", "torch")
        return pytest.importorskip("keras", reason="the extra `keras` is not installed")


@pytest.fixture
def saved(keras, tmp_path):
    """Writes a network that ends with these layers; returns it and its file."""

    def save(*last, shape=SHAPE):
        layers = keras.layers
        first = [keras.Input(shape), layers.Conv2D(4, 3), layers.Flatten(), layers.Dropout(0.9)]
        model = keras.Sequential([*first, *last])
        model.save(tmp_path / "model.keras")
        return model, tmp_path / "model.keras"

    return save


def images(count=5):
    return torch.rand(count, SHAPE[2], *SHAPE[:2]) * 2 - 1


@pytest.mark.slow
def test_scores_and_probabilities_mean_the_same(keras, saved):
    pixels = images()
    model, file = saved(keras.layers.Dense(7))
    scores = load_keras(file, SHAPE, 7)(pixels).detach()
    theirs = np.asarray(model.predict(pixels.permute(0, 2, 3, 1).numpy(), verbose=0))
    np.testing.assert_allclose(scores, theirs, atol=1e-5)
    for last in (keras.layers.Softmax(), keras.layers.Activation("softmax")):
        keras.Sequential([*model.layers, last]).save(file)
        found = load_keras(file, SHAPE, 7)(pixels).detach()
        np.testing.assert_allclose(found.softmax(1), scores.softmax(1), atol=1e-6)


@pytest.mark.slow
def test_a_subclassed_or_functional_model_is_taken_as_well(keras, tmp_path):
    pixels = keras.Input(SHAPE, name="pixels")
    flat = keras.layers.Flatten()(pixels)
    out = keras.layers.Concatenate()([keras.layers.Dense(1)(flat), keras.layers.Dense(2)(flat)])
    keras.Model(pixels, out).save(tmp_path / "model.keras")
    assert load_keras(tmp_path / "model.keras", SHAPE, 3)(images()).shape == (5, 3)


def test_other_shapes_and_classes_are_refused(keras, saved):
    _, file = saved(keras.layers.Dense(7))
    with pytest.raises(StepError, match=r"cannot compute images of 9 x 6 x 3 .*dense") as refused:
        load_keras(file, (9, 6, 3), 7)
    assert "\x1b" not in str(refused.value)
    assert "from images [B, H, W, D], -1 to 1, to [B, C] scores" in refused.value.problems[0].fix
    with pytest.raises(StepError, match=r"gives \[8, 7\] for 8 images of 6 classes"):
        load_keras(file, SHAPE, 6)


def test_several_outputs_are_refused(keras, tmp_path):
    pixels = keras.Input(SHAPE)
    flat = keras.layers.Flatten()(pixels)
    outputs = [keras.layers.Dense(2)(flat), keras.layers.Dense(2)(flat)]
    keras.Model(pixels, outputs).save(tmp_path / "model.keras")
    with pytest.raises(StepError, match="cannot compute images"):
        load_keras(tmp_path / "model.keras", SHAPE, 2)


def test_code_that_a_file_brings_is_not_run(keras, saved, tmp_path):
    ran = tmp_path / "ran"
    code = f"lambda x: (__import__('pathlib').Path({str(ran)!r}).touch(), x)[1]"
    _, file = saved(keras.layers.Dense(7), keras.layers.Lambda(eval(code)))
    ran.unlink(missing_ok=True)
    with pytest.raises(StepError, match="Lambda"):
        load_keras(file, SHAPE, 7)
    assert not ran.exists()


def test_a_layer_that_only_the_script_knows_is_refused(keras, tmp_path):
    @keras.saving.register_keras_serializable("mine")
    class Mine(keras.layers.Layer):
        def call(self, inputs):
            return inputs

    layers = [keras.Input(SHAPE), keras.layers.Flatten(), Mine(), keras.layers.Dense(7)]
    keras.Sequential(layers).save(tmp_path / "model.keras")
    del keras.saving.get_custom_objects()["mine>Mine"]  # as in another process
    with pytest.raises(StepError, match="Mine"):
        load_keras(tmp_path / "model.keras", SHAPE, 7)


def test_what_is_no_model_is_refused(keras, tmp_path):
    file = tmp_path / "model.keras"
    for content in (b"", b"PK\x03\x04 cut off"):
        file.write_bytes(content)
        with pytest.raises(StepError, match="is no whole model of Keras 3"):
            load_keras(file, SHAPE, 7)


def test_a_file_that_unpacks_to_far_more_is_not_read(tmp_path):
    file = tmp_path / "model.keras"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("config.json", bytes(100 << 20))
    with pytest.raises(StepError, match="would unpack to 104,857,600 bytes"):
        load_keras(file, SHAPE, 7)


def test_a_softmax_that_was_rounded_is_one(keras, tmp_path):
    for seed in range(8):
        keras.utils.set_random_seed(seed)
        first = [keras.Input(SHAPE), keras.layers.Flatten(dtype="mixed_bfloat16")]
        last = keras.layers.Dense(2, activation="softmax", dtype="mixed_bfloat16")
        keras.Sequential([*first, last]).save(tmp_path / "model.keras")
        assert load_keras(tmp_path / "model.keras", SHAPE, 2).probabilities, seed


def test_keras_is_named_where_it_is_missing(monkeypatch, saved):
    _, file = saved(sys.modules["keras"].layers.Dense(7))
    monkeypatch.setitem(sys.modules, "keras", None)
    with pytest.raises(StepError, match=r"needs Keras, which is not installed") as refused:
        load_keras(file, SHAPE, 7)
    assert "rekindle[keras]" in refused.value.problems[0].fix


def test_what_scripts_want_of_keras_is_left_to_them(keras, saved, monkeypatch):
    _, file = saved(keras.layers.Dense(7))
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    load_keras(file, SHAPE, 7)
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


def test_a_process_whose_keras_computes_on_another_framework_is_told(keras, saved, monkeypatch):
    _, file = saved(keras.layers.Dense(7))
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(StepError, match="Keras is on jax in this process"):
        load_keras(file, SHAPE, 7)
