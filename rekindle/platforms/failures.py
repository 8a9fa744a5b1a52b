"""What all platforms say alike of what failed."""

from collections.abc import Iterator

from rekindle.errors import PlatformError, Problem
from rekindle.records import RunStatus
from rekindle.spec.schedule import ScheduleSpec

BUG = "this is probably a bug in rekindle, please report it"


def not_installed(error: ImportError, where: str, fix: str) -> PlatformError:
    """To raise where a platform's SDK is missing."""
    return PlatformError(f"{error.name} is not installed here", where=where, fix=fix)


def no_schedule(name: str, where: str = "") -> PlatformError:
    """To raise for a name that no schedule has."""
    what = f"there is no schedule `{name}`"
    return PlatformError(what, where=where, fix="rekindle schedule list")


def check_resumable(status: RunStatus | None, what: str, where: str) -> None:
    """PlatformError for a run that succeeded or goes on."""
    if status not in ("failed", "cancelled"):
        fix = "only what failed or was stopped is tried again"
        raise PlatformError(what, where=where, fix=fix)


def unheeded(schedule: ScheduleSpec, what: str, who: str, platform: str) -> Iterator[Problem]:
    """Wishes that a service cannot grant which starts each run when it is due, as `what` says."""
    if schedule.overlap in ("skip", "queue"):
        fix = "write schedule.overlap: parallel, and leave a run the time that it takes"
        yield Problem(what, "schedule.overlap", fix)
    if schedule.catch_up:
        fix = f"leave it out, and start one yourself: rekindle submit CONFIG --platform {platform}"
        yield Problem(f"{who} makes up for no start that was missed", "schedule.catch_up", fix)
