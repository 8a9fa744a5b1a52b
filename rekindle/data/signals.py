"""What a model is given, as a few numbers a row, for a monitor to compare over time; and the same
of the rows that judged it, its reference.

Of text: its `length` in words, and the share of them that are `unknown`, that do not occur in the
training split. That share is what finds a new vocabulary, where it is compared with held-out text:
of 200 months in which nothing changed none alarmed at p < 0.01 (docs/monitoring.md). Words are
known by their CRC-32, the most frequent ones only. Of images: `brightness` and `contrast`, mean and
deviation of the pixels over the brightest value. R rows."""

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

MOST_WORDS, MOST_ROWS, TRAINING_ROWS = 32_768, 2_000, 100_000
# scripts without spaces: Thai and Lao, Burmese, Khmer, kana, Han
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
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
    """Those of a text, a list of words, the turns of a document, or pixels [height, width,
    channels]. `words` are hashes of the known ones; without any, there is no `unknown`."""
    if isinstance(content, np.ndarray):
        found = content.mean() / _BRIGHTEST, content.std() / _BRIGHTEST
        return dict(zip(("brightness", "contrast"), map(float, found), strict=True))
    hashes = _hashes(content)
    known = {"length": float(len(hashes))}
    if words:
        unknown = sum(one not in words for one in hashes)
        known["unknown"] = unknown / max(1, len(hashes))
    return known


def words_of(reference: Reference) -> frozenset[int]:
    """The hashes of the words that its model was trained on."""
    return frozenset(np.frombuffer(base64.b64decode(reference.words), "<u4").tolist())


def reference_of(examples: Path, modality: str, shape: Shape, keep_N: np.ndarray) -> Reference:
    """That of the test split in a folder of examples, of at most `MOST_ROWS` of the rows that
    `keep_N` [all rows of the split] says; images have this `shape`."""
    words = frozenset[int]() if modality == "image" else _training_words(examples, modality)
    rows_R = np.flatnonzero(keep_N)
    rows_R = rows_R[np.linspace(0, len(rows_R) - 1, min(MOST_ROWS, len(rows_R))).astype(int)]
    wanted, found = set(rows_R.tolist()), collections.defaultdict[str, list[float]](list)
    for row, content in enumerate(_contents(examples, "test", modality, shape)):
        if row in wanted:
            for name, value in signals(content, words).items():
                found[name].append(round(value, 4))
    packed = base64.b64encode(np.array(sorted(words), "<u4").tobytes()).decode()
    return Reference(words=packed, inputs={name: tuple(each) for name, each in found.items()})


def firsts(hashes: Sequence[bytes]) -> NDArray[np.bool_]:
    """bool [rows]: whether a row is the first one with its content. Copies tell a monitor nothing
    that the first one does not."""
    seen, first_N = set[bytes](), np.zeros(len(hashes), bool)
    for row, content in enumerate(hashes):
        first_N[row] = content not in seen
        seen.add(content)
    return first_N


def _training_words(examples: Path, modality: str) -> frozenset[int]:
    """The most frequent ones of the first rows of the training split; of equals the smaller."""
    counts = collections.Counter[int]()
    for content in itertools.islice(_contents(examples, "train", modality, None), TRAINING_ROWS):
        counts.update(_hashes(content))
    return frozenset(sorted(counts, key=lambda one: (-counts[one], one))[:MOST_WORDS])


def _contents(examples: Path, split: str, modality: str, shape: Shape) -> Iterator[Any]:
    """What `signals` takes, of each row of a split; of documents what stands before the answer."""
    if not any(examples.glob(f"{split}-*.arrow")):
        return
    for batch in open_examples(examples, split, modality):
        for value in batch.column(modality).to_pylist():
            if modality == "image":
                yield np.frombuffer(value, np.uint8).reshape(shape or (-1,))
            elif modality == "document":
                yield prompt_of(json.loads(value))
            else:
                yield json.loads(value) if modality == "words" else value


def prompt_of(turns: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The turns of a document that a server of its model is given."""
    answered = [i for i, (role, _) in enumerate(turns) if role in ("assistant", "completion")]
    return turns[: answered[-1]] if answered else turns


def _hashes(content: Any) -> list[int]:
    parts: Iterable[str] = [content] if isinstance(content, str) else content
    texts = (part if isinstance(part, str) else part[1] for part in parts)
    found = (match for text in texts for match in _WORD.finditer(text.lower()))
    words = (match[0] + (match[1] or "") for match in found)  # of those scripts each pair is one
    return [zlib.crc32(word.encode(errors="replace")) for word in words]
