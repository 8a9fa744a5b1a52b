"""Many trainings on spot machines side by side, from a fixed seed: how wall and paid
hours scatter, and when a deadline needs machines that stay.

The model is that of risk.py; what is drawn here are the times between interruptions and
the waits. One turn of the loop is one attempt of every open run: it commits segments
until its interruption.

The rule of the deadline is the safety net of Can't Be Late (Wu et al., NSDI 2024, section
3): change over once what is left of the time is what the rest of the work takes on
machines that stay. Theirs keeps two changeovers in hand; ours counts from the last
committed checkpoint, so one suffices. With j segments committed, an uninterrupted run
would be at a_j and the rest on demand takes b_j; a_j + b_j is the same for all j, so spot
machines are given up once a run is `slack` behind an uninterrupted one.

numpy is imported inside functions, because the verb that prints a plan has to start
quickly."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from rekindle.plan.risk import InterruptibleWork, expected, segments, uninterrupted_seconds

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]
    Counts = NDArray[np.int64]

RUNS = 8192
FEWEST_RUNS = 256
SEED = 20261124
MOST_ATTEMPTS = 1_500_000  # of all runs together: with more interruptions there are fewer runs
MOST_INTERRUPTIONS = 20_000.0  # beyond, time has no distribution to speak of


@dataclasses.dataclass(frozen=True)
class Fallback:
    """What becomes of a training with a deadline, in expected, paid hours. `slack_hours`:
    how far it may fall behind. `feasible`: on-demand machines would make it from the
    start. `chance`: that they are needed."""

    feasible: bool
    slack_hours: float
    chance: float
    spot_hours: float
    on_demand_hours: float

    def cost_usd(self, spot_usd_per_hour: float, on_demand_usd_per_hour: float) -> float:
        return self.spot_hours * spot_usd_per_hour + self.on_demand_hours * on_demand_usd_per_hour


@dataclasses.dataclass(frozen=True)
class SimulatedRuns:
    """Hours of many runs, one entry each: with the waits, and those that are paid."""

    wall: Numbers
    running: Numbers

    def at_most(self, wall_hours: float | None = None, running_hours: float | None = None) -> float:
        """The chance of keeping both limits, as far as they are given."""
        if wall_hours is None:
            wall_hours = math.inf
        if running_hours is None:
            running_hours = math.inf
        keeps_both = (self.wall <= wall_hours) & (self.running <= running_hours)
        return float(keeps_both.mean())


def simulate(work: InterruptibleWork, every: int, per_hour: float) -> SimulatedRuns:
    """Trainings with a save every `every` steps;
    without end where attempts hardly get through."""
    import numpy as np

    if expected(work, every, per_hour).interruptions > MOST_INTERRUPTIONS:
        return SimulatedRuns(np.array([math.inf]), np.array([math.inf]))
    attempts = _AttemptDraws(work, every, per_hour, RUNS)
    return SimulatedRuns(attempts.wall / 3600, attempts.running / 3600)


def fallback(
    work: InterruptibleWork, every: int, per_hour: float, deadline_hours: float, runs: int = RUNS
) -> Fallback:
    """Chance of the fallback and expected paid hours of both kinds. Right where a save is
    committed before the next one is due, as `interval` sees to, and a hair early
    elsewhere."""
    total = uninterrupted_seconds(work, every)
    latest = deadline_hours * 3600 - total
    slack = latest - work.restart_seconds - work.commit_seconds
    if slack < segments(work, every)[0].through:
        return Fallback(latest >= 0, slack / 3600, 1.0, 0.0, total / 3600)
    attempts = _AttemptDraws(work, every, per_hour, runs, slack)
    return Fallback(
        feasible=True,
        slack_hours=slack / 3600,
        chance=float((attempts.on_demand > 0).mean()),
        spot_hours=float(attempts.running.mean() / 3600),
        on_demand_hours=float(attempts.on_demand.mean() / 3600),
    )


class _AttemptDraws:
    """Runs from one interruption to the next until none is left, at most `most`; fewer
    where each is interrupted often, whose times scatter less. With a `slack` until they
    are given up."""

    def __init__(
        self,
        work: InterruptibleWork,
        every: int,
        per_hour: float,
        most: int,
        slack: float = math.inf,
    ) -> None:
        import numpy as np

        attempts_per_run = 1 + expected(work, every, per_hour).interruptions
        runs = int(min(most, max(FEWEST_RUNS, MOST_ATTEMPTS / attempts_per_run)))
        first, *later_segments = segments(work, every)
        self.work = work
        self.rate = per_hour / 3600
        self.rng = np.random.default_rng(SEED)
        counts = [segment.count for segment in later_segments]
        through = np.repeat([segment.through for segment in later_segments], counts)
        # from the first commit on, when each is made in an uninterrupted run
        self.committed_at = np.concatenate([[0.0], np.cumsum(through)])
        self.anew = np.concatenate(
            [[first.anew], np.repeat([s.anew for s in later_segments], counts)]
        )
        self.first_commit = first.anew
        # by what is saved, the moment of giving up; the first segment is never passed
        # through
        next_through = np.concatenate([[first.through], through])
        self.give_up_at = slack + self.first_commit + self.committed_at - next_through
        # of each run: segments that are committed; seconds since its start, on spot
        # machines, and on those that stay
        self.saved = np.zeros(runs, np.int64)
        self.wall = np.zeros(runs)
        self.running = np.zeros(runs)
        self.on_demand = np.zeros(runs)
        self.active: Counts = np.arange(runs)
        while self.active.size:
            self._attempt()

    def _attempt(self) -> None:
        """Waits for machines, and runs until they go, the work is done,
        or they are given up."""
        import numpy as np

        active = self.active
        # drawn in this order: the seed fixes what runs meet
        waits = self.work.wait_seconds * self.rng.standard_exponential(active.size)
        alive = self.rng.exponential(1 / self.rate, active.size) if self.rate else math.inf
        saved = self.saved[active]
        began = self.wall[active] + waits
        anew = self.anew[saved]
        last_commit = self.committed_at[-1]
        before = self.committed_at[saved]
        # segment k from `saved` on is committed `anew + committed_at[k] - before` after
        # the start
        reached = np.searchsorted(self.committed_at, alive - anew + before, side="right")
        reached = np.where(alive >= anew, np.maximum(reached, saved + 1), saved)
        done = reached == self.committed_at.size
        ran = np.where(done, anew + last_commit - before, alive)
        # no segment is longer than the one before: a run that makes the next is not given
        # up in it
        time_left = self.give_up_at[saved] - began
        given_up = (ran > time_left) & (anew > time_left)
        ran = np.where(given_up, np.maximum(time_left, 0.0), ran)
        # seconds that the rest takes on machines that stay
        saved_before = saved[given_up]
        restarting = self.work.restart_seconds + self.work.commit_seconds
        resumed_at = self.committed_at[np.maximum(saved_before - 1, 0)]
        self.on_demand[active[given_up]] = np.where(
            saved_before > 0,
            restarting + last_commit - resumed_at,
            self.first_commit + last_commit,
        )
        self.saved[active] = reached
        self.wall[active] = began + ran
        self.running[active] += ran
        self.active = active[~(done | given_up)]
