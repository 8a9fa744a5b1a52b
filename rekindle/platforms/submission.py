"""A definition that is submitted to a platform: its files, its name and tags there, and the
run that results; and errors that all platforms share.

A submission is identified by what is sent and by a token of the caller. The same two give
the same name, so submitting is idempotent."""

import contextlib
import dataclasses
import hashlib
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, Self, TypeVar

from rekindle.errors import PlatformError, Problem
from rekindle.outputs import PlannedStep
from rekindle.records import RunStatus
from rekindle.spec.schedule import ScheduleSpec


class _Named(Protocol):
    """A schedule as an SDK has it."""

    @property
    def display_name(self) -> str: ...


S = TypeVar("S", bound=_Named)
TOKEN = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")  # what a label may hold everywhere
BUG = "this is probably a bug in rekindle, please report it"
_TAGS = {"rekindle-run": "run_id", "rekindle-definition": "definition", "rekindle-token": "token"}


@dataclasses.dataclass(frozen=True)
class Definition:
    """What is submitted: the bytes of each file by name. The definition itself is the one
    file that lies in no folder."""

    files: Mapping[str, bytes]
    notices: tuple[str, ...] = ()
    """What the platform does otherwise than a run here, a sentence each."""

    @property
    def entry(self) -> str:
        """The name of the definition itself."""
        (name,) = [name for name in self.files if "/" not in name]
        return name

    @property
    def text(self) -> bytes:
        """The definition itself."""
        return self.files[self.entry]

    @contextlib.contextmanager
    def written(self) -> Iterator[Path]:
        """The definition itself as a file, with all others beside it, as long as the
        block runs."""
        with tempfile.TemporaryDirectory(prefix="rekindle-") as folder:
            write_files(Path(folder), self.files)
            yield Path(folder, self.entry)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their paths below the folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@dataclasses.dataclass(frozen=True)
class RunTag:
    """What rekindle writes on a run of a platform, so that a user or a later command can tell
    where it comes from."""

    run_id: str
    """The id of its record here."""
    definition: str
    """The hash of the Definition."""
    token: str
    """With the definition, it identifies the submission."""

    def __str__(self) -> str:
        return f"rekindle run {self.run_id} definition {self.definition} token {self.token}"

    def tags(self) -> dict[str, str]:
        """The same as labels or tags of a run."""
        return {tag: getattr(self, name) for tag, name in _TAGS.items()}

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> Self | None:
        """From the labels or tags of a run; None where rekindle did not set them."""
        if not _TAGS.keys() <= tags.keys():
            return None
        return cls(**{name: tags[tag] for tag, name in _TAGS.items()})


@dataclasses.dataclass(frozen=True)
class SubmittedRun:
    """A run on a platform and its page (`url`); `anew` is false if an earlier command had
    submitted it already."""

    id: str
    url: str
    anew: bool = True


@dataclasses.dataclass(frozen=True)
class SubmissionPreview:
    """What a submission will create: a run called `id`, in the project, namespace or account
    that `where` names."""

    where: str
    id: str
    steps: tuple[PlannedStep, ...]
    notices: tuple[str, ...] = ()
    """Those of the definition."""


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule as a platform takes it, and what the platform does by itself, in words."""

    expression: str
    timezone: str
    overlap: str
    """What it does with a start that falls due while a run goes on."""
    missed: str
    """What it does about starts that did not happen."""
    clocks: str = "what then happens is not documented"
    """What it does with times that a change of clocks skips or repeats."""


def newest(schedules: Sequence[S], remove: Callable[[S], None]) -> list[S]:
    """The newest of the schedules of each name, sorted by name; `remove` is called for the
    others. `schedules` are given the oldest first."""
    by_name: dict[str, S] = {schedule.display_name: schedule for schedule in schedules}
    for schedule in schedules:
        if schedule is not by_name[schedule.display_name]:
            remove(schedule)
    return [by_name[name] for name in sorted(by_name)]


def plain_name(
    name: str, illegal: str, longest: int, *, taken: Collection[str] = (), distinct: bool = False
) -> str:
    """`name` with `-` for what is `illegal` (a regular expression), at most `longest`
    characters long.

    A name that was cut or is `taken` ends with a hash of the name; with `distinct`, so does
    each that was changed, so that two names never become one."""
    plain = re.sub(illegal, "-", name)
    if len(plain) <= longest and plain not in taken and (plain == name or not distinct):
        return plain
    return f"{plain[: longest - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def digest_of(files: Mapping[str, bytes], token: str = "", length: int = 16) -> str:
    """The first `length` characters of a hash of the files and the token."""
    digest = hashlib.sha256(f"{len(token)}\0{token}".encode())
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:length]


def submission_name(
    pipeline: str, definition: Definition, token: str, longest: int | None = None
) -> str:
    """The name of a run on a platform: up to `longest` characters of the pipeline's name,
    and a hash that identifies the submission."""
    return f"{pipeline[:longest].rstrip('-')}-{digest_of(definition.files, token)}"


def not_installed(error: ImportError, where: str, fix: str) -> PlatformError:
    """The error to raise where a platform's SDK is missing."""
    return PlatformError(f"{error.name} is not installed here", where=where, fix=fix)


def no_schedule(name: str, where: str = "") -> PlatformError:
    """The error to raise for a name that no schedule has."""
    message = f"there is no schedule `{name}`"
    return PlatformError(message, where=where, fix="rekindle schedule list")


def check_resumable(status: RunStatus | None, what: str, where: str) -> None:
    """Raise PlatformError, which says `what`, for a run that succeeded or goes on."""
    if status not in ("failed", "cancelled"):
        fix = "only what failed or was stopped is tried again"
        raise PlatformError(what, where=where, fix=fix)


def unheeded(schedule: ScheduleSpec, what: str, who: str, platform: str) -> Iterator[Problem]:
    """The problems of a schedule on a service that starts every run when it is due, whatever
    else runs; `what` says so, and `who` names the service."""
    if schedule.overlap in ("skip", "queue"):
        fix = "write schedule.overlap: parallel, and leave a run the time that it takes"
        yield Problem(what, "schedule.overlap", fix)
    if schedule.catch_up:
        fix = f"leave it out, and start one yourself: rekindle submit CONFIG --platform {platform}"
        yield Problem(f"{who} makes up for no start that was missed", "schedule.catch_up", fix)
