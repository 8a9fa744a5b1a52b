"""Whether retraining is due, by the section `triggers`: it compares how earlier runs
ended, what the data hold now, and the clock. Pure; watch.py acts on it."""

import dataclasses
import datetime as dt
import math
from typing import Self

from rekindle.data.arrivals import Arrivals
from rekindle.data.window import parse_duration, shift
from rekindle.records import Fingerprint, Monitored
from rekindle.spec.schedule import TriggersSpec

MOST_DOUBLED = 5  # times, of a cooldown
_WEEK = dt.timedelta(days=7)
Moved = tuple[bool, str]  # whether a monitor's alarms make a run due, and what it says


@dataclasses.dataclass(frozen=True)
class Past:
    """The runs of a name, as far as they decide whether the next one is due."""

    began: tuple[dt.datetime, ...] = ()
    """When they began, the newest first, in UTC."""
    judged: str = ""
    """The id of the last run that was judged; "" for none."""
    judged_at: dt.datetime | None = None
    """When that run began."""
    because: str = ""
    """Why that run ran."""
    read: Fingerprint | None = None
    """The data that it read."""
    refused: bool = False
    """Whether its candidate was refused."""
    lost: int = 0
    """How many runs in a row were refused or failed."""
    failed: str = ""
    """Why the last turn failed; "" where it did not."""

    def has_judged(self, held: Arrivals) -> bool:
        """Whether the data are those of the last run that was judged."""
        if self.read is None:
            return False
        return (held.data, held.window) == (self.read.data, self.read.window)

    def before(self, now: dt.datetime) -> Self:
        """Without runs that began after `now`, which a clock that was wrong has dated."""
        began = tuple(time for time in self.began if time <= now)
        judged_at = self.judged_at
        if judged_at is not None and judged_at > now:
            judged_at = None
        return dataclasses.replace(self, began=began, judged_at=judged_at)


def due(
    triggers: TriggersSpec,
    now: dt.datetime,
    held: Arrivals,
    past: Past,
    moved: Moved | None = None,
) -> tuple[bool, str]:
    """Whether a run is due at `now` (UTC), and because of what it is or is not; `moved`
    is what a monitor says, if one is asked."""
    past = past.before(now)
    is_due, reason = _is_due(triggers, now, held, past, moved)
    if is_due:
        obstacle = _held_back(triggers, now, past)
        if obstacle:
            return False, f"{reason}, but {obstacle}"
    return is_due, reason


def _is_due(
    triggers: TriggersSpec,
    now: dt.datetime,
    held: Arrivals,
    past: Past,
    moved: Moved | None,
) -> tuple[bool, str]:
    """The same before the limits on how often runs begin."""
    if past.read is None:
        return True, "no run was judged before"
    if past.has_judged(held):
        if past.failed:  # such as a deployment after the promotion
            return True, f"the last turn {past.failed}"
        refused = ", whose candidate was refused" if past.refused else ""
        return False, f"the data have not changed since {past.judged}{refused}"
    return _fired(triggers, now, held, past, moved)


def _fired(
    triggers: TriggersSpec,
    now: dt.datetime,
    held: Arrivals,
    past: Past,
    moved: Moved | None,
) -> tuple[bool, str]:
    """Whether one of the triggers fires, and those that do, or what they wait for."""
    if triggers.new_rows is None and triggers.every is None and moved is None:
        return True, f"the data have changed since {past.judged}"
    verdicts: list[tuple[bool, str]] = []
    if triggers.new_rows is not None:
        needed = triggers.new_rows
        if not isinstance(needed, int):  # a share of the rows that were there
            needed = max(1, math.ceil(needed * held.had))
        verdicts.append((held.new >= needed, f"{held.new:,} new rows (due from {needed:,})"))
    if triggers.every is not None:
        verdicts.append(_time_fired(triggers.every, now, past))
    if moved is not None:
        verdicts.append(moved)
    fired = any(fires for fires, _ in verdicts)
    # of triggers that wait, each is named; where one fires, only those that do
    return fired, "; ".join(reason for fires, reason in verdicts if fires == fired)


def _time_fired(every: str, now: dt.datetime, past: Past) -> tuple[bool, str]:
    """Whether the last judged run began at least `every` ago, and when it will have."""
    due_at = now
    if past.judged_at is not None:
        due_at = shift(past.judged_at, parse_duration(every))
    if due_at <= now:
        return True, f"the last judged run began at least {every} ago"
    return False, f"due at {_minute(due_at)}"


def moved(triggers: TriggersSpec, monitored: Monitored) -> Moved:
    """Whether the monitor's alarms are of those that make a run due, and what it says."""
    alarms = []
    for signal in monitored.signals:
        # a new model makes no server faster, and `live_drop` is one of all rows
        if signal.name == "latency" or signal.name.startswith(("accuracy:", "r2:")):
            continue
        if signal.name in ("accuracy", "r2"):
            least_effect = triggers.live_drop
        else:
            least_effect = 0.0 if triggers.drift else None
        if signal.alarm and least_effect is not None and signal.effect >= least_effect:
            alarms.append(f"{signal.name} went from {signal.before:.3g} to {signal.now:.3g}")
    if not alarms:
        return False, f"nothing moved: {monitored.reason}"
    return True, "; ".join(alarms)


def _held_back(triggers: TriggersSpec, now: dt.datetime, past: Past) -> str:
    """What stands against a run that is due, or ""."""
    if triggers.cooldown is not None and past.began:
        # doubles with each run in a row that came to nothing
        factor = 2 ** min(past.lost, MOST_DOUBLED)
        ends_at = shift(past.began[0], parse_duration(triggers.cooldown) * factor)
        if ends_at > now:
            lost = f" (x {factor}: {past.lost} in a row refused or failed)" if past.lost else ""
            return f"the cooldown of {triggers.cooldown}{lost} ends at {_minute(ends_at)}"
    began_lately = [time for time in past.began if time > now - _WEEK]
    if triggers.max_per_week is not None and len(began_lately) >= triggers.max_per_week:
        count = len(began_lately)
        return f"{count} runs began within seven days, and {triggers.max_per_week} may"
    return ""


def _minute(time: dt.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
