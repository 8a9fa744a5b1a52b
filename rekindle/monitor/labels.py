"""The labels that arrived for logged predictions, by the key that both carry."""

import logging
from collections.abc import Collection
from typing import NamedTuple

from rekindle.data.roles import wanted_columns
from rekindle.data.source import asked_for_by, open_source
from rekindle.errors import DataError, first_line
from rekindle.rows.columns import RawBatch, as_python, number_of, texts
from rekindle.rows.findings import Findings
from rekindle.spec.model import ColumnsSpec, DataSpec, SplitSpec

log = logging.getLogger(__name__)


class Label(NamedTuple):
    """What arrived for a key."""

    value: str
    """The class, or the number as text; "nan": it was not a number."""
    slices: tuple[tuple[str, str], ...] = ()
    """(Column, value) of each slice that its row is in."""


@asked_for_by("monitor.labels")
def read_labels(
    data: DataSpec, modality: str, source: str, ids: Collection[str]
) -> dict[str, Label]:
    """The label of each key of `ids` in `source`, the last one of several.

    A row without a label has yet to get it. Where columns of `data.slices` are missing, there are
    no slices, which is logged. Raises DataError for rows that cannot be read."""
    data = data.model_copy(
        update={"format": "auto", "split": SplitSpec(), "window": None, "source": source}
    )
    findings = Findings()
    kinds = wanted_columns(data, modality)
    names = data.columns
    assert names.key
    labels: dict[str, Label] = {}
    columns = {}
    for name in (names.key, names.target or names.label, *data.slices):
        columns[name] = kinds[name]
    for raw in open_source(data, modality).read(columns, findings):
        keys = texts(raw, names.key, "scalar", findings).values.to_pylist()
        values = _values(raw, names, findings)
        # a value that cannot be text puts its row into no slice, as a missing one does
        slice_values = []
        for column in data.slices:
            texts_of_column = texts(raw, column, "scalar", Findings())
            slice_values.append(texts_of_column.values.to_pylist())
        for key, value, *values_of_row in zip(keys, values, *slice_values, strict=True):
            if key and value and key in ids:
                pairs = zip(data.slices, values_of_row, strict=True)
                labels[key] = Label(value, tuple(pair for pair in pairs if pair[1]))
    not_numbers = sum(label.value == "nan" for label in labels.values())
    if not_numbers:
        log.warning("%d of the numbers that arrived in %s are none", not_numbers, source)
    try:
        findings.raise_if_any()
    except DataError as error:
        if not data.slices:
            raise
        # perhaps for want of these columns alone
        labels = read_labels(data.model_copy(update={"slices": ()}), modality, source, ids)
        log.warning("accuracy of slices is not compared: %s", first_line(error))
    return labels


def _values(raw: RawBatch, names: ColumnsSpec, findings: Findings) -> list[str | None]:
    """The answer of each row as text; None where it has not arrived."""
    if names.target is None:
        classes: list[str | None] = texts(raw, names.label, "scalar", findings).values.to_pylist()
        return classes
    numbers: list[str | None] = []
    for value in map(as_python, raw.columns[names.target]):
        numbers.append(None if value in (None, b"", "") else str(number_of(value)))
    return numbers
