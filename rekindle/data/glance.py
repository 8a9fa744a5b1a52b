"""What the first rows of a source tell before a run begins: faults that `ingest` would refuse, and
the classes of a small source."""

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from rekindle.data.files import Files, SourceFile
from rekindle.data.roles import Columns, time_column, wanted_columns
from rekindle.data.validate import Findings, note_single_class
from rekindle.errors import Problem, RekindleError
from rekindle.spec.model import DataSpec, MustPass

_MOST_BYTES = 8 << 20
_HEAD_BYTES = 256 << 10  # that are read of each file
_MOST_FILES = 16  # evenly spaced
_MOST_IMAGES = 64
_MOST_FAR = 4  # files or images that do not lie here
_MOST_JUDGED = 1_000  # of the examples that a task looks at


@dataclasses.dataclass(frozen=True)
class _Beginning(SourceFile):
    """The first whole lines of a file; nothing is hashed."""

    def head(self, size: int) -> bytes:
        return super().head(min(size, _HEAD_BYTES + 1))

    @contextlib.contextmanager
    def open(self, head: bytes = b"") -> Iterator[BinaryIO]:
        head = self.head(_HEAD_BYTES)
        yield io.BytesIO(head[: head.rfind(b"\n") + 1] if self.is_part else head)

    @contextlib.contextmanager
    def open_anywhere(self) -> Iterator[BinaryIO]:
        with self.filesystem.open(self.path, "rb", compression=self.compression) as stream:
            yield stream

    @property
    def is_part(self) -> bool:
        """Whether the file goes on."""
        return len(self.head(_HEAD_BYTES + 1)) > _HEAD_BYTES


def _source(data: DataSpec, modality: str, *, far: bool = False) -> Any:
    """A source of files, here or `far` away, if no window chooses among them; RekindleError."""
    if ("://" in data.source and not far) or "{window" in data.source:
        return None
    from rekindle.data.source import FileSource, open_source

    source = open_source(data, modality)
    return source if isinstance(source, FileSource) else None


def first_rows(
    data: DataSpec,
    modality: str,
    *,
    far: bool = False,
    refusal: Callable[[str], str] | None = None,
) -> list[Problem]:
    """What `ingest` would refuse in the first rows of files that are here, or `far` away; with a
    window, only what does not depend on it. The counts are of the rows that were looked at.
    `refusal`: why the task's `encode` refuses the content of an example, "" where it does not."""
    import numpy as np

    from rekindle.data.normalise import Normaliser
    from rekindle.data.records import read_times

    findings, kept, judged = Findings(), 0, 0
    normaliser, column = Normaliser(data, modality, findings), time_column(data)
    try:
        for raw in _batches(
            _source(data, modality, far=far), wanted_columns(data, modality), findings
        ):
            if modality == "image":
                raw = raw.filter(np.arange(len(raw)) < _MOST_IMAGES)
            if column is not None:
                raw = raw.filter(read_times(raw, column, findings)[1])
            if data.window is None and len(raw):
                table, _ = normaliser(raw)
                kept += len(table)
                if refusal is not None and judged < _MOST_JUDGED:
                    part = table.slice(0, _MOST_JUDGED - judged)
                    judged += len(part)
                    kept -= _judge(part, modality, refusal, data, findings)
    except RekindleError as error:
        return list(error.problems)
    dropped = data.on_bad_rows == "drop" and findings.droppable and (kept or data.window)
    return [] if dropped else findings.problems()


def _judge(
    examples: Any, modality: str, refusal: Callable[[str], str], data: DataSpec, findings: Findings
) -> int:
    """Note the examples that the task refuses; how many they are."""
    refused = 0
    rows = zip(examples.column("id"), examples.column(modality), strict=True)
    for place, content in rows:
        if why := refusal(content.as_py()):
            name = f"key {place}" if data.columns.key is not None else str(place)
            findings.add("template", name, why)
            refused += 1
    return refused


def golden_rows(asked: MustPass, modality: str) -> list[Problem]:
    """What is wrong with the rows of `evaluate.must_pass`."""
    from rekindle.data.golden import examples_of

    findings = Findings()
    examples_of(asked, modality, findings, labels=tuple(classes(asked.data, modality)))
    found = ((one, f"evaluate.must_pass, {one.where}") for one in findings.problems())
    return [dataclasses.replace(one, where=where.removesuffix(", ")) for one, where in found]


def _batches(source: Any, columns: Columns, findings: Findings) -> Iterator[Any]:
    """The first rows of some files, beginning with the first one."""
    located = source.files if source else Files((), "")
    images = located.format == "images"
    most = _MOST_IMAGES if images else _MOST_FILES
    if located.files and not isinstance(located.files[0].filesystem, LocalFileSystem):
        most = _MOST_FAR
    files = located.files[:: len(located.files) // most + 1]
    if images:
        source.files = dataclasses.replace(located, files=files)
        yield from source.read(columns, findings)
        return
    for found in files:
        file, own = _Beginning(**vars(found)), Findings()
        source.files = dataclasses.replace(located, files=(file,))
        batches = source.read(columns, own)
        yield from itertools.islice(batches, 1) if located.format == "parquet" else batches
        if not (own.cut and file.is_part):  # in the row that the file goes on with
            findings.include(own, own.rows)


def classes(data: DataSpec, modality: str) -> list[str]:
    """The classes of a local source of at most `_MOST_BYTES`, in order, where they are known; of a
    source of numbers, what they are written as."""
    from rekindle.data.columns import as_python, scalar_text

    found, findings = set[str | None](), Findings()
    with contextlib.suppress(RekindleError, ValueError):
        source = _source(data, modality)
        if source is None or source.extent()[1] > _MOST_BYTES:
            return []
        name = data.columns.target or data.columns.label
        columns: Columns = {name: "list" if modality == "words" else "scalar"}
        for raw in source.read(columns, findings):
            for value in map(as_python, raw.columns[name]):
                for each in value if isinstance(value, list) else [value]:
                    found.add(each.decode() if isinstance(each, bytes) else scalar_text(each))
        if not findings:  # else not all rows were read
            return sorted(filter(None, found))
    return []


def one_class(label: str) -> list[Problem]:
    """What `ingest` says of a source all of whose rows have this label."""
    findings = Findings()
    note_single_class(findings, label)
    return findings.problems()
