"""When a platform starts the pipeline by itself: a line of cron in a time zone, and what becomes of
starts that are late.

What each platform makes of it stands in docs/schedules.md. Zones are IANA's, as zoneinfo finds
them."""

import zoneinfo
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from rekindle.errors import did_you_mean
from rekindle.spec.cron import cron_problem, five_fields
from rekindle.spec.platforms import Section

_NO_ZONES = {"localtime", "Factory", "posixrules"}  # names of files, on this machine only
# clocks without summer time, which users who write them rarely mean
_FIXED = {"EST": "America/New_York", "MST": "America/Denver", "HST": "Pacific/Honolulu"}


class ScheduleSpec(Section):
    """When the platform starts scheduled runs, after `rekindle schedule set`."""

    cron: Annotated[str, AfterValidator(five_fields)] = Field(min_length=1, max_length=200)
    """Minute, hour, day of the month, month, day of the week, such as `0 3 * * 1`; Sunday is 0. Or
    `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`."""
    timezone: str = Field("UTC", min_length=1, max_length=64)
    """Time zone of `cron`, such as `Europe/Berlin`; its clocks are followed in summer, too."""
    overlap: Literal["skip", "queue", "parallel"] | None = None
    """`skip`, `queue` or `parallel`: a start that falls due during the previous run is left out,
    waits for its end, or begins beside it. Null: `skip` on Vertex AI and on this machine, `queue`
    on Kubeflow, `parallel` on SageMaker and Azure ML. These two support only `parallel`, this
    machine only `skip`."""
    catch_up: bool = False
    """Whether missed starts, such as those while the schedule was paused, run later; on Kubeflow,
    Vertex AI, and with systemd on this machine."""


def findings(schedule: ScheduleSpec) -> Iterator[tuple[str, str, str]]:
    """What is wrong with it: field, what, fix."""
    if problem := cron_problem(schedule.cron):
        yield "cron", *problem
    known = {"UTC", *zoneinfo.available_timezones()} - _NO_ZONES
    zone = schedule.timezone
    if zone in _FIXED:
        fix = f"name {_FIXED[zone]}, or UTC"
        yield "timezone", f"`{zone}` is a fixed-offset zone without daylight saving time", fix
    elif zone not in known:
        fix = did_you_mean(zone, sorted(known - _FIXED.keys()), cutoff=0.75)
        fix = fix or "name one of IANA's, such as Europe/Berlin"
        yield "timezone", f"there is no time zone `{zone}`", fix
