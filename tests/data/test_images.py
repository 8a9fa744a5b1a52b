"""Images of every kind become uint8 pixels, channels last, or are refused."""

from __future__ import annotations

import io
import json
import os
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image, ImageOps

from rekindle.data.fingerprint import fingerprint
from rekindle.errors import DataError
from rekindle.modalities.pixels import to_pixels
from rekindle.spec.load import load_target
from rekindle.spec.model import ModelSpec, TrainSpec
from tests.data.corpora import all_examples, ingested, text_spec, write_jsonl
from tests.support.data_images import png


def image_folder(root, count=60, shape=(4, 6, 3), change=lambda i, image: image):
    draw = np.random.default_rng(0)
    for i in range(count):
        file = root / ("cat" if i % 2 else "dog") / f"{i}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(change(i, draw.integers(0, 256, shape))))
    return root


def test_a_folder_of_images_takes_its_labels_from_sub_folders(tmp_path):
    image_folder(tmp_path / "photos")
    for beside in ("cat/.DS_Store", "cat/Thumbs.db", "README.txt", "LICENSE"):
        (tmp_path / "photos" / beside).write_bytes(b"x")
    summary = ingested(text_spec(tmp_path / "photos"), tmp_path / "out", modality="image")
    assert (summary.labels, summary.image_shape) == (("cat", "dog"), (4, 6, 3))
    assert sum(summary.rows.values()) == 60
    first = all_examples(tmp_path / "out").to_pylist()[0]
    assert (tmp_path / "photos" / first["id"]).exists()
    expected = np.asarray(Image.open(tmp_path / "photos" / first["id"]))
    assert first["image"] == expected.tobytes()


def test_folders_may_name_the_splits(tmp_path):
    for split, count in (("train", 20), ("val", 8), ("test", 10)):
        image_folder(tmp_path / "p" / split, count, change=lambda i, image, c=count: image // 2 + c)
    data = text_spec(tmp_path / "p", split={"by": "source"})
    summary = ingested(data, tmp_path / "out", modality="image")
    assert summary.rows == {"train": 20, "validation": 8, "test": 10}
    assert summary.labels == ("cat", "dog")


@pytest.mark.parametrize(("size", "shape"), [([8, 5], (8, 5, 3)), (10, (10, 10, 3))])
def test_images_are_scaled_on_request(size, shape, tmp_path):
    """As a config says it."""
    image_folder(tmp_path / "p", change=lambda i, image: image[: 2 + i % 3])
    source = {"channels": [8], "hidden": 16}
    config = {
        "name": "pets",
        "task": "image_classification",
        "model": {"source": source},
        "data": {"source": str(tmp_path / "p"), "image_size": size},
    }
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    summary = ingested(load_target(tmp_path / "c.yaml").data, tmp_path / "out", modality="image")
    assert summary.image_shape == shape


def test_the_same_pixels_in_any_form_are_the_same_examples(tmp_path):
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (80, 5, 5))
    labels = [f"l{i % 2}" for i in range(80)]
    forms = {
        "bytes": [png(image) for image in images],
        "hub": [{"bytes": png(image), "path": None} for image in images],
        "flat": images.reshape(80, -1).tolist(),
        "nested": images.tolist(),
    }
    found = {}
    for name, values in forms.items():
        table = pa.table({"image": values, "label": labels})
        pa.parquet.write_table(table, tmp_path / f"{name}.parquet")
        found[name] = (tmp_path / f"{name}.parquet",)
    for i, image in enumerate(images):
        (tmp_path / f"{i}.png").write_bytes(png(image))
    records = [{"image": f"{i}.png", "label": label} for i, label in enumerate(labels)]
    write_jsonl(tmp_path / "paths.jsonl", records)
    (tmp_path / "paths.csv").write_text(
        "image,label\n" + "".join(f"{r['image']},{r['label']}\n" for r in records)
    )
    numbers = [{"image": v, "label": label} for v, label in zip(forms["flat"], labels, strict=True)]
    write_jsonl(tmp_path / "numbers.jsonl", numbers)
    hashes = {}
    for file in sorted(
        [*tmp_path.glob("*.parquet"), *tmp_path.glob("*.jsonl"), *tmp_path.glob("*.csv")]
    ):
        ingested(text_spec(file), tmp_path / "out", modality="image")
        hashes[file.name] = sorted(all_examples(tmp_path / "out")["hash"].to_pylist())
    assert len(hashes) == 7
    assert all(value == hashes["bytes.parquet"] for value in hashes.values())


def test_the_bundled_digits_are_scaled_to_all_of_a_byte(tmp_path):
    summary = ingested(text_spec("sklearn:digits"), tmp_path, modality="image")
    assert summary.labels == tuple("0123456789")
    assert (summary.image_shape, sum(summary.rows.values())) == ((8, 8, 1), 1_797)
    pixels = {value for image in all_examples(tmp_path)["image"].to_pylist() for value in image}
    assert (min(pixels), max(pixels), len(pixels)) == (0, 255, 17)


