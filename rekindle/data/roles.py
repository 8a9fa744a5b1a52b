"""Which columns of a source are read, and in what role; imports no pyarrow."""

from rekindle.rows import Kind
from rekindle.spec.model import DataSpec


def wanted_columns(data: DataSpec, modality: str) -> dict[str, Kind]:
    """The columns that are read, and how: content, label, and all others that are set."""
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
    others: list[str | None] = []
    if modality not in ("document", "words"):
        others.append(names.target or names.label)
    others += [names.key, names.group, time_column(data), *data.slices]
    # the content first; a column with two roles is read as content
    kinds: dict[str | None, Kind] = dict(content)
    for name in others:
        kinds.setdefault(name, "scalar")
    return {name: kind for name, kind in kinds.items() if name}


def time_column(data: DataSpec) -> str | None:
    """The time column, where a split by time or a window without partitions needs it."""
    has_window_column = data.window is not None and "{window" not in data.source
    if has_window_column or data.split.by == "time":
        return data.columns.time
    return None
