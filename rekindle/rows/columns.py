"""Columns as sources have them: `RawBatch` is what every reader yields; `texts` turns a
column of any admissible type into strings. Integers and booleans become their usual text,
whole floats integers (a column of integers with a gap)."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rekindle.rows import Columns, Kind
from rekindle.rows.findings import Findings

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class RawBatch:
    """Some rows of a source: `columns` by name, as Arrow arrays or (where types differ by
    row) lists; `lines` counts from 1; `split` is the source's own, if it tells. `names`
    calls rows by name (images that are files); `fetch` reads a file that a row names,
    relative to `file`."""

    columns: Mapping[str, pa.Array | list[Any]]
    lines: npt.NDArray[np.int64]
    file: str
    split: str = ""
    names: tuple[str, ...] = ()
    fetch: Callable[[str], bytes] | None = dataclasses.field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.lines)

    def place(self, row: int) -> str:
        """Where a row stands, such as `reviews.jsonl:17`."""
        return self.names[row] if self.names else f"{self.file}:{self.lines[row]}"

    def ids(self) -> pa.StringArray:
        if self.names:
            return pa.array(self.names, pa.string())
        return pc.binary_join_element_wise(self.file, pa.array(self.lines).cast(pa.string()), ":")

    def filter(self, keep: Mask) -> Self:
        if keep.all():
            return self
        mask = pa.array(keep)
        columns = dict[str, pa.Array | list[Any]]()
        for name, column in self.columns.items():
            if isinstance(column, list):
                columns[name] = list(compress(column, keep))
            else:
                columns[name] = column.filter(mask)
        names = tuple(compress(self.names, keep))
        return dataclasses.replace(self, columns=columns, lines=self.lines[keep], names=names)


class Source(Protocol):
    """What `ingest` and `fingerprint` need of a source of any kind; `names_files`: rows
    may name files beside the source's own."""

    names_files: bool = False

    def read(self, columns: Columns, findings: Findings) -> Iterator[RawBatch]:
        """The rows, in an order that depends on the content alone."""

    def fingerprint(self) -> str:
        """Hash of what the source holds now."""

    def extent(self) -> tuple[int, int]:
        """How many files, how many bytes; zeros where these are not known."""
        return 0, 0


def as_python(value: object) -> Any:
    """A value of a column as Python has it, whichever way the column holds it."""
    return value.as_py() if isinstance(value, pa.Scalar) else value


def with_mask(values: Sequence[object], kind: pa.DataType) -> tuple[pa.Array, Mask]:
    """Values as an Arrow array, null for None, and where there is one."""
    return pa.array(values, kind), np.array([value is not None for value in values], bool)


def content_of(raw: RawBatch, value: object) -> Any:
    """An image's value, or the bytes of the file that it names.
    Raises OSError, ValueError."""
    value = as_python(value)
    if isinstance(value, str) and raw.fetch:
        return raw.fetch(value)
    return value


@dataclasses.dataclass(frozen=True)
class Texts:
    """A column as strings; `noted` marks rows
    that are null as their value was refused."""

    values: pa.StringArray
    noted: Mask

    @classmethod
    def all_fine(cls, values: pa.StringArray) -> Self:
        return cls(values, np.zeros(len(values), bool))

    @property
    def blank(self) -> Mask:
        """The rows that have no value, or one of white space only."""
        trimmed = pc.utf8_trim_whitespace(self.values)
        empty = pc.fill_null(pc.equal(pc.binary_length(trimmed), 0), True)
        return np.asarray(empty, bool) & ~self.noted


def texts(raw: RawBatch, column: str, kind: Kind, findings: Findings) -> Texts:
    """A column as strings; what cannot be one is noted."""
    values = raw.columns[column]
    if isinstance(values, list):
        return _texts_of_objects(raw, values, column, kind, findings)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if any(is_text(values.type) for is_text in _TEXT_TYPES):
        binary = values.cast(pa.binary())
        try:
            return Texts.all_fine(binary.cast(pa.string()))
        except pa.ArrowInvalid:
            return _texts_of_objects(raw, binary.to_pylist(), column, "text", findings)
    is_scalar = kind == "scalar" and any(is_type(values.type) for is_type in _SCALAR_TYPES)
    if is_scalar or pa.types.is_null(values.type):
        if pa.types.is_timestamp(values.type):
            # as ISO 8601 in UTC, of whatever unit; a
            # cast to a naive type leaves the instant
            times = pc.cast(values, pa.timestamp("us", tz=values.type.tz), safe=False)
            plain = pc.cast(times, pa.timestamp("us"))
            return Texts.all_fine(pc.strftime(plain, format="%Y-%m-%dT%H:%M:%S"))
        return Texts.all_fine(values.cast(pa.string()))
    if kind == "scalar" and pa.types.is_floating(values.type):
        return _texts_of_objects(raw, values.to_pylist(), column, kind, findings)
    present = np.asarray(values.is_valid(), bool)
    if present.any():
        first = int(np.argmax(present))
        findings.add("type", raw.place(first), f"{column}: {values.type}", int(present.sum()))
    return Texts(pa.nulls(len(values), pa.string()), present)


def encodable(text: str) -> bool:
    """Whether the text has a UTF-8 form: it holds no half of a surrogate pair."""
    return text.encode(errors="ignore").decode() == text


def scalar_text(value: object) -> str | None:
    """A label, key, time or slice value as text, or None. `scalar_text(3.0) == "3"`."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return str(int(value))
    return None


def number_of(value: Any) -> float:
    """A value of a column, also as text; NaN for what is no finite number."""
    if isinstance(value, bool):  # which is an int to Python
        return math.nan
    try:
        number = float(value)
    except (ValueError, TypeError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


_TEXT_TYPES = (
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_string_view,
    pa.types.is_binary,
    pa.types.is_large_binary,
)
_SCALAR_TYPES = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_timestamp, pa.types.is_date)


def _texts_of_objects(
    raw: RawBatch, values: list[object], column: str, kind: Kind, findings: Findings
) -> Texts:
    texts_or_none: list[str | None] = []
    noted = np.zeros(len(values), bool)
    for row, value in enumerate(values):
        is_missing = value is None or (isinstance(value, float) and math.isnan(value))
        text = _text_of(value, kind)
        if text is None and not is_missing:
            findings.add("type", raw.place(row), f"{column}: {value!r}")
        elif text is not None and not encodable(text):
            findings.add("undecodable", raw.place(row), f"{column}: {value!a}")
            text = None
        noted[row] = text is None and not is_missing
        texts_or_none.append(text)
    return Texts(pa.array(texts_or_none, pa.string()), noted)


def _text_of(value: object, kind: Kind) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):  # of a column of texts: encodable if it is UTF-8
        return value.decode(errors="surrogateescape")
    return scalar_text(value) if kind == "scalar" else None
