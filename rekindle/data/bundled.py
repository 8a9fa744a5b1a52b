"""The data sets that come with scikit-learn (`sklearn:digits`), without a download.

Only the handwritten digits are examples that a task here learns from: 1,797 grey images of 8 x 8
pixels, whose 17 intensities are spread over 0..255. The others are tables of measurements.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from rekindle.data.columns import Kind, RawBatch
from rekindle.data.validate import Findings
from rekindle.errors import RequestError
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec

PREFIX = "sklearn:"
_FILES = {"digits": "digits.csv.gz"}
_BATCH_ROWS = 512


class BundledSource:
    """One bundled set; raises RequestError for a name that is none, or none that a task can use."""

    def __init__(self, data: DataSpec, modality: str) -> None:
        self._name = data.source.removeprefix(PREFIX)
        self._columns = data.columns
        if self._name not in _FILES:
            names = " or ".join(PREFIX + name for name in _FILES)
            fix = f"use {names}; the others are tables, or need a download"
            raise RequestError(
                f"scikit-learn bundles no image or text set `{self._name}`",
                where="data.source",
                fix=fix,
            )
        if modality != "image":
            fix = "use task image_classification, or another source"
            raise RequestError(
                f"{data.source} holds images, and the task reads texts",
                where="data.source",
                fix=fix,
            )

    def read(self, columns: Mapping[str, Kind], findings: Findings) -> Iterator[RawBatch]:
        """The examples in the order of the package."""
        present = [self._columns.image, self._columns.label]
        if findings.missing_columns(PREFIX + self._name, columns, present):
            return
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for start in range(0, len(pixels), _BATCH_ROWS):
            rows = slice(start, start + _BATCH_ROWS)
            values = {
                self._columns.image: list(pixels[rows]),
                self._columns.label: pa.array(digits.target[rows].astype(np.int64)),
            }
            lines = np.arange(start, start + len(pixels[rows])) + 1
            yield RawBatch(values, lines, self._name)

    def fingerprint(self) -> str:
        """Hash of the name and of the package's file."""
        return hashlib.sha256(f"{self._name}\0{file_sha256(self._file())}".encode()).hexdigest()[
            :32
        ]

    def extent(self) -> tuple[int, int]:
        """One file, and its bytes."""
        return 1, self._file().stat().st_size

    def _file(self) -> Path:
        found = importlib.util.find_spec("sklearn")
        if found is None or not found.submodule_search_locations:
            fix = "pip install scikit-learn"
            raise RequestError("scikit-learn is not installed", where="data.source", fix=fix)
        return Path(found.submodule_search_locations[0], "datasets", "data", _FILES[self._name])
