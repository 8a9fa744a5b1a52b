"""When a run begins by itself: at times, or because of what changed.

A platform, or this machine, starts runs by a line of cron in a time zone; what each makes
of it stands in docs/schedules.md. Zones are IANA's, as zoneinfo finds them. `rekindle
watch` starts them by triggers (docs/watch.md)."""

import zoneinfo
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from rekindle.errors import did_you_mean
from rekindle.spec.cron import cron_problem, five_fields
from rekindle.spec.section import Section

Duration = Annotated[
    str, StringConstraints(pattern=r"^[1-9][0-9]{0,4} ?(hours?|days?|weeks?|months?|years?)$")
]
NewRows = Annotated[int, Field(ge=1, le=10**12)] | Annotated[float, Field(gt=0, lt=1)]
_NO_ZONES = {"localtime", "Factory", "posixrules"}  # names of files, on this machine only
# clocks without summer time, which users who write them rarely mean
_FIXED = {"EST": "America/New_York", "MST": "America/Denver", "HST": "Pacific/Honolulu"}


class ScheduleSpec(Section):
    """When the platform starts scheduled runs, after `rekindle schedule set`."""

    cron: Annotated[str, AfterValidator(five_fields)] = Field(min_length=1, max_length=200)
    """Minute, hour, day of the month, month, day of the week, such as `0 3 * * 1`; Sunday
    is 0. Or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`."""
    timezone: str = Field("UTC", min_length=1, max_length=64)
    """Time zone of `cron`, such as `Europe/Berlin`; its clocks are followed in summer, too."""
    overlap: Literal["skip", "queue", "parallel"] | None = None
    """`skip`, `queue` or `parallel`: a start that falls due during the previous run is
    left out, waits for its end, or begins beside it. Null: `skip` on Vertex AI and on
    this machine, `queue` on Kubeflow, `parallel` on SageMaker and Azure ML. These two
    support only `parallel`, this machine only `skip`."""
    catch_up: bool = False
    """Whether missed starts, such as those while the schedule was paused, run later; on
    Kubeflow, Vertex AI, and with systemd on this machine."""


class TriggersSpec(Section):
    """What makes retraining due, for `rekindle watch`; unchanged data never does. Without
    this section changed data does."""

    new_rows: NewRows | None = None
    """How many new rows make it due: a number, or a share below 1 of the rows that the
    last run had."""
    every: Duration | None = None
    """How long after the last run began it is due, such as `1 month`, if the data have changed."""
    drift: bool = False
    """Whether an alarm of `rekindle monitor` about inputs or predictions makes it due;
    one about latency does not."""
    live_drop: float | None = Field(None, gt=0, lt=1)
    """By how much live accuracy (for text_regression R²) must have fallen, in an alarm of
    `rekindle monitor`, to make it due."""
    cooldown: Duration | None = None
    """How long after a run began no other does. It doubles with each run in a row that
    failed or whose candidate was refused, up to 32 times."""
    max_per_week: int | None = Field(None, ge=1, le=10_000)
    """How many runs may begin in seven days."""
    act: Literal["run", "suggest"] = "run"
    """`run`, or only `suggest` it: exit code 3."""

    @property
    def watches(self) -> bool:
        """Whether the monitor is asked."""
        return self.drift or self.live_drop is not None


def findings(schedule: ScheduleSpec) -> Iterator[tuple[str, str, str]]:
    """What is wrong with it: field, what, fix."""
    if problem := cron_problem(schedule.cron):
        yield "cron", *problem
    zones = {"UTC", *zoneinfo.available_timezones()} - _NO_ZONES
    zone = schedule.timezone
    if zone in _FIXED:
        fix = f"name {_FIXED[zone]}, or UTC"
        yield "timezone", f"`{zone}` is a fixed-offset zone without daylight saving time", fix
    elif zone not in zones:
        fix = did_you_mean(zone, sorted(zones - _FIXED.keys()), cutoff=0.75)
        fix = fix or "name one of IANA's, such as Europe/Berlin"
        yield "timezone", f"there is no time zone `{zone}`", fix
