"""What the first rows of a source tell before a run begins: faults that `ingest` would
refuse, and the classes of a small source."""

import contextlib
import dataclasses
import io
import itertools
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from fsspec.implementations.local import LocalFileSystem

from rekindle.data.files import Files, SourceFile
from rekindle.data.roles import time_column, wanted_columns
from rekindle.data.validate import note_single_class
from rekindle.errors import Problem, RekindleError
from rekindle.rows import Columns
from rekindle.rows.findings import Findings
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
        if self.is_part:  # the last line may be cut
            head = head[: head.rfind(b"\n") + 1]
        yield io.BytesIO(head)

    @contextlib.contextmanager
    def open_anywhere(self) -> Iterator[BinaryIO]:
        with self.filesystem.open(self.path, "rb", compression=self.compression) as stream:
            yield stream

    @property
    def is_part(self) -> bool:
        """Whether the file goes on."""
        return len(self.head(_HEAD_BYTES + 1)) > _HEAD_BYTES


def _source(data: DataSpec, modality: str, *, far: bool = False) -> Any:
    """A source of files here, or `far` away; None where a window chooses among them."""
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
    """What `ingest` would refuse in the first rows of files that are here, or `far` away;
    with a window, only what does not depend on it. The counts are of the rows that were
    looked at. `refusal`: why the task's `encode` refuses the content of an example, ""
    where it does not."""
    import numpy as np

    from rekindle.data.normalise import Normaliser
    from rekindle.data.records import read_times

    findings = Findings()
    good_rows = 0
    judged = 0
    normaliser = Normaliser(data, modality, findings)
    column = time_column(data)
    try:
        source = _source(data, modality, far=far)
        columns = wanted_columns(data, modality)
        has_images = "image" in columns.values()
        for raw in _batches(source, columns, findings):
            if has_images:
                raw = raw.filter(np.arange(len(raw)) < _MOST_IMAGES)
            if column is not None:
                _, has_time = read_times(raw, column, findings)
                raw = raw.filter(has_time)
            if data.window is None and len(raw):
                table, _ = normaliser(raw)
                good_rows += len(table)
                if refusal is not None and judged < _MOST_JUDGED:
                    part = table.slice(0, _MOST_JUDGED - judged)
                    judged += len(part)
                    good_rows -= _judge(part, modality, refusal, data, findings)
    except RekindleError as error:
        return list(error.problems)
    # with a window the rows were not normalised: some may be good
    may_drop = data.on_bad_rows == "drop" and findings.droppable
    if may_drop and (good_rows or data.window):
        return []
    return findings.problems()


def _judge(
    examples: Any, modality: str, refusal: Callable[[str], str], data: DataSpec, findings: Findings
) -> int:
    """Note the examples that the task refuses; returns how many they are."""
    refused = 0
    rows = zip(examples.column("id"), examples.column(modality), strict=True)
    for row_id, content in rows:
        reason = refusal(content.as_py())
        if reason:
            place = f"key {row_id}" if data.columns.key is not None else str(row_id)
            findings.add("template", place, reason)
            refused += 1
    return refused


def golden_rows(must_pass: MustPass, modality: str) -> list[Problem]:
    """What is wrong with the rows of `evaluate.must_pass`."""
    from rekindle.data.golden import examples_of

    findings = Findings()
    labels = tuple(classes(must_pass.data, modality))
    examples_of(must_pass, modality, findings, labels=labels)
    problems = list[Problem]()
    for problem in findings.problems():
        where = "evaluate.must_pass"
        if problem.where:
            where += f", {problem.where}"
        problems.append(dataclasses.replace(problem, where=where))
    return problems


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
    for source_file in files:
        file = _Beginning(**vars(source_file))
        file_findings = Findings()
        source.files = dataclasses.replace(located, files=(file,))
        batches = source.read(columns, file_findings)
        if located.format == "parquet":  # which is not read by its beginning: one batch is enough
            batches = itertools.islice(batches, 1)
        yield from batches
        # a fault that ends the reading may be of the
        # row that is cut here and goes on in the file
        if not (file_findings.cut and file.is_part):
            findings.include(file_findings, file_findings.rows)


def classes(data: DataSpec, modality: str) -> list[str]:
    """The classes of a local source of at most `_MOST_BYTES`, in order, where they are
    known; of a source of numbers, what they are written as."""
    from rekindle.rows.columns import as_python, scalar_text

    labels = set[str | None]()
    findings = Findings()
    with contextlib.suppress(RekindleError, ValueError):
        source = _source(data, modality)
        if source is None or source.extent()[1] > _MOST_BYTES:
            return []
        name = data.columns.target or data.columns.label
        columns: Columns = {name: wanted_columns(data, modality).get(name, "scalar")}
        for raw in source.read(columns, findings):
            for value in map(as_python, raw.columns[name]):
                row_labels = value if isinstance(value, list) else [value]
                for label in row_labels:
                    text = label.decode() if isinstance(label, bytes) else scalar_text(label)
                    labels.add(text)
        if not findings:  # else not all rows were read
            return sorted(filter(None, labels))
    return []


def one_class(label: str) -> list[Problem]:
    """What `ingest` says of a source all of whose rows have this label."""
    findings = Findings()
    note_single_class(findings, label)
    return findings.problems()
