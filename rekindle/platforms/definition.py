"""What a platform's compiler makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Definition:
    """What is submitted: file names and their bytes. One file, the definition itself, lies in no
    folder; the others are what its steps run."""

    files: Mapping[str, bytes]

    @property
    def entry(self) -> str:
        """The name of the definition itself."""
        (name,) = (name for name in self.files if "/" not in name)
        return name

    @property
    def text(self) -> bytes:
        """The definition itself."""
        return self.files[self.entry]
