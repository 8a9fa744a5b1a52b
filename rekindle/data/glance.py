"""The names of a local source's columns, from the beginning of its first file, and the classes of a
small one: what a config gets wrong is said before a run begins."""

import contextlib
import csv
import glob
import json
import os
import re
from pathlib import Path, PurePosixPath

from rekindle.data.files import delimiter_of, is_visible
from rekindle.data.roles import Columns
from rekindle.errors import RekindleError
from rekindle.spec.model import DataSpec

_FORMATS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
            ".parquet": "parquet"}  # fmt: skip
_HEAD_BYTES, _PROBED_LINES, _MOST_BYTES = 1 << 20, 100, 8 << 20


def column_names(data: DataSpec) -> tuple[str, list[str]] | None:
    """The first file of the source and the names of its columns; None where they are not known."""
    if "://" in data.source or "{window" in data.source:
        return None
    root = os.path.dirname(re.split(r"[*?\[]", data.source)[0]) or "."  # noqa: PTH120
    # Path.glob refuses absolute patterns
    found = sorted(
        path
        for path in glob.glob(data.source, recursive=True)  # noqa: PTH207
        if Path(path).is_file() and (path == data.source or is_visible(os.path.relpath(path, root)))
    )
    if not found:
        return None
    path = Path(found[0])
    kind = _FORMATS.get(path.suffix.lower()) if data.format == "auto" else data.format
    names: list[str] = []
    with contextlib.suppress(OSError, ValueError, csv.Error, ImportError, RecursionError):
        if kind == "parquet":
            import pyarrow.parquet as pq

            names = list(pq.read_schema(path).names)
        elif kind in ("csv", "jsonl"):
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
            lines = head.decode("utf-8-sig", errors="replace").splitlines()  # cut within a letter?
            rows = csv.reader(lines, delimiter=delimiter_of(path.name, head))
            if kind == "csv":
                names = next(filter(None, rows), [])
            else:
                probed = [line for line in lines if line.strip()][:_PROBED_LINES]
                objects = [row for row in map(json.loads, probed) if isinstance(row, dict)]
                names = list(dict.fromkeys(name for row in objects for name in row))
    return (path.name, names) if names else None


def classes(data: DataSpec, modality: str) -> list[str]:
    """The classes of a local source of at most `_MOST_BYTES`, in order, where they are known."""
    from rekindle.data import readers, validate
    from rekindle.data.columns import as_python, scalar_text
    from rekindle.data.files import locate

    found, findings = set[str | None](), validate.Findings()
    with contextlib.suppress(RekindleError, OSError, EOFError, ValueError):
        located = locate(data) if "://" not in data.source else None
        if located is None or sum(file.size for file in located.files) > _MOST_BYTES:
            return []
        if located.format == "images":
            return sorted({PurePosixPath(file.name).parent.name for file in located.files})
        columns: Columns = {data.columns.label: "list" if modality == "words" else "scalar"}
        for file in located.files:
            for raw in readers.READERS[located.format](file, columns, findings):
                for value in map(as_python, raw.columns[data.columns.label]):
                    for each in value if isinstance(value, list) else [value]:
                        found.add(each.decode() if isinstance(each, bytes) else scalar_text(each))
        if not findings:  # else not all rows were read
            return sorted(filter(None, found))
    return []
