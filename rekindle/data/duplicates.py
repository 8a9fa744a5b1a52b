"""Copies of examples that `data.duplicates` leaves out, in all splits together.

`exact` compares the hash of the content, `folded` that of its text in lower case with single
spaces. The first one stays, of train before validation before test: what a model was trained on
does not judge it, and the split that is wanted can be kept. A copy with another label is one, too.

Memory: `BUCKET_ROWS` hashes at once, and a byte for each row of batches that hold copies."""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, MutableMapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data.examples import BATCH_ROWS, SPLITS, ExamplesWriter, label_counts, open_examples
from rekindle.data.split import READABLE, Entries, by_hash, content_hashes, entries_of


def drop_copies(
    folder: Path, rows: MutableMapping[str, int], class_rows: MutableMapping[str, Counter[str]],
    which: str,
) -> int:  # fmt: skip
    """Leave later copies out of the examples in `folder` and of the counts; returns how many."""
    kept: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
    hashed = _folded_entries(folder) if which == "folded" else entries_of(folder)
    for entries, same in by_hash(folder, sum(rows.values()), hashed):
        for entry in entries[1:][same]:
            batch = (int(entry["split"]), int(entry["batch"]))
            kept.setdefault(batch, np.ones(BATCH_ROWS, bool))[entry["row"]] = False
    if not kept:
        return 0
    before = sum(rows.values())
    schema = open_examples(folder, SPLITS[0]).schema
    with tempfile.TemporaryDirectory(prefix=".copies-", dir=folder) as scratch:
        with ExamplesWriter(Path(scratch), schema) as writer:
            for index, split in enumerate(SPLITS):
                for number, batch in enumerate(open_examples(folder, split)):
                    table = pa.table(batch)
                    mask = kept.get((index, number), np.ones(BATCH_ROWS, bool))[: len(table)]
                    copies = table.filter(pa.array(~mask))
                    rows[split] -= len(copies)
                    class_rows[split] -= Counter(label_counts(copies))
                    writer.write(split, table.filter(pa.array(mask)))
        for split in SPLITS:
            Path(scratch, f"{split}.arrow").replace(folder / f"{split}.arrow")
    return before - sum(rows.values())


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
