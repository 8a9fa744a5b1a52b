"""What the first rows of a local source tell before a run begins: faults that `ingest` would
refuse, and the classes of a small source."""

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from rekindle.data.files import SourceFile, locate
from rekindle.data.roles import Columns, time_column, wanted_columns
from rekindle.data.validate import Findings
from rekindle.errors import Problem, RekindleError
from rekindle.spec.model import DataSpec

_MOST_BYTES = 8 << 20
_HEAD_BYTES = 256 << 10  # that are read of each file
_MOST_FILES = 16  # of them, evenly spaced
_MOST_IMAGES = 64


@dataclasses.dataclass(frozen=True)
class _Beginning(SourceFile):
    """The first whole rows of a file, which may be `quoted`; nothing is hashed."""

    quoted: bool = False

    @classmethod
    def of(cls, file: SourceFile, *, quoted: bool) -> "_Beginning":
        fields = {field.name: getattr(file, field.name) for field in dataclasses.fields(file)}
        return cls(**fields, quoted=quoted)

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        yield io.BytesIO(self._rows()[0])

    @contextlib.contextmanager
    def open_anywhere(self) -> Iterator[BinaryIO]:
        with self.filesystem.open(self.path, "rb", compression=self._compression()) as stream:
            yield stream

    @property
    def is_part(self) -> bool:
        """Whether the file goes on."""
        return self._rows()[1]

    def _rows(self) -> tuple[bytes, bool]:
        head = self.head(_HEAD_BYTES + 1)
        if len(head) <= _HEAD_BYTES:
            return head, False
        end = head.rfind(b"\n") + 1
        while self.quoted and head.count(b'"', 0, end) % 2:  # inside a value
            end = head.rfind(b"\n", 0, end - 1) + 1
        return head[:end], True


def first_rows(data: DataSpec, modality: str) -> list[Problem]:
    """What `ingest` would refuse in the first rows of a local source's files; with a window, only
    what does not depend on it. The counts are of the rows that were looked at."""
    if "://" in data.source or "{window" in data.source:
        return []
    import numpy as np

    from rekindle.data.normalise import Normaliser
    from rekindle.data.records import read_times
    from rekindle.data.source import FileSource, open_source

    findings, kept = Findings(), 0
    try:
        source = open_source(data, modality)
        if not isinstance(source, FileSource):
            return []
        normaliser, column = Normaliser(data, modality, findings), time_column(data)
        for raw in _batches(source, wanted_columns(data, modality), findings):
            if modality == "image":
                raw = raw.filter(np.arange(len(raw)) < _MOST_IMAGES)
            if column is not None:
                raw = raw.filter(read_times(raw, column, findings)[1])
            if data.window is None and len(raw):
                kept += len(normaliser(raw)[0])
    except RekindleError as error:
        return list(error.problems)
    dropped = data.on_bad_rows == "drop" and findings.droppable and (kept or data.window)
    return [] if dropped else findings.problems()


def _batches(source: Any, columns: Columns, findings: Findings) -> Iterator[Any]:
    """The first rows of some files, beginning with the first one."""
    located = source.files
    images = located.format == "images"
    most = _MOST_IMAGES if images else _MOST_FILES
    files = located.files[:: -(-len(located.files) // most)]
    if images:
        source.files = dataclasses.replace(located, files=files)
        yield from source.read(columns, findings)
        return
    for found in files:
        file, own = _Beginning.of(found, quoted=located.format == "csv"), Findings()
        source.files = dataclasses.replace(located, files=(file,))
        batches = source.read(columns, own)
        yield from itertools.islice(batches, 1) if located.format == "parquet" else batches
        if not (own.cut and file.is_part):  # in the row that the file goes on with
            findings.include(own, own.rows)


def classes(data: DataSpec, modality: str) -> list[str]:
    """The classes of a local source of at most `_MOST_BYTES`, in order, where they are known."""
    from rekindle.data import readers
    from rekindle.data.columns import as_python, scalar_text

    found, findings = set[str | None](), Findings()
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
