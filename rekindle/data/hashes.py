"""Hashes of records, however their values come in batches: `fingerprint` asks what lies in a
window, and `ingest` holds what it reads against that."""

import contextlib
import hashlib
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.data.columns import RawBatch, as_python, content_of, texts
from rekindle.data.roles import Columns, Kind
from rekindle.data.split import content_views
from rekindle.data.validate import Findings
from rekindle.spec.identity import digest


class RecordsHash:
    """Hash of the values of some columns, and the number of `rows`."""

    def __init__(self, columns: Columns) -> None:
        self.rows = 0
        self._columns = {name: _ColumnHash(columns[name]) for name in sorted(columns)}

    def update(self, raw: RawBatch) -> None:
        """Take in a batch."""
        self.rows += len(raw)
        for name, column in self._columns.items():
            column.update(raw, name)

    def digest(self) -> str:
        """The hash of all rows so far."""
        return digest([[name, column.digest()] for name, column in self._columns.items()])


class _ColumnHash:
    """Hash of a column's values, one after the other, however they come in batches."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._present, self._lengths, self._bytes = (hashlib.sha256() for _ in range(3))

    def update(self, raw: RawBatch, column: str) -> None:
        """Take in the column's values of a batch."""
        if self._kind == "image":
            values = pa.array([_image_bytes(raw, v) for v in raw.columns[column]], pa.binary())
        elif self._kind == "list":
            plain = map(as_python, raw.columns[column])
            lists = [json.dumps(value, sort_keys=True, default=repr) for value in plain]
            values = pa.array(lists, pa.string())
        else:
            values = texts(raw, column, self._kind, Findings()).values
        self._present.update(np.asarray(values.is_valid(), np.uint8).tobytes())
        values = values.fill_null(b"" if self._kind == "image" else "")
        self._lengths.update(np.asarray(pc.binary_length(values), np.int32).tobytes())
        self._bytes.update(b"".join(content_views(values)))

    def digest(self) -> str:
        """The hash of all values so far."""
        return "".join(part.hexdigest() for part in (self._present, self._lengths, self._bytes))


def _image_bytes(raw: RawBatch, value: Any) -> bytes:
    with contextlib.suppress(OSError, ValueError):  # `ingest` says so
        value = content_of(raw, value)
    return value if isinstance(value, bytes) else repr(value).encode()
