"""Many trainings on spot machines side by side, from a fixed seed: how wall and paid hours scatter,
and when a deadline needs machines that stay.

The model is that of risk.py; what is drawn here are the times between interruptions and the waits.
One turn of the loop is one attempt of every open run: it commits segments until its interruption.

The rule of the deadline is the safety net of Can't Be Late (Wu et al., NSDI 2024, section 3):
change over once what is left of the time is what the rest of the work takes on machines that stay.
Theirs keeps two changeovers in hand; ours counts from the last committed checkpoint, so one
suffices. With j segments committed, an uninterrupted run would be at a_j and the rest on demand
takes b_j; a_j + b_j is the same for all j, so spot machines are given up once a run is `slack`
behind an uninterrupted one.

numpy is imported inside functions, because the verb that prints a plan has to start quickly."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rekindle.plan.risk import Work, expected, segments, uninterrupted_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]
    Counts = NDArray[np.int64]

RUNS, FEWEST_RUNS = 8192, 256
SEED = 20261124
MOST_ATTEMPTS = 1_500_000  # of all runs together: with more interruptions there are fewer runs
MOST_INTERRUPTIONS = 20_000.0  # beyond, time has no distribution to speak of


@dataclasses.dataclass(frozen=True)
class Fallback:
    """What becomes of a training with a deadline, in expected, paid hours. `slack_hours`: how far
    it may fall behind. `feasible`: on-demand machines would make it from the start. `chance`: that
    they are needed."""

    feasible: bool
    slack_hours: float
    chance: float
    spot_hours: float
    on_demand_hours: float

    def cost_usd(self, spot_usd_per_hour: float, on_demand_usd_per_hour: float) -> float:
        return self.spot_hours * spot_usd_per_hour + self.on_demand_hours * on_demand_usd_per_hour


@dataclasses.dataclass(frozen=True)
class Runs:
    """Hours of many runs, one entry each: with the waits, and those that are paid."""

    wall: Numbers
    running: Numbers

    def at_most(self, wall_hours: float | None = None, running_hours: float | None = None) -> float:
        """The chance of keeping both limits, as far as they are given."""
        wall = self.wall <= (math.inf if wall_hours is None else wall_hours)
        running = self.running <= (math.inf if running_hours is None else running_hours)
        return float((wall & running).mean())


def simulate(work: Work, every: int, per_hour: float) -> Runs:
    """Trainings with a save every `every` steps; without end where attempts hardly get through."""
    import numpy as np

    if expected(work, every, per_hour).interruptions > MOST_INTERRUPTIONS:
        return Runs(np.array([math.inf]), np.array([math.inf]))
    attempts = _Attempts(work, every, per_hour, RUNS)
    return Runs(attempts.wall / 3600, attempts.running / 3600)


def fallback(
    work: Work, every: int, per_hour: float, deadline_hours: float, runs: int = RUNS
) -> Fallback:
    """Chance of the fallback and expected paid hours of both kinds. Right where a save is committed
    before the next one is due, as `interval` sees to, and a hair early elsewhere."""
    total = uninterrupted_seconds(work, every)
    latest = deadline_hours * 3600 - total
    slack = latest - work.restart_seconds - work.commit_seconds
    if slack < segments(work, every)[0].through:
        return Fallback(latest >= 0, slack / 3600, 1.0, 0.0, total / 3600)
    attempts = _Attempts(work, every, per_hour, runs, slack)
    chance = float((attempts.rest > 0).mean())
    spot, on_demand = attempts.running.mean() / 3600, attempts.rest.mean() / 3600
    return Fallback(True, slack / 3600, chance, float(spot), float(on_demand))


class _Attempts:
    """Runs from one interruption to the next until none is left, at most `most`; fewer where each
    is interrupted often, whose times scatter less. With a `slack` until they are given up."""

    def __init__(
        self, work: Work, every: int, per_hour: float, most: int, slack: float = math.inf
    ) -> None:
        import numpy as np

        often = 1 + expected(work, every, per_hour).interruptions
        runs = int(min(most, max(FEWEST_RUNS, MOST_ATTEMPTS / often)))
        first, *others = segments(work, every)
        self.work, self.rate = work, per_hour / 3600
        self.rng = np.random.default_rng(SEED)
        counts = [segment.count for segment in others]
        through = np.repeat([segment.through for segment in others], counts)
        # from the first commit on, when each is made in an uninterrupted run
        self.made = np.concatenate([[0.0], np.cumsum(through)])
        self.anew = np.concatenate([[first.anew], np.repeat([s.anew for s in others], counts)])
        self.started = first.anew
        # by what is saved, the moment of giving up; the first segment is never passed through
        next_through = np.concatenate([[first.through], through])
        self.give_up = slack + self.started + self.made - next_through
        self.saved = np.zeros(runs, np.int64)  # segments
        self.wall, self.running, self.rest = (np.zeros(runs) for _ in range(3))
        self.active: Counts = np.arange(runs)
        while self.active.size:
            self._turn()

    def _turn(self) -> None:
        """Wait for machines, and run until they go, the work is done, or they are given up."""
        import numpy as np

        who = self.active
        waits = self.work.wait_seconds * self.rng.standard_exponential(who.size)
        saved, began = self.saved[who], self.wall[who] + waits
        alive = self.rng.exponential(1 / self.rate, who.size) if self.rate else math.inf
        anew, before = self.anew[saved], self.made[saved]
        # segment k from `saved` on is committed `anew + made[k] - before` after the start
        reached = np.searchsorted(self.made, alive - anew + before, side="right")
        reached = np.where(alive >= anew, np.maximum(reached, saved + 1), saved)
        done = reached == self.made.size
        ran = np.where(done, anew + self.made[-1] - before, alive)
        # no segment is longer than the one before: a run that makes the next is not given up in it
        left = self.give_up[saved] - began
        up = (ran > left) & (anew > left)
        ran = np.where(up, np.maximum(left, 0.0), ran)
        # seconds that the rest takes on machines that stay
        again = self.work.restart_seconds + self.work.commit_seconds
        committed = self.made[np.maximum(saved[up] - 1, 0)]
        total = self.started + self.made[-1]
        self.rest[who[up]] = np.where(saved[up] > 0, again + self.made[-1] - committed, total)
        self.saved[who], self.wall[who] = reached, began + ran
        self.running[who] += ran
        self.active = who[~(done | up)]
