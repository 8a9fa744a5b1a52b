"""One question: is the folder there?"""

from __future__ import annotations

from pathlib import Path

from rekindle.answers import ReadinessCheck
from rekindle.platforms.definition import Definition
from tests.platforms.toy import ToySpec


def permissions(place: ToySpec) -> str:
    return "none\n"


def checks(
    place: ToySpec, definition: Definition | None, early: bool = False
) -> tuple[ReadinessCheck, ...]:
    there = Path(place.folder).is_dir()
    made = {"name": "folder", "where": "platforms.toy.folder", "said": place.folder}
    if there:
        return (ReadinessCheck(state="ok", **made),)
    return (ReadinessCheck(state="problem", fix=f"mkdir {place.folder}", **made),)
