"""Rows as sources have them, before they are examples: `columns` says how values come and
become text, `findings` collects what is wrong with them. Imports no pyarrow itself."""

from collections.abc import Mapping
from typing import Literal

Kind = Literal["text", "image", "list", "scalar"]
"""How the values of a column are read."""
Columns = Mapping[str, Kind]
"""The columns that are read, and how."""
