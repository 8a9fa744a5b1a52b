"""Which columns of a source are read, and in what role; imports no pyarrow."""

from collections.abc import Mapping
from typing import Literal

from rekindle.spec.model import DataSpec

Kind = Literal["text", "image", "list", "scalar"]
Columns = Mapping[str, Kind]
"""The columns that are read, and how."""


def wanted_columns(data: DataSpec, modality: str) -> dict[str, Kind]:
    """The columns that are read, and how: content and label, and all others that are set."""
    names = data.columns
    content: dict[str | None, Kind] = {names.text: "text"}
    if modality == "image":
        content = {names.image: "image"}
    elif modality == "document" and names.form == "chat":
        content = {names.messages: "list"}
    elif modality == "document" and names.form == "completion":
        content = {names.prompt: "text", names.input: "text", names.completion: "text"}
    elif modality == "words":
        content = {names.words: "list", names.label: "list"}
    label = None if modality in ("document", "words") else names.target or names.label
    others = [label, names.key, names.group, time_column(data), *data.slices]
    wanted: dict[str | None, Kind] = {**dict.fromkeys(others, "scalar"), **content}
    return {name: wanted[name] for name in [*content, *wanted] if name}


def time_column(data: DataSpec) -> str | None:
    """The time column, where a split by time or a window without partitions depends on it."""
    by_column = data.window is not None and "{window" not in data.source
    return data.columns.time if by_column or data.split.by == "time" else None
