"""What is known of public images; the rows are in images.yaml."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from rekindle.catalog.rows import rows

_HUB = re.compile(r"(index\.|registry-1\.)?docker\.io/")


@functools.cache
def _without_python() -> re.Pattern[str]:
    patterns = rows(Path(__file__).with_suffix(".yaml"))["without_python"]
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))


def lacks_python(image: str) -> bool:
    """Whether the image is one that is known to have no python3: `lacks_python("alpine:3.20")`."""
    repository = _HUB.sub("", image.partition("@")[0])
    host, slash, last = repository.rpartition("/")
    repository = f"{host}{slash}{last.partition(':')[0]}"
    mirrored = re.search(r"/(library/[^/]+)$", repository)
    return _without_python().fullmatch(mirrored[1] if mirrored else repository) is not None
