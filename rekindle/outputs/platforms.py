"""What verbs say that compile for a platform, ask it, or send something to it."""

import dataclasses
from typing import Literal

from pydantic import Field

from rekindle.outputs.errors import ErrorRow
from rekindle.records import Record, VersionedRecord


class Compiled(VersionedRecord):
    """`compile`: the files that were written."""

    platform: str
    """With commas between several."""
    files: tuple[str, ...]
    notices: tuple[str, ...] = ()
    """What a platform does otherwise than a run here, a sentence each."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a step will run again, and why."""

    step: str
    again: Literal["yes", "perhaps", "no", "gone"]
    """`gone`: the config has it no more."""
    why: str


class Difference(VersionedRecord):
    """`diff`: every step of the config as it is now, then those that are gone."""

    platform: str
    steps: tuple[Verdict, ...]


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step that is to run."""

    step: str
    machine: str
    """The platform's kind."""
    machines: int = 1
    """How many of them."""
    spot: bool = False


class Submitted(VersionedRecord):
    """`submit` and `resume` without `--wait`."""

    run_id: str
    platform: str
    token: str
    id: str
    """The platform's."""
    url: str
    """The platform's."""
    anew: bool
    """False where the same submission (`token`) was there already."""
    where: str = ""
    """What was asked to do it; left out where it was asked before."""
    steps: tuple[PlannedStep, ...] = ()
    """What it was asked to run; left out where it was asked before."""
    notices: tuple[str, ...] = ()
    """What the platform does otherwise than a run here, a sentence each."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule as the platform has it."""

    id: str
    """The platform's."""
    cron: str
    """Five fields."""
    timezone: str
    enabled: bool
    """Whether it starts runs now."""


class Schedules(VersionedRecord):
    """`schedule set`, `list` and `pause`: the schedules that were asked about."""

    platform: str
    schedules: tuple[Schedule, ...]


class ScheduleDeleted(VersionedRecord):
    """`schedule delete`: whether there was one."""

    platform: str
    deleted: bool


class Alarm(Record):
    """An alarm, a dashboard or a file of them."""

    kind: str
    name: str
    state: str
    """What became of it: `created`, `changed`, `unchanged`, `deleted`, or `edited` by
    hand, so that it stays."""


class Alarms(VersionedRecord):
    """`alarms write` and `alarms delete`."""

    platform: str
    alarms: tuple[Alarm, ...]


class ImageBuilt(VersionedRecord):
    """`images build`: the image here, and the user's own code in it."""

    image: str
    id: str
    """Docker's."""
    code: str
    """Hash of the user's code."""
    files: tuple[str, ...]
    """Of the user's code."""


class ImagesPushed(VersionedRecord):
    """`images push`: the images by digest."""

    images: tuple[str, ...]
    lock: str
    """The file that now names them."""


class ReadinessCheck(Record):
    """A question to a platform."""

    name: str
    """What was asked."""
    where: str
    """Of what it was asked."""
    state: Literal["ok", "problem", "not asked"]
    said: str
    """The answer, what is wrong, or why it could not be asked, which is no problem by itself."""
    fix: str = ""
    settings: dict[str, str] = Field(default_factory=dict)
    """What the config should say, by dotted paths of fields: `doctor --write` writes it."""


class Readiness(VersionedRecord):
    """`doctor`: what was asked, and everything that is wrong, with the config too."""

    platform: str
    permissions: str = ""
    """Those that steps need at least."""
    checks: tuple[ReadinessCheck, ...] = ()
    errors: tuple[ErrorRow, ...] = ()
    written: dict[str, str] = Field(default_factory=dict)
    """What `--write` added to the config, by dotted paths of fields; the checks are those of
    the config with it."""
