"""rekindle.lock: names of images become digests when a config is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import SpecError
from rekindle.spec import lock
from rekindle.spec.load import load_target
from rekindle.spec.lock import Pin

DIGEST = "sha256:" + "1" * 64
CONFIG = """
name: digits
task: image_classification
data: {source: "sklearn:digits"}
platforms:
  kubeflow: {image: "registry.example.com:5000/team/digits:1"}
  vertex: {image: "europe-docker.pkg.dev/p/r/digits"}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "digits.yaml"
    path.write_text(CONFIG)
    return path


def test_an_image_with_a_pin_is_its_digest_and_others_stay_as_written(config: Path) -> None:
    lock.write(config.parent, {"registry.example.com:5000/team/digits:1": Pin(digest=DIGEST)})
    loaded = load_target(config)
    assert loaded.platforms.kubeflow.image == f"registry.example.com:5000/team/digits@{DIGEST}"
    assert loaded.platforms.vertex.image == "europe-docker.pkg.dev/p/r/digits"
    assert load_target(config, pinned=False).platforms.kubeflow.image == (
        "registry.example.com:5000/team/digits:1"
    )


def test_an_override_is_pinned_too(config: Path) -> None:
    lock.write(config.parent, {"r.example.com/x:2": Pin(digest=DIGEST)})
    loaded = load_target(config, ["platforms.kubeflow.image=r.example.com/x:2"])
    assert loaded.platforms.kubeflow.image == f"r.example.com/x@{DIGEST}"


def test_pins_of_other_images_stay_and_the_same_pins_are_the_same_bytes(tmp_path: Path) -> None:
    lock.write(tmp_path, {"b": Pin(digest=DIGEST, code="0" * 32)})
    both = lock.write(tmp_path, {"a": Pin(digest=DIGEST)}).read_bytes()
    assert lock.read(tmp_path) == {
        "a": Pin(digest=DIGEST),
        "b": Pin(digest=DIGEST, code="0" * 32),
    }
    assert lock.write(tmp_path, {"a": Pin(digest=DIGEST)}).read_bytes() == both


@pytest.mark.parametrize("text", ["images: 1\n", "x: {}\n", "images: {a: {digest: latest}}\n"])
def test_a_file_of_somebody_else_is_refused_by_name(config: Path, text: str) -> None:
    (config.parent / lock.NAME).write_text(text)
    with pytest.raises(SpecError, match=r"rekindle\.lock is not what `rekindle images push`"):
        load_target(config)
