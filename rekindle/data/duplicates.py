"""Copies of examples that `data.duplicates` leaves out, in all splits together.

`exact` compares the hash of the content, `folded` that of its text in lower case with single
spaces, `near` what MinHash (Broder 1997) keeps of the runs of five words in such a text: texts that
share a fraction s of theirs are found with a chance of 1 - (1 - s^8)^14, as datatrove's defaults
have it: 0.92 at 0.8, 0.57 at 0.7, 0.05 at 0.5. The first one stays, of train before validation
before test: what a model was trained on does not judge it, and the split that is wanted can be
kept. A copy with another label is one, too.

Memory: `BUCKET_ROWS` hashes at once, and a number for each copy."""

import functools
import hashlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data.examples import (
    HASH_BYTES,
    SPLITS,
    ExamplesFile,
    ExamplesPart,
    ExamplesWriter,
    label_counts,
    open_examples,
)
from rekindle.data.split import READABLE, Entries, by_hash, content_hashes, entries_of
from rekindle.spec.identity import file_sha256

_WORDS, _BANDS, _ROWS = 5, 14, 8
_RANDOM = np.frombuffer(hashlib.shake_128(b"near").digest(8 * (_WORDS + _BANDS * _ROWS)), "<u8")
_WEIGHTS, _FACTORS = _RANDOM[:_WORDS] | np.uint64(1), _RANDOM[_WORDS:]


def drop_copies(
    folder: Path, files: Sequence[ExamplesPart], class_rows: MutableMapping[str, Counter[str]],
    which: str,
) -> list[ExamplesPart]:  # fmt: skip
    """Leave later copies out of the `files` of examples in `folder` and of the counts; returns the
    files as they are then."""
    copies: dict[tuple[int, int], list[int]] = {}
    total = sum(sum(file.batches) for file in files) * (_BANDS if which == "near" else 1)
    hashed = entries_of(folder) if which == "exact" else _folded_entries(folder, which)
    for entries, same in by_hash(folder, total, hashed):
        for entry in entries[1:][same]:
            batch = (int(entry["split"]), int(entry["batch"]))
            copies.setdefault(batch, []).append(int(entry["row"]))
    found, numbers = list[ExamplesPart](), dict.fromkeys(SPLITS, 0)
    for file in files:
        first = numbers[file.split]
        numbers[file.split] += len(file.batches)
        index = SPLITS.index(file.split)
        rows = [copies.get((index, first + number), []) for number in range(len(file.batches))]
        found.append(_without(folder, file, rows, class_rows) if any(rows) else file)
    return found


def _without(
    folder: Path, file: ExamplesPart, rows: Sequence[Sequence[int]],
    class_rows: MutableMapping[str, Counter[str]],
) -> ExamplesPart:  # fmt: skip
    """A file without those rows of each batch; what has a link to it stays as it is."""
    examples, name = ExamplesFile(folder / file.path), file.path.removesuffix(".arrow")
    with tempfile.TemporaryDirectory(prefix=".copies-", dir=folder) as scratch:
        with ExamplesWriter(Path(scratch), examples.schema, (name,)) as writer:
            for batch, dropped in zip(examples, rows, strict=True):
                kept = np.ones(len(batch), bool)
                kept[dropped] = False
                table = pa.table(batch)
                class_rows[file.split] -= Counter(label_counts(table.filter(pa.array(~kept))))
                writer.write(name, table.filter(pa.array(kept)))
        sha256, batches = file_sha256(Path(scratch, file.path)), tuple(writer.batches()[name])
        Path(scratch, file.path).replace(folder / file.path)
    return file.model_copy(update={"batches": batches, "sha256": sha256})


def _folded_entries(folder: Path, which: str) -> Iterator[Entries]:
    names = open_examples(folder, SPLITS[0]).schema.names
    column = next((name for name in READABLE if name in names), None)
    if column is None:  # images have no case
        return entries_of(folder)

    def hashes(values: pa.Array) -> bytes:
        texts = [_folded(each, column) for each in values.to_pylist()]
        return b"".join(map(_bands, texts)) if which == "near" else content_hashes(pa.array(texts))

    return entries_of(folder, column, hashes)


def _bands(text: str) -> bytes:
    """16 bytes for each band of a text's MinHash: near texts have some in common."""
    words = np.array([_word_hash(word) for word in text.split() or [""]], np.uint64)
    weights = _WEIGHTS[: len(words)]
    runs = np.lib.stride_tricks.sliding_window_view(words, len(weights)) @ weights
    least = np.full(len(_FACTORS), np.iinfo(np.uint64).max)
    for start in range(0, len(runs), 1_024):
        mixed = _mixed(runs[start : start + 1_024, None] ^ _FACTORS)
        least = np.minimum(least, mixed.min(0))
    rows = least.reshape(_BANDS, -1)
    return b"".join(
        hashlib.blake2b(bytes([band]) + row.tobytes(), digest_size=HASH_BYTES).digest()
        for band, row in enumerate(rows)
    )


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer (Steele et al. 2014): a random order of numbers, another for each one
    that they were xor-ed with."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


@functools.lru_cache(1 << 16)
def _word_hash(word: str) -> int:
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _folded(value: str, column: str) -> str:
    """A text, or JSON of words or turns, in lower case, white space as one space."""
    parts = [value] if column == "text" else json.loads(value)
    flat = (text for part in parts for text in ([part] if isinstance(part, str) else part))
    return "\0".join(" ".join(text.casefold().split()) for text in flat)
