"""Which values of a parametrized test `make test` takes; `make test-all` takes all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """The first `count` as they are, the others marked as slow."""
    return [value if number < count else _slow(value) for number, value in enumerate(values)]


def _slow(value: Any) -> Any:
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.slow)