def test_alpha_and_grey_join_coloured_images(tmp_path):
    def change(i, image):
        return {0: image, 1: image[:, :, 0], 2: np.concatenate([image, image[:, :, :1]], axis=2)}[
            i % 3
        ]

    image_folder(tmp_path / "p", change=lambda i, image: image if i < 2 else change(i, image))
    assert ingested(text_spec(tmp_path / "p"), tmp_path / "out", modality="image").image_shape == (
        4,
        6,
        3,
    )


def numbers(*values):
    good = [{"image": [[i % 256, 1], [2, 3]], "label": i % 2} for i in range(60)]
    return [*good, *({"image": value, "label": 1} for value in values)]


FAULTY = {
    "not a number": ([[float("nan"), 1], [2, 3]], "whole numbers from 0 to 255"),
    "a fraction": ([[0.5, 1], [2, 3]], "0.5 to 3, not whole"),
    "below zero": ([[-1, 1], [2, 3]], "-1 to 3"),
    "above 255": ([[256, 1], [2, 3]], "1 to 256"),
    "ragged": ([[1], [2, 3]], "no list of numbers of one shape"),
    "another size": ([[1, 2, 3], [4, 5, 6]], "2x3, the first is 2x2"),
    "words": ([["a", "b"], ["c", "d"]], "no list of numbers"),
    "nothing": (None, "cannot be read"),
    "no such file": ("nowhere.png", "cannot be read"),
    "five numbers": ([1, 2, 3, 4, 5], "no square image"),
}


@pytest.mark.parametrize(("value", "message"), FAULTY.values(), ids=list(FAULTY))
def test_a_faulty_image_is_refused_with_its_row(tmp_path, value, message):
    write_jsonl(tmp_path / "x.jsonl", numbers(value))
    with pytest.raises(DataError, match=message) as caught:
        ingested(text_spec(tmp_path / "x.jsonl"), tmp_path / "out", modality="image")
    assert "x.jsonl:61" in str(caught.value)


def test_a_link_to_nothing_in_a_folder_is_refused(tmp_path):
    link = image_folder(tmp_path) / "cat" / "old.png"
    link.symlink_to("gone.png")
    data = text_spec(tmp_path)
    with pytest.raises(DataError, match="this is not a file") as caught:
        fingerprint("image_classification", data, ModelSpec(), TrainSpec(), champion=None)
    assert str(link) in str(caught.value)


def test_a_name_that_is_not_utf8_is_refused(tmp_path):
    """As archives of other systems leave them."""
    for name in (b"1.png", b"\xff.png"):
        path = Path(os.fsdecode(os.fsencode(tmp_path / "a") + b"/" + name))
        path.parent.mkdir(exist_ok=True)
        Image.new("L", (4, 4)).save(path)
    data = text_spec(tmp_path)
    with pytest.raises(DataError, match="the name of a file is not UTF-8") as caught:
        fingerprint("image_classification", data, ModelSpec(), TrainSpec(), champion=None)
    assert caught.value.problems[0].where == r"a/\udcff.png"


def test_faulty_files_are_refused_with_their_names(tmp_path):
    root = image_folder(tmp_path / "p", 200, (4, 4))
    (root / "cat/1.png").write_bytes(b"no image")
    (root / "cat/3.png").write_bytes((root / "cat/3.png").read_bytes()[:50])
    (root / "cat/5.png").write_bytes(png(np.zeros((9, 9))))
    (root / "cat/7.png").write_bytes(png(np.zeros((4, 4, 3))))
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(root / "cat/9.png")
    (root / "stray.png").write_bytes(png(np.zeros((4, 4))))
    with pytest.raises(DataError) as caught:
        ingested(text_spec(root), tmp_path / "out", modality="image")
    told = {p.what: p.where for p in caught.value.problems}
    assert {what.split(" ", 2)[2] for what in told} == {
        "with an image that cannot be read",
        "with an image of another size than the first",
        "with a colour image after grey ones",
        "in no folder that names their class",
    }
    unreadable = next(where for what, where in told.items() if "cannot be read" in what)
    assert all(name in unreadable for name in ("cat/1.png", "cat/3.png", "cat/9.png (mode I;16"))


def turned(image, orientation, odd=False):
    """A JPEG with that orientation, and with a tag of a type that it should not have."""
    entries = [(0x0112, 3, 1, struct.pack("<HH", orientation, 0))]
    entries += [(0x0128, 2, 2, b"2\0\0\0")] * odd  # ResolutionUnit as text
    tags = b"".join(
        struct.pack("<HHI", tag, kind, count) + value for tag, kind, count, value in entries
    )
    tiff = b"II*\0" + struct.pack("<IH", 8, len(entries)) + tags + b"\0" * 4
    sink = io.BytesIO()
    image.save(sink, "jpeg", exif=b"Exif\0\0" + tiff)
    return sink.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_as_their_exif_says_whatever_else_is_in_it(orientation):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8))
    plain = turned(image, orientation)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(plain))))
    assert np.array_equal(to_pixels(plain), expected)
    assert np.array_equal(to_pixels(turned(image, orientation, odd=True)), expected)
