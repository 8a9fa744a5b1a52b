"""What a step prints: a file, and the end of it in memory, because the disk may be full and a step
that fails for that reason has to say so."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

_END_BYTES = 1 << 18


class Log:
    """Appends to a file what it has room for. `end` is the end of what was written since `begin`,
    all of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self.end = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self) -> None:
        """An attempt begins, of which nothing is known."""
        self.end = b""

    def write(self, chunk: bytes) -> None:
        """Append; never raises for want of room."""
        self.end = (self.end + chunk)[-_END_BYTES:]
        with contextlib.suppress(OSError):
            self._file.write(chunk)
