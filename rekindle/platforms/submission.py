"""A definition on its way to a platform: what it is called there, and what came of it.

A submission is identified by what is sent and by a token of whoever sends it: the same two give the
same name, so that what is said twice happens once."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Placed:
    """A run on a platform: its `id` there, and the page to look at (`url`). `anew` is False where
    the same submission was there already."""

    id: str
    url: str
    anew: bool = True


@dataclasses.dataclass(frozen=True)
class Planned:
    """A step that is to run: `machines` of the platform's kind `machine`."""

    step: str
    machine: str
    machines: int = 1
    spot: bool = False


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a submission will make: a run called `id`, in the place that `where` names."""

    where: str
    id: str
    steps: tuple[Planned, ...]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What a platform starts by itself: its `id` there, when (five fields of cron, and the name of
    a time zone as the platform has it), and whether it does so now."""

    id: str
    cron: str
    timezone: str
    enabled: bool


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule in a platform's own words, `expression` and `timezone`, and what the platform does
    by itself, for people: `overlap`, with a start that falls due while a run goes on; `missed`,
    with starts that did not happen; `clocks`, with times that a change of them skips or repeats."""

    expression: str
    timezone: str
    overlap: str
    missed: str
    clocks: str = "what then happens is not documented"


def digest_of(files: Mapping[str, bytes], token: str = "") -> str:
    """16 characters that stand for the files and the token."""
    digest = hashlib.sha256(f"{len(token)}\0{token}".encode())
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]
