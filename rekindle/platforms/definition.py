"""What a platform's compiler makes, and what it has to hold to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Definition:
    """What is submitted: file names and their bytes."""

    files: Mapping[str, bytes]
