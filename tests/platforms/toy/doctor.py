"""One question: is the folder there?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rekindle.errors import RequestError
from rekindle.platforms.checks import Needs, PlatformCheck, about
from rekindle.platforms.submission import Definition
from tests.platforms.toy import ToySpec


def permissions(place: ToySpec, needs: Needs) -> str:
    return "none\n"


def checks(place: ToySpec, definition: Definition | None, needs: Needs) -> Iterator[PlatformCheck]:
    yield about("toy", place)("folder", "folder", _folder, early=True)


def _folder(place: ToySpec) -> str:
    if not Path(place.folder).is_dir():
        raise RequestError(f"there is no folder {place.folder}", fix=f"mkdir {place.folder}")
    return place.folder
