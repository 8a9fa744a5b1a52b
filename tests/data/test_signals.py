"""Signals of what a model is given, and the reference that a training leaves of its test split."""

import json
import zlib

import numpy as np
import pyarrow as pa
import pytest

from rekindle.data import signals as module
from rekindle.data.examples import ExamplesWriter, schema_of
from rekindle.data.signals import firsts, reference_of, words_of
from rekindle.modalities import load_modality
from rekindle.modalities.turns import prompt_of


def hashed(*words):
    return frozenset(zlib.crc32(word.encode()) for word in words)


@pytest.mark.parametrize(
    ("modality", "content", "length", "unknown"),
    [
        ("text", "Good MORNING, don't worry", 4.0, 0.25),
        ("words", ["good", "x", "evil"], 2.0, 0.5),  # one letter is no word
        ("document", [("user", "good morning"), ("assistant", "evil day")], 4.0, 0.5),
        ("text", "?!", 0.0, 0.0),
    ],
)
def test_texts_words_and_turns_have_a_length_and_unknown_words(modality, content, length, unknown):
    signals = load_modality(modality).signals
    known = hashed("good", "morning", "don't", "day") - hashed("day")
    assert signals(content, known) == {"length": length, "unknown": unknown}
    assert signals(content, ()) == {"length": length}


def test_scripts_without_spaces_are_known_by_pairs_of_characters():
    """Not by whole sentences, of which each would be an unknown word."""
    signals = load_modality("text").signals
    known = hashed("电池", "池很", "很好", "好", "good")
    assert signals("电池很好，Good", known) == {"length": 5.0, "unknown": 0.0}
    assert signals("屏幕很好", known) == {"length": 4.0, "unknown": 0.5}
    assert signals("とても", ())["length"] == signals("ดีมาก", ())["length"] - 2 == 3.0


def test_images_have_brightness_and_contrast():
    signals = load_modality("image").signals
    pixels = np.array([[[0], [255]], [[0], [255]]], np.uint8)
    assert signals(pixels, ()) == {"brightness": 0.5, "contrast": 0.5}
    assert signals(np.full((4, 4, 3), 51, np.uint8), ()) == {
        "brightness": pytest.approx(0.2),
        "contrast": 0.0,
    }


def written(folder, modality, **splits):
    """A folder of examples with these contents."""
    schema = schema_of(modality, ())
    with ExamplesWriter(folder, schema, tuple(f"{split}-00000" for split in splits)) as writer:
        for split, contents in splits.items():
            rows = [
                {
                    "id": str(i),
                    "hash": bytes(schema.field("hash").type.byte_width),
                    "split": split,
                    **(
                        {}
                        if modality == "document"
                        else {"label": ["a"] if modality == "words" else "a"}
                    ),
                    modality: one,
                }
                for i, one in enumerate(contents)
            ]
            writer.write(f"{split}-00000", pa.Table.from_pylist(rows, schema))
    return folder


def test_the_reference_is_of_rows_that_decide_and_of_training_words(tmp_path):
    test = [f"known {'new ' * i}" for i in range(6)]
    folder = written(tmp_path / "e", "text", train=["Known words", "here known"], test=test)
    keep = np.array([True, True, False, True, False, True])
    found = reference_of(folder, "text", None, keep)
    assert words_of(found) == hashed("known", "words", "here")
    assert found.inputs["length"] == (1, 2, 4, 6)
    assert found.inputs["unknown"] == (0, 0.5, 0.75, 0.8333)
    now = load_modality("text").signals("known other", words_of(found))
    assert now["unknown"] == 0.5


def test_only_the_most_frequent_words_and_few_rows_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_WORDS", 2)
    monkeypatch.setattr(module, "MOST_ROWS", 3)
    texts = ["often often seldom", "often twice twice"]
    folder = written(tmp_path / "e", "text", train=texts, test=["often"] * 50)
    found = reference_of(folder, "text", None, np.ones(50, bool))
    assert words_of(found) == hashed("often", "twice")
    assert len(found.inputs["length"]) == 3


def test_the_reference_of_images_words_and_documents(tmp_path):
    dark, light = (np.full((2, 2, 1), shade, np.uint8).tobytes() for shade in (0, 255))
    images = written(tmp_path / "i", "image", train=[dark], test=[dark, light])
    found = reference_of(images, "image", (2, 2, 1), np.ones(2, bool))
    assert (found.inputs["brightness"], found.words) == ((0, 1), "")
    words = written(
        tmp_path / "w", "words", train=[json.dumps(["old"])], test=[json.dumps(["old", "new"])]
    )
    assert reference_of(words, "words", None, np.ones(1, bool)).inputs == {
        "length": (2,),
        "unknown": (0.5,),
    }
    turns = [["user", "old question"], ["assistant", "an answer that is long"]]
    chats = written(tmp_path / "d", "document", train=[json.dumps(turns)], test=[json.dumps(turns)])
    assert reference_of(chats, "document", None, np.ones(1, bool)).inputs["length"] == (2,)
    nothing = reference_of(
        written(tmp_path / "n", "text", test=["x y"]), "text", None, np.zeros(1, bool)
    )
    assert (nothing.inputs, nothing.words) == ({}, "")


def test_a_document_is_asked_up_to_its_last_answer():
    assert prompt_of([("user", "q"), ("assistant", "a"), ("user", "p"), ("assistant", "b")])[
        -1
    ] == ("user", "p")
    assert prompt_of([("text", "whole")]) == [("text", "whole")]


def test_only_the_first_row_of_each_content_counts():
    assert firsts([b"a", b"b", b"a", b"c", b"b"]).tolist() == [True, True, False, True, False]
    assert firsts([]).tolist() == []
