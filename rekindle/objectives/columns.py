"""Lists in Arrow columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa


def flattened(table: pa.Table, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The values of a list column in one array,
    and how many each row has: a null none."""
    import numpy as np

    column = table.column(name).combine_chunks()
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return column.flatten().to_numpy(zero_copy_only=False), lengths.astype(np.int64)
