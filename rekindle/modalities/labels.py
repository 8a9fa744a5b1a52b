"""The label that a row has of its own: a class, or the number to predict."""

import numpy as np
import pyarrow as pa

from rekindle.rows import Kind
from rekindle.rows.columns import Mask, RawBatch, as_python, number_of, texts
from rekindle.rows.findings import Findings
from rekindle.spec.model import DataSpec


class RowLabels:
    """Reads the column `target`, or else `label`, of the rows of a source."""

    def __init__(self, data: DataSpec) -> None:
        self._target = data.columns.target
        self._column = data.columns.target or data.columns.label
        self._labels = pa.array(data.labels, pa.string()) if data.labels else None

    def beside(self, column: str, kind: Kind) -> dict[str, Kind]:
        """The columns to read where `column` holds the content, which it does also where it
        is the label's."""
        columns: dict[str, Kind] = {column: kind}
        columns.setdefault(self._column, "scalar")
        return columns

    def read(self, raw: RawBatch, findings: Findings) -> tuple[pa.Array, Mask]:
        """The label of each row, or its number, and where it is fit."""
        if self._target is not None:
            return _numbers(raw, self._target, findings)
        column = texts(raw, self._column, "scalar", findings)
        bad = column.noted | note_rows("empty label", column.blank, raw, findings)
        if self._labels is not None:
            unknown = ~np.asarray(pa.compute.is_in(column.values, self._labels), bool) & ~bad
            for row in np.flatnonzero(unknown).tolist():
                findings.add("unknown label", raw.place(row), column.values[row].as_py())
            bad |= unknown
        return column.values, ~bad


def _numbers(raw: RawBatch, target: str, findings: Findings) -> tuple[pa.Array, Mask]:
    """The numbers of the column `target`, and where they are finite."""
    objects = [as_python(value) for value in raw.columns[target]]
    numbers = np.array([number_of(value) for value in objects], np.float64)
    fit = np.isfinite(numbers)
    for row in np.flatnonzero(~fit).tolist():
        value = objects[row]
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        findings.add("no number", raw.place(row), f"{target}: {value!r}")
    return pa.array(numbers), fit


def note_rows(kind: str, rows: Mask, raw: RawBatch, findings: Findings) -> Mask:
    """Note a fault of each of the `rows`, and return them."""
    for row in np.flatnonzero(rows).tolist():
        findings.add(kind, raw.place(row))
    return rows
