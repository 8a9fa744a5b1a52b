"""The names of a local source's columns, from the beginning of its first file: what a config gets
wrong is said before a run begins. What cannot be told in an instant is left to `ingest`."""

from __future__ import annotations

import contextlib
import csv
import glob
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from rekindle.data.files import is_visible
from rekindle.spec.model import DataSpec

_FORMATS = {".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl",
            ".parquet": "parquet"}  # fmt: skip
_HEAD_BYTES, _PROBED_LINES = 1 << 20, 100


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
            names = (_of_csv if kind == "csv" else _of_json)(lines, path)
    return (path.name, names) if names else None


def _of_csv(lines: list[str], path: Path) -> list[str]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    return next(filter(None, csv.reader(lines, delimiter=delimiter)), [])


def _of_json(lines: Iterable[str], path: Path) -> list[str]:
    names: dict[str, None] = {}
    for line in [line for line in lines if line.strip()][:_PROBED_LINES]:
        row = json.loads(line)
        if isinstance(row, dict):
            names |= dict.fromkeys(row)
    return list(names)
