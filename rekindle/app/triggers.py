"""Whether retraining is due: what runs of before came to, what the data hold now, and the clock
against the section `triggers`. Pure; watch.py acts on it."""

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
Moved = tuple[bool, str]


@dataclasses.dataclass(frozen=True)
class Past:
    """The runs of a name: when they `began`, the newest first, in UTC; the id of the last one that
    was judged ("" for none), when it began, `because` of what, what it `read`, and whether it was
    `refused`; how many in a row were `lost`, refused or failed; why the last turn `failed`, ""."""

    began: tuple[dt.datetime, ...] = ()
    judged: str = ""
    judged_at: dt.datetime | None = None
    because: str = ""
    read: Fingerprint | None = None
    refused: bool = False
    lost: int = 0
    failed: str = ""

    def has_judged(self, held: Arrivals) -> bool:
        """Whether the data are those of the last run that was judged."""
        read = self.read
        return read is not None and (held.data, held.window) == (read.data, read.window)

    def before(self, now: dt.datetime) -> Self:
        """Without runs that began after `now`, which a clock that was wrong has dated."""
        began = tuple(time for time in self.began if time <= now)
        judged_at = self.judged_at if self.judged_at and self.judged_at <= now else None
        return dataclasses.replace(self, began=began, judged_at=judged_at)


def due(
    triggers: TriggersSpec, now: dt.datetime, held: Arrivals, past: Past, moved: Moved | None = None
) -> tuple[bool, str]:
    """Whether a run is due at `now` (UTC), and because of what it is or is not; `moved`
    is what a monitor says, if one is asked."""
    past = past.before(now)
    if past.read is None:
        fired, why = True, "no run was judged before"
    elif past.has_judged(held):
        refused = ", whose candidate was refused" if past.refused else ""
        fired, why = False, f"the data have not changed since {past.judged}{refused}"
        if past.failed:  # such as a deployment after the promotion
            fired, why = True, f"the last turn {past.failed}"
    else:
        fired, why = _fired(triggers, now, held, past, moved)
    if fired and (against := _held_back(triggers, now, past)):
        return False, f"{why}, but {against}"
    return fired, why


def _fired(
    triggers: TriggersSpec, now: dt.datetime, held: Arrivals, past: Past, moved: Moved | None
) -> tuple[bool, str]:
    """Whether one of the triggers fires, and those that do, or what they wait for."""
    if triggers.new_rows is None and triggers.every is None and moved is None:
        return True, f"the data have changed since {past.judged}"
    found = list[tuple[bool, str]]()
    if (asked := triggers.new_rows) is not None:
        needed = asked if isinstance(asked, int) else max(1, math.ceil(asked * held.had))
        found.append((held.new >= needed, f"{held.new:,} new rows (due from {needed:,})"))
    if triggers.every is not None:
        every = parse_duration(triggers.every)
        at = shift(past.judged_at, every) if past.judged_at else now
        ago = f"the last judged run began at least {triggers.every} ago"
        words = ago if at <= now else f"due at {_said(at)}"
        found.append((at <= now, words))
    if moved is not None:
        found.append(moved)
    fired = any(fires for fires, _ in found)
    return fired, "; ".join(words for fires, words in found if fires == fired)


def moved(triggers: TriggersSpec, seen: Monitored) -> Moved:
    """Whether the monitor's alarms are of those that make a run due, and what it says."""
    alarms = []
    for one in seen.signals:
        # a new model makes no server faster, and `live_drop` is one of all rows
        if one.name == "latency" or one.name.startswith(("accuracy:", "r2:")):
            continue
        least = 0.0 if triggers.drift else None
        least = triggers.live_drop if one.name in ("accuracy", "r2") else least
        if one.alarm and least is not None and one.effect >= least:
            alarms.append(f"{one.name} went from {one.before:.3g} to {one.now:.3g}")
    return bool(alarms), "; ".join(alarms) or f"nothing moved: {seen.reason}"


def _held_back(triggers: TriggersSpec, now: dt.datetime, past: Past) -> str:
    """What stands against a run that is due, if anything does."""
    if triggers.cooldown is not None and past.began:
        factor = 2 ** min(past.lost, MOST_DOUBLED)
        pause = parse_duration(triggers.cooldown) * factor
        if (at := shift(past.began[0], pause)) > now:
            lost = f" (x {factor}: {past.lost} in a row refused or failed)" if past.lost else ""
            return f"the cooldown of {triggers.cooldown}{lost} ends at {_said(at)}"
    lately = [time for time in past.began if time > now - _WEEK]
    if triggers.max_per_week is not None and len(lately) >= triggers.max_per_week:
        return f"{len(lately)} runs began within seven days, and {triggers.max_per_week} may"
    return ""


def _said(time: dt.datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"
