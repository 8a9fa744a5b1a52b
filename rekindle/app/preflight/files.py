"""What a config names on this machine and that is not there."""

import glob
import re
from collections.abc import Iterator
from pathlib import Path

from rekindle.errors import Problem

_PLACEHOLDER = re.compile(r"\{window(:[^}]*)?\}")
_CHECK_THE_PATH = "check the path; relative ones start at the config's folder"


def missing_source(source: str) -> Iterator[Problem]:
    """A source of data on this machine that matches no file."""
    if "://" in source or source.startswith(("sklearn:", "hub:")):
        return
    pattern = _PLACEHOLDER.sub("*", source)
    # Path.glob refuses absolute patterns
    if not Path(pattern).exists() and not glob.glob(pattern, recursive=True):  # noqa: PTH207
        yield Problem(f"no such file or folder: {source}", "data.source", _CHECK_THE_PATH)


def missing_file(path: str, field: str) -> Iterator[Problem]:
    """A file that the config names in `field`, and that is not there."""
    if not Path(path).is_file():
        yield Problem(f"file not found: {path}", field, _CHECK_THE_PATH)


def is_folder(source: object) -> bool:
    """Whether a model's source is a folder on this machine."""
    return isinstance(source, str) and Path(source).expanduser().is_dir()
