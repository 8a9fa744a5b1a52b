"""The one way into a source of any kind, by `open_source`: raw batches and a fingerprint.

Files, the hub (hub.py), and `sklearn:digits`, which comes with scikit-learn: 1,797 grey
images of 8 x 8 pixels, whose 17 intensities are spread over 0..255."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import lzma
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa

from rekindle.data import hub
from rekindle.data.files import Files, SourceFile, grouped, locate
from rekindle.data.readers import READERS
from rekindle.data.records import read_times
from rekindle.data.reference import MOST_BYTES
from rekindle.data.roles import reads_images, time_column
from rekindle.data.window import Window
from rekindle.errors import DataError, RequestError
from rekindle.rows import Columns, Kind
from rekindle.rows.columns import RawBatch, Source, content_of
from rekindle.rows.findings import Findings
from rekindle.spec.identity import digest, file_sha256
from rekindle.spec.model import DataSpec

_IMAGES_AT_ONCE = 64
BUNDLED = "sklearn:"
_BATCH_ROWS = 512
_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)


class FileSource(Source):
    """Files of one format behind a URI; the same bytes have one fingerprint anywhere."""

    def __init__(
        self,
        data: DataSpec,
        modality: str,
        window: Window | None = None,
        files: Files | None = None,
    ) -> None:
        """`files`: those to read, as they are; else those of the source in the window."""
        self._data = data
        self.files = files or locate(data)
        has_images = reads_images(data, modality)
        self.names_files = has_images and self.files.format != "images"
        if files is None and window is not None and "{window" in data.source:
            self.files = self.files.within(window)
        if self.files.format == "images" and not has_images:
            raise RequestError(
                f"the source holds images, and the task reads {modality}s",
                where="data.source",
                fix="use task image_classification, or set data.format",
            )
        if self.files.format not in ("images", *READERS):
            fix = f"use one of {', '.join(('auto', 'images', *READERS))}"
            message = f"format `{self.files.format}` does not go with {data.source}"
            raise RequestError(message, where="data.format", fix=fix)

    def read(self, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
        if self.files.format == "images":
            yield from self._images(columns, findings)
            return
        for file in self.files.files:
            if self._has_split(file, findings):
                try:
                    yield from READERS[self.files.format](file, columns, findings)
                except _UNREADABLE as error:
                    findings.note(
                        f"the file cannot be read: {error}",
                        where=file.name,
                        fix="check permissions and the network; a compressed file may be cut short",
                    )

    def fingerprint(self) -> str:
        """Hash of all files, of files that rows name,
        and of names that tell a label or split."""
        named = self.hash_named() if self.names_files else ""
        return self.fingerprint_of({}, named)

    def fingerprint_of(self, contents: Mapping[str, str], named: str) -> str:
        """The fingerprint, given hashes of files by path, and of those that rows name."""
        # elsewhere a file may be renamed without any change of the data
        by_name = self.files.format == "images" or self._data.split.by == "source"
        of_files = self.files.fingerprint(named=by_name, known=contents)
        return digest([of_files, named]) if self.names_files else of_files

    def hash_named(self) -> str:
        """Hash of the files that rows name; `ingest` refuses what cannot be read."""
        column = self._data.columns.image
        time = time_column(self._data)
        columns: dict[str, Kind] = {}
        if time:
            columns[time] = "scalar"
        columns[column] = "image"
        for raw in self.read(columns, Findings()):
            if time:  # `ingest` opens no file for a row without one
                _, has_time = read_times(raw, time, Findings())
                raw = raw.filter(has_time)
            for value in raw.columns[column]:
                with contextlib.suppress(OSError, ValueError):
                    content_of(raw, value)
        return self.named

    @property
    def named(self) -> str:
        """Hash of the files that rows named which were read."""
        return self.files.files[0].named.hexdigest() if self.names_files else ""

    def extent(self) -> tuple[int, int]:
        return len(self.files.files), sum(file.size for file in self.files.files)

    def _images(self, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
        names = self._data.columns
        if findings.missing_columns(self._data.source, columns, [names.image, names.label]):
            return
        readable = list[SourceFile]()
        for file in self.files.files:
            if names.label in columns and "/" not in file.name:
                findings.add("no class", file.name)
            elif file.size > MOST_BYTES:
                findings.add("malformed", file.name, f"it holds more than {MOST_BYTES >> 20} MiB")
            elif self._has_split(file, findings):
                readable.append(file)
        most_bytes = (lambda file: file.size, MOST_BYTES)
        most_files = (lambda file: 1, _IMAGES_AT_ONCE)
        for files in grouped(readable, most_bytes, most_files):
            # a batch has one split
            for split in dict.fromkeys(file.split for file in files):
                yield self._batch([file for file in files if file.split == split], split)

    def _batch(self, files: list[SourceFile], split: str) -> RawBatch:
        """Images, each with the name of its folder as label."""
        labels = [PurePosixPath(file.name).parent.name for file in files]
        values = {
            self._data.columns.image: [file.filesystem.cat_file(file.path) for file in files],
            self._data.columns.label: pa.array(labels),
        }
        lines = np.zeros(len(files), np.int64)
        names = tuple(file.name for file in files)
        return RawBatch(values, lines, self._data.source, split, names=names)

    def _has_split(self, file: SourceFile, findings: Findings) -> bool:
        if self._data.split.by != "source" or file.split:
            return True
        findings.note(
            "cannot derive a split from the file name",
            where=file.name,
            fix="name files or folders train, validation, test; or split by hash",
        )
        return False


class BundledSource(Source):
    """`sklearn:digits`.
    Raises RequestError for another name, or a task without images."""

    def __init__(self, data: DataSpec, modality: str) -> None:
        self._columns = data.columns
        name = data.source.removeprefix(BUNDLED)
        if name != "digits":
            raise RequestError(
                f"scikit-learn bundles no images called `{name}`",
                where="data.source",
                fix=f"use {BUNDLED}digits",
            )
        if not reads_images(data, modality):
            raise RequestError(
                f"{data.source} holds images, and the task reads {modality}s",
                where="data.source",
                fix="use task image_classification, or another source",
            )

    def read(self, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
        present = [self._columns.image, self._columns.label]
        if findings.missing_columns(f"{BUNDLED}digits", columns, present):
            return
        from sklearn import datasets

        digits = datasets.load_digits()
        # their intensities are 0 to 16
        content = list(np.rint(digits.images * (255 / 16)).astype(np.uint8))
        labels = pa.array(digits.target.astype(np.int64))
        for start in range(0, len(content), _BATCH_ROWS):
            rows = slice(start, start + _BATCH_ROWS)
            values = {self._columns.image: content[rows], self._columns.label: labels[rows]}
            lines = np.arange(start, start + len(content[rows])) + 1
            yield RawBatch(values, lines, "digits")

    def fingerprint(self) -> str:
        return hashlib.sha256(f"digits\0{file_sha256(self._file())}".encode()).hexdigest()[:32]

    def extent(self) -> tuple[int, int]:
        return 1, self._file().stat().st_size

    def _file(self) -> Path:
        package = importlib.util.find_spec("sklearn")
        if package is None or not package.submodule_search_locations:
            raise RequestError(
                "scikit-learn is not installed",
                where="data.source",
                fix="pip install scikit-learn",
            )
        return Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")


def open_source(data: DataSpec, modality: str, window: Window | None = None) -> Source:
    """The source that `data.source` names;
    of partitions in the URI, those in the window."""
    if data.source.startswith(BUNDLED) or data.format == "sklearn":
        return BundledSource(data, modality)
    if data.source.startswith(hub.PREFIX) or data.format == "hub":
        return hub.HubSource(data, modality)
    return FileSource(data, modality, window)


@contextlib.contextmanager
def asked_for_by(place: str) -> Iterator[None]:
    """Errors of this block about `data.source` name the `place` that stands for it."""
    try:
        yield
    except (DataError, RequestError) as error:
        problems = []
        for problem in error.problems:
            if problem.where == "data.source":
                problem = dataclasses.replace(problem, where=place)
            problems.append(problem)
        raise type(error)(problems) from error
