"""What a step prints: a file, and the end of it in memory, because the disk may be full and a step
that fails for that reason has to say so. Secrets of the environment are masked in both."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Self

from rekindle.masking import Masked

_END_BYTES = 1 << 18


class Log:
    """Appends to a file what it has room for. `end` is the end of what was written since `begin`,
    all of it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._masked = Masked()
        self.end = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self._file.close()

    def begin(self) -> None:
        """An attempt begins, of which nothing is known."""
        self.flush()
        self.end = b""

    def write(self, chunk: bytes) -> None:
        """Append; never raises for want of room."""
        self._append(self._masked.feed(chunk))

    def flush(self) -> None:
        """Nothing follows for now: what looked like the beginning of a secret was none."""
        self._append(self._masked.rest())

    def _append(self, chunk: bytes) -> None:
        self.end = (self.end + chunk)[-_END_BYTES:]
        with contextlib.suppress(OSError):
            self._file.write(chunk)
