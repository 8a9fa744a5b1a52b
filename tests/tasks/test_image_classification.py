"""Networks for images: residual ones beside the small one, in the same folder format."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from rekindle.errors import RequestError
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks.image_classification import ImageClassification
from tests.quick import first

TASK = ImageClassification()
LABELS = ("cat", "dog", "owl")


def images(side, depth, count=4):
    draw = np.random.default_rng(0)
    raw = [draw.integers(0, 256, side * side * depth, np.uint8).tobytes() for _ in range(count)]
    return pa.table({"pixels": pa.array(raw, pa.binary())})


def resnet(name):
    return ModelSpec(source={"architecture": name})


@pytest.mark.parametrize(
    ("name", "depth", "parameters"),
    first(
        1, [("resnet18", 1, 11_171_779), ("resnet34", 3, 21_286_211), ("resnet50", 3, 23_514_179)]
    ),
)
def test_a_residual_network_has_the_shape_of_the_paper_and_keeps_it(
    name, depth, parameters, tmp_path
):
    """Parameters of the original with 3 classes: 25,557,032 - 2,049,000 + 6,147 for ResNet-50."""
    settings = {"image_shape": [32, 32, depth]}
    TASK.check(DataSpec(source="x"), resnet(name))
    torch.manual_seed(0)
    network = TASK.build(resnet(name), LABELS, settings, tmp_path).eval()
    assert sum(p.numel() for p in network.parameters()) == parameters
    assert not list(network.buffers()), "no running statistics: they would differ by rank"
    inputs = TASK.collate(images(32, depth), settings)
    scores = TASK.logits(network, inputs)
    assert scores.shape == (4, 3)
    alone = [TASK.logits(network, {"pixels": inputs["pixels"][i : i + 1]}) for i in range(4)]
    assert torch.allclose(torch.cat(alone), scores, atol=1e-5)
    TASK.save(network, tmp_path, LABELS, settings)
    assert torch.equal(TASK.logits(TASK.load(tmp_path), inputs), scores)


def test_convolutions_see_channels_last(tmp_path):
    network = TASK.build(resnet("resnet18"), LABELS, {"image_shape": [32, 32, 3]}, tmp_path)
    seen = []
    first = next(m for m in network.modules() if isinstance(m, torch.nn.Conv2d))
    first.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    TASK.logits(network, TASK.collate(images(32, 3), {"image_shape": [32, 32, 3]}))
    assert seen == [True]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"architecture": "resnet51"}, "resnet18 or resnet34 or resnet50"),
        ({"architecture": "keras:resnet50"}, "not a network"),
        ({"architecture": "resnet50", "hidden": 3}, "not a network"),
        ({"channels": [3], "depth": 1}, r"unknown keys \['depth'\]"),
    ],
)
def test_a_network_that_cannot_be_built_is_refused(source, said):
    with pytest.raises(RequestError, match=said):
        TASK.check(DataSpec(source="x"), ModelSpec(source=source))


def test_images_too_small_for_a_residual_network_are_refused_early_or_late(tmp_path):
    with pytest.raises(RequestError, match="28 x 28 pixels are too small"):
        TASK.check(DataSpec(source="x", image_size=(28, 28)), resnet("resnet18"))
    with pytest.raises(RequestError, match="8 x 8 pixels are too small"):
        TASK.build(resnet("resnet18"), LABELS, {"image_shape": [8, 8, 1]}, tmp_path)


def test_the_small_network_is_as_it_was(tmp_path):
    settings = {"image_shape": [8, 8, 1]}
    torch.manual_seed(0)
    network = TASK.build(
        ModelSpec(source={"channels": [8], "hidden": 16}), LABELS, settings, tmp_path
    )
    assert list(network.state_dict())[:2] == ["0.weight", "0.bias"]
    TASK.save(network.eval(), tmp_path, LABELS, settings)
    assert json.loads((tmp_path / "config.json").read_text())["classes"] == 3
    inputs = TASK.collate(images(8, 1), settings)
    assert torch.equal(TASK.logits(TASK.load(tmp_path), inputs), TASK.logits(network, inputs))
