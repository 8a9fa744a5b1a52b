"""The data sets that come with scikit-learn (`sklearn:digits`), without a download.

`digits` are images: 1,797 grey ones of 8 x 8 pixels, whose 17 intensities are spread over 0..255.
`iris`, `wine` and `breast_cancer` are tables of measurements; a row becomes a text such as
`sepal length (cm) 5.1; sepal width (cm) 3.5; ...` with the name of its class. `diabetes` has no
classes and is refused, like the sets that scikit-learn downloads."""

import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.columns import RawBatch, Source
from rekindle.data.roles import Columns
from rekindle.data.validate import Findings
from rekindle.errors import RequestError
from rekindle.spec.identity import file_sha256
from rekindle.spec.model import DataSpec

PREFIX = "sklearn:"
_IMAGES = {"digits": "digits.csv.gz"}
_TABLES = {"iris": "iris.csv", "wine": "wine_data.csv", "breast_cancer": "breast_cancer.csv"}
_BATCH_ROWS = 512


class BundledSource(Source):
    """One bundled set; raises RequestError for a name that is none, or none that a task can use."""

    def __init__(self, data: DataSpec, modality: str) -> None:
        self._name = data.source.removeprefix(PREFIX)
        self._columns = data.columns
        if self._name not in _IMAGES | _TABLES:
            names = ", ".join(PREFIX + name for name in _IMAGES | _TABLES)
            what = f"scikit-learn bundles no set of classes `{self._name}`"
            raise RequestError(what, where="data.source", fix=f"use one of {names}")
        held = "image" if self._name in _IMAGES else "text"
        if modality != held:
            what = f"{data.source} holds {held}s, and the task reads {modality}s"
            fix = f"use task {held}_classification, or another source"
            raise RequestError(what, where="data.source", fix=fix)
        self._content = data.columns.image if held == "image" else data.columns.text

    def read(self, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
        """The examples in the order of the package."""
        present = [self._content, self._columns.label]
        if findings.missing_columns(PREFIX + self._name, columns, present):
            return
        content, labels = self._digits() if self._name in _IMAGES else self._table()
        for start in range(0, len(content), _BATCH_ROWS):
            rows = slice(start, start + _BATCH_ROWS)
            values = {self._content: content[rows], self._columns.label: labels[rows]}
            lines = np.arange(start, start + len(content[rows])) + 1
            yield RawBatch(values, lines, self._name)

    def _digits(self) -> tuple[Any, pa.Array]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        return list(pixels), pa.array(digits.target.astype(np.int64))

    def _table(self) -> tuple[Any, pa.Array]:
        from sklearn import datasets

        table = getattr(datasets, f"load_{self._name}")()
        named = (zip(table.feature_names, row, strict=True) for row in table.data)
        texts = ["; ".join(f"{name} {value:g}" for name, value in row) for row in named]
        names = [str(table.target_names[index]) for index in table.target]
        return pa.array(texts, pa.string()), pa.array(names, pa.string())

    def fingerprint(self) -> str:
        """Hash of the name and of the package's file."""
        text = f"{self._name}\0{file_sha256(self._file())}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def extent(self) -> tuple[int, int]:
        """One file, and its bytes."""
        return 1, self._file().stat().st_size

    def _file(self) -> Path:
        found = importlib.util.find_spec("sklearn")
        if found is None or not found.submodule_search_locations:
            fix = "pip install scikit-learn"
            raise RequestError("scikit-learn is not installed", where="data.source", fix=fix)
        folder = Path(found.submodule_search_locations[0], "datasets", "data")
        return folder / (_IMAGES | _TABLES)[self._name]
