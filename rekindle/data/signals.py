"""What a model is given, as a few numbers a row, for a monitor to compare over time; and
the same of the rows that judged it, its reference.

Of text: its `length` in words, and the share of them that are `unknown`, that do not
occur in the training split. That share is what finds a new vocabulary, where it is
compared with held-out text: of 200 months in which nothing changed none alarmed at p <
0.01 (docs/monitoring.md). Words are known by their CRC-32, the most frequent ones only.
Of images: `brightness` and `contrast`, mean and deviation of the pixels over the
brightest value. R rows."""

import base64
import collections
import itertools
import json
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rekindle.data.examples import open_examples
from rekindle.records import Reference

MOST_WORDS = 32_768
MOST_ROWS = 2_000
TRAINING_ROWS = 100_000
# scripts without spaces: Thai and Lao, Burmese, Khmer, kana, Han
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
# a word has two letters at least, and may have parts behind apostrophes; of those scripts
# each letter is matched with the next one
_LETTER = rf"(?:(?![{UNSPACED}])\w)"
_WORD = re.compile(rf"{_LETTER}{{2,}}(?:['’]{_LETTER}+)*|[{UNSPACED}](?=([{UNSPACED}]?))")
_BRIGHTEST = 255.0
Shape = tuple[int, ...] | None
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


def signals(content: Any, words: Collection[int]) -> dict[str, float]:
    """Those of a text, a list of words, the turns of a document, or pixels [height,
    width, channels]. `words` are hashes of the known ones; without any, there is no
    `unknown`."""
    if isinstance(content, np.ndarray):
        return {
            "brightness": float(content.mean() / _BRIGHTEST),
            "contrast": float(content.std() / _BRIGHTEST),
        }
    hashes = _hashes(content)
    values = {"length": float(len(hashes))}
    if words:
        unknown = sum(1 for word in hashes if word not in words)
        values["unknown"] = unknown / max(1, len(hashes))
    return values


def words_of(reference: Reference) -> frozenset[int]:
    """The hashes of the words that its model was trained on."""
    return frozenset(np.frombuffer(base64.b64decode(reference.words), "<u4").tolist())


def reference_of(examples: Path, modality: str, shape: Shape, keep_N: np.ndarray) -> Reference:
    """That of the test split in a folder of examples, of at most `MOST_ROWS` of the rows
    that `keep_N` [all rows of the split] says; images have this `shape`."""
    words = frozenset[int]() if modality == "image" else _training_words(examples, modality)
    rows_R = np.flatnonzero(keep_N)
    # evenly spaced, as the rows of a file may lie in the order of their classes or times
    places = np.linspace(0, len(rows_R) - 1, min(MOST_ROWS, len(rows_R))).astype(int)
    sampled_rows = set(rows_R[places].tolist())
    inputs = collections.defaultdict[str, list[float]](list)
    for row, content in enumerate(_contents(examples, "test", modality, shape)):
        if row in sampled_rows:
            for name, value in signals(content, words).items():
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


def _training_words(examples: Path, modality: str) -> frozenset[int]:
    """The most frequent words of the training split's first rows;
    of equals the smaller."""
    counts = collections.Counter[int]()
    for content in itertools.islice(_contents(examples, "train", modality, None), TRAINING_ROWS):
        counts.update(_hashes(content))
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    return frozenset(by_frequency[:MOST_WORDS])


def _contents(examples: Path, split: str, modality: str, shape: Shape) -> Iterator[Any]:
    """What `signals` takes of each row of a split:
    of documents the turns before the answer."""
    if not any(examples.glob(f"{split}-*.arrow")):
        return
    for batch in open_examples(examples, split, modality):
        for value in batch.column(modality).to_pylist():
            if modality == "image":
                yield np.frombuffer(value, np.uint8).reshape(shape or (-1,))
            elif modality == "document":
                yield prompt_of(json.loads(value))
            elif modality == "words":
                yield json.loads(value)
            else:
                yield value


def prompt_of(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The turns of a document that a server of its model is given."""
    answers = [i for i, (role, _) in enumerate(turns) if role in ("assistant", "completion")]
    return turns[: answers[-1]] if answers else turns


def _hashes(content: Any) -> list[int]:
    """The hashes of the words of a text, a list of words, or the turns of a document."""
    parts: Iterable[str | tuple[str, str]] = [content] if isinstance(content, str) else content
    hashes = list[int]()
    for part in parts:
        text = part if isinstance(part, str) else part[1]
        for match in _WORD.finditer(text.lower()):
            word = match[0] + (match[1] or "")  # of unspaced scripts each pair of letters is one
            hashes.append(zlib.crc32(word.encode(errors="replace")))
    return hashes
