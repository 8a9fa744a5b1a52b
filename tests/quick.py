"""Which values of a parametrized test `make test` takes; `make test-all` takes all."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """The first `count` as they are, the others marked as slow."""
    return [value if number < count else _slow(value) for number, value in enumerate(values)]


def only(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Those in `quick` as they are, the others marked as slow."""
    return [value if value in quick else _slow(value) for value in values]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
