"""Spot machines as long as the deadline allows, then on-demand ones: when to give up, how likely it
comes to that, and what the mixture costs.

The rule is the safety net of Can't Be Late (Wu et al., NSDI 2024, section 3): change over once what
is left of the time is what the rest of the work takes on machines that stay, and stay on them.
Theirs keeps two changeovers in hand and asks while idle; ours counts from the last committed
checkpoint, so one suffices and the spot machines may be in the middle of something. It does not
count on the notice, because a deadline is a promise and a notice is not.

The numbers are exact, and ours. With j segments committed, an uninterrupted run would be at a_j and
the rest on demand takes b_j; a_j + b_j is the same for all j, so spot machines are given up once a
run is `slack` behind an uninterrupted one. Excess only grows; so segment j + 1 is begun iff the
excess X_j at commit j leaves it room for itself. X_j is what odds.py has the transform of, and sums
over j are geometric series of transforms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from rekindle.plan.odds import CELLS, NEGLIGIBLE, Disturbed, Transform, cell_masses, hopeless
from rekindle.plan.risk import Segment, Work, alive_seconds, segments, uninterrupted_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rekindle.plan.odds import Values

    Numbers = NDArray[np.float64]

DAMPING = 18.0  # what folds back counts e^-18
SAME = 1e-12  # as 1, where terms are added up instead
FARTHEST_WAITS = 30.0  # means of a wait: beyond it there is next to nothing


@dataclasses.dataclass(frozen=True)
class Fallback:
    """What becomes of a training with a deadline. `slack_hours`: how far it may fall behind an
    uninterrupted run; where that is less than a segment takes, on-demand machines start at once.
    `give_up_hours`: the latest moment if nothing has been committed by then, below zero if not even
    they make it (`feasible`). `chance`: that on-demand machines are needed. Hours of running are
    expected ones, both paid."""

    feasible: bool
    slack_hours: float
    give_up_hours: float
    chance: float
    spot_hours: float
    on_demand_hours: float

    def cost_usd(self, spot_usd_per_hour: float, on_demand_usd_per_hour: float) -> float:
        """Expected cost at the prices of all machines together."""
        spot = self.spot_hours * spot_usd_per_hour
        return spot + self.on_demand_hours * on_demand_usd_per_hour


def give_up_hours(
    work: Work, every: int, deadline_hours: float, on_demand_wait_seconds: float, saved_steps: int
) -> float:
    """The latest moment, from the start, at which on-demand machines that come after a wait and go
    on from that checkpoint still make the deadline.

    With an hour of work left, starts of 2 min, saves of half a minute every ten, and machines that
    take 5 min to come, a deadline in 4 hours leaves 2.8333."""
    rest = dataclasses.replace(work, steps=work.steps - saved_steps)
    needed = uninterrupted_seconds(rest, every) if rest.steps else 0.0
    return deadline_hours - (on_demand_wait_seconds + needed) / 3600


def fallback(
    work: Work, every: int, per_hour: float, deadline_hours: float, on_demand_wait_seconds: float
) -> Fallback:
    """Chance of the fallback and expected paid hours of both kinds. Exact where a save is committed
    before the next one is due, as `interval` sees to, and a hair early elsewhere."""
    total = uninterrupted_seconds(work, every)
    latest = deadline_hours * 3600 - on_demand_wait_seconds - total
    first = segments(work, every)[0]
    slack = latest - work.restart_seconds - work.commit_seconds
    hours = slack / 3600, latest / 3600
    if slack < first.through:
        return Fallback(latest >= 0, *hours, 1.0, 0.0, total / 3600)
    commits, spot = _Walk(Transform(work, per_hour / 3600), every, slack).outcome()
    chance = min(1.0, max(0.0, 1 - commits[-1]))
    on_demand = chance * (work.restart_seconds + work.commit_seconds)
    for segment, made in zip(segments(work, every), commits, strict=True):
        on_demand += segment.through * (segment.count - made)
    return Fallback(True, *hours, chance, max(0.0, spot) / 3600, max(0.0, on_demand) / 3600)


class _Walk:
    """The excess from commit to commit, on a grid, for as long as it leaves room for a segment."""

    def __init__(self, transform: Transform, every: int, slack: float) -> None:
        import numpy as np

        work = transform.work
        self.transform, self.work, self.rate = transform, work, transform.rate
        self.first, *self.others = segments(work, every)
        through = max(segment.through for segment in (self.first, *self.others))
        disturbed = Disturbed(transform, every)
        reach = FARTHEST_WAITS * work.wait_seconds
        if hopeless(work, every, self.rate * 3600):
            reach = math.inf
        else:
            reach = max(reach, disturbed.reach())
        self.slack = min(slack, reach + through)
        self.room = self.slack - through  # the largest excess with which a segment is begun
        self.before_first = work.restart_seconds + work.commit_seconds
        self.length = 2 * (self.slack + self.before_first)
        self.points = np.arange(CELLS // 2) * self.length / CELLS

    def outcome(self) -> tuple[list[float], float]:
        """Expected commits on spot machines, an entry a kind of segment, and their paid seconds."""
        reached = self._reached(0, 1)
        commits = [float(reached.sum())]
        running = float(self._up_to(self._first_attempts, self.slack + self.before_first))
        passed = 0
        for segment in self.others:
            start = self._reached(passed, segment.count)
            commits.append(float(start @ self._gets_through(segment)))
            running += float(start @ self._running(segment))
            passed += segment.count
        return commits, running

    def _reached(self, passed: int, count: int) -> Numbers:
        """Mass of the excess at the commit after `passed` segments of the middle, added up over
        `count` commits from there on; only where it leaves room for a segment."""
        import numpy as np

        first = math.exp(-self.rate * self.first.anew)
        middle = self.others[0] if self.others else self.first
        calm_each = math.exp(-self.rate * middle.through)
        calm = first * float(_powers(np.array(calm_each), passed, count))

        def disturbed(z: Values) -> Values:
            one = self.transform.passed(z, middle.through, middle.anew)
            at_first = self.transform.started(z, self.first.anew)
            many = _powers(one, passed, count)
            found: Values = at_first * many - calm * self.transform.waited(z)
            return found

        cell = self.length / CELLS
        edges = np.append(self.points - cell / 2, self.points[-1] + cell / 2)
        mass = self._masses(disturbed) + calm * np.diff(self._waited(edges))
        inside: Numbers = mass * np.clip((self.room - edges[:-1]) / cell, 0, 1)
        return inside

    def _gets_through(self, segment: Segment) -> Numbers:
        """Chance that a segment begun with each excess is committed on spot machines."""
        calm = math.exp(-self.rate * segment.through)

        def disturbed(z: Values) -> Values:
            found: Values = self.transform.passed(z, segment.through, segment.anew) - calm
            return found

        return calm + self._up_to(disturbed, self.slack - segment.through - self.points)

    def _running(self, segment: Segment) -> Numbers:
        """Mean paid seconds of a segment begun with each excess, up to its commit or to the moment
        when the spot machines are given up."""

        def attempts(z: Values) -> Values:
            lost = self.transform.struck(z, segment.through)
            found: Values = lost * self._attempts(z, segment.anew)
            return found

        whole = alive_seconds(segment.through, self.rate)
        return whole + self._up_to(attempts, self.slack - self.points)

    def _first_attempts(self, z: Values) -> Values:
        return self._attempts(z, self.first.anew)

    def _attempts(self, z: Values, seconds: float) -> Values:
        """Of the times at which one of the attempts of that length is running."""
        import numpy as np

        alive = (1 - np.exp(-(self.rate + z) * seconds)) / (self.rate + z)
        found: Values = self.transform.retried(z, seconds) * alive
        return found

    def _up_to(self, transform: Callable[[Values], Values], seconds: Numbers | float) -> Numbers:
        """What of a measure lies at or before each of those times."""
        import numpy as np

        ends = self.points + self.length / CELLS / 2
        found: Numbers = np.interp(seconds, ends, self._masses(transform).cumsum(), left=0.0)
        return found

    def _masses(self, transform: Callable[[Values], Values]) -> Numbers:
        return cell_masses(transform, self.length, DAMPING)[: CELLS // 2]

    def _waited(self, seconds: Numbers) -> Numbers:
        """Chance that the first wait is over by each of those times."""
        import numpy as np

        mean = self.work.wait_seconds
        if self.work.wait == "fixed" or mean < NEGLIGIBLE:
            return (seconds >= mean).astype(np.float64)
        found: Numbers = -np.expm1(-np.maximum(seconds, 0.0) / mean)
        return found


def _powers(ratio: Values, first: int, count: int) -> Values:
    """ratio^first + ... , `count` terms."""
    import numpy as np

    gap = 1 - ratio
    same = np.abs(gap) < SAME
    terms = np.where(same, count, (1 - ratio**count) / np.where(same, 1.0, gap))
    found: Values = terms * ratio**first
    return found
