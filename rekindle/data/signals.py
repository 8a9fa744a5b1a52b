"""What a model is given, as a few numbers a row, for a monitor to compare over time; and
the same of the rows that judged it, its reference.

The numbers are the signals of its modality (`Modality.signals`). Of what is written: its
`length` in words, and the share of them that are `unknown`, that do not occur in the
training split. That share is what finds a new vocabulary, where it is compared with
held-out text: of 200 months in which nothing changed none alarmed at p < 0.01
(docs/monitoring.md). Words are known by their hashes, the most frequent ones only. R rows."""

import base64
import collections
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rekindle.data.examples import open_examples
from rekindle.modalities import load_modality
from rekindle.modalities.base import Modality, Shape, Written
from rekindle.modalities.vocabulary import word_hashes
from rekindle.records import Reference

MOST_WORDS = 32_768
MOST_ROWS = 2_000
TRAINING_ROWS = 100_000
LOGGED = pa.schema(
    {
        "id": pa.string(),
        "time": pa.timestamp("us", "UTC"),
        "version": pa.string(),
        "model": pa.string(),
        "seconds": pa.float64(),
        "label": pa.string(),
        "probability": pa.float64(),
        "value": pa.float64(),
        "length": pa.float64(),
        "unknown": pa.float64(),
        "brightness": pa.float64(),
        "contrast": pa.float64(),
        "hash": pa.string(),
        "text": pa.string(),
    }.items()
)
"""Columns of a log of predictions."""


def words_of(reference: Reference) -> frozenset[int]:
    """The hashes of the words that its model was trained on."""
    return frozenset(np.frombuffer(base64.b64decode(reference.words), "<u4").tolist())


def reference_of(
    examples: Path, modality: str, shape: Shape | None, keep_N: np.ndarray
) -> Reference:
    """That of the test split in a folder of examples, of at most `MOST_ROWS` of the rows
    that `keep_N` [all rows of the split] says; images have this `shape`."""
    kind = load_modality(modality)
    words = frozenset[int]()
    if isinstance(kind, Written):
        words = _training_words(examples, kind)
    rows_R = np.flatnonzero(keep_N)
    # evenly spaced, as the rows of a file may lie in the order of their classes or times
    places = np.linspace(0, len(rows_R) - 1, min(MOST_ROWS, len(rows_R))).astype(int)
    sampled_rows = set(rows_R[places].tolist())
    inputs = collections.defaultdict[str, list[float]](list)
    for row, content in enumerate(_contents(examples, "test", kind, shape)):
        if row in sampled_rows:
            for name, value in kind.signals(content, words).items():
                inputs[name].append(round(value, 4))
    packed = base64.b64encode(np.array(sorted(words), "<u4").tobytes()).decode()
    return Reference(words=packed, inputs={name: tuple(values) for name, values in inputs.items()})


def firsts(hashes: Sequence[bytes]) -> NDArray[np.bool_]:
    """bool [rows]: whether a row is the first one with its content. Copies tell a monitor
    nothing that the first one does not."""
    contents_before = set[bytes]()
    first_N = np.zeros(len(hashes), bool)
    for row, content in enumerate(hashes):
        first_N[row] = content not in contents_before
        contents_before.add(content)
    return first_N


def _training_words(examples: Path, modality: Written[Any]) -> frozenset[int]:
    """The most frequent words of the training split's first rows;
    of equals the smaller."""
    counts = collections.Counter[int]()
    for content in itertools.islice(_contents(examples, "train", modality, None), TRAINING_ROWS):
        counts.update(word_hashes(modality.texts(content)))
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    return frozenset(by_frequency[:MOST_WORDS])


def _contents(
    examples: Path, split: str, modality: Modality[Any, Any], shape: Shape | None
) -> Iterator[Any]:
    """What a request for each row of a split would hold."""
    if not any(examples.glob(f"{split}-*.arrow")):
        return
    name = modality.field.name
    for batch in open_examples(examples, split, name):
        for value in batch.column(name).to_pylist():
            yield modality.content(value, shape)
