"""Which columns of a source are read, and in what role; imports no pyarrow by itself."""

from rekindle.modalities import load_modality
from rekindle.rows import Kind
from rekindle.spec.model import DataSpec


def wanted_columns(data: DataSpec, modality: str) -> dict[str, Kind]:
    """The columns that are read, and how: content, label, and all others that are set."""
    # the content first; a column with two roles is read as content
    kinds = dict(load_modality(modality).reader(data).columns)
    for name in (data.columns.key, data.columns.group, time_column(data), *data.slices):
        if name:
            kinds.setdefault(name, "scalar")
    return kinds


def reads_images(data: DataSpec, modality: str) -> bool:
    """Whether one of the columns that are read holds images, or names files of them."""
    return "image" in wanted_columns(data, modality).values()


def time_column(data: DataSpec) -> str | None:
    """The time column, where a split by time or a window without partitions needs it."""
    has_window_column = data.window is not None and "{window" not in data.source
    if has_window_column or data.split.by == "time":
        return data.columns.time
    return None
