"""Copies of examples that `data.duplicates` leaves out, in all splits together.

`exact` compares the hash of the content, `folded` that of its text in lower case with single
spaces. The first one stays, of train before validation before test: what a model was trained on
does not judge it, and the split that is wanted can be kept. A copy with another label is one, too.

Memory: `BUCKET_ROWS` hashes at once, and a number for each copy."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from rekindle.data.examples import (
    SPLITS,
    ExamplesFile,
    ExamplesPart,
    ExamplesWriter,
    label_counts,
    open_examples,
)
from rekindle.data.split import READABLE, Entries, by_hash, content_hashes, entries_of
from rekindle.spec.identity import file_sha256


def drop_copies(
    folder: Path, files: Sequence[ExamplesPart], class_rows: MutableMapping[str, Counter[str]],
    which: str,
) -> list[ExamplesPart]:  # fmt: skip
    """Leave later copies out of the `files` of examples in `folder` and of the counts; returns the
    files as they are then."""
    copies: dict[tuple[int, int], list[int]] = {}
    hashed = _folded_entries(folder) if which == "folded" else entries_of(folder)
    total = sum(sum(file.batches) for file in files)
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


def _folded_entries(folder: Path) -> Iterator[Entries]:
    names = open_examples(folder, SPLITS[0]).schema.names
    column = next((name for name in READABLE if name in names), None)
    if column is None:  # images have no case
        return entries_of(folder)

    def hashes(values: pa.Array) -> bytes:
        return content_hashes(pa.array([_folded(each, column) for each in values.to_pylist()]))

    return entries_of(folder, column, hashes)


def _folded(value: str, column: str) -> str:
    """A text, or JSON of words or turns, in lower case, white space as one space."""
    parts = [value] if column == "text" else json.loads(value)
    flat = (text for part in parts for text in ([part] if isinstance(part, str) else part))
    return "\0".join(" ".join(text.casefold().split()) for text in flat)
