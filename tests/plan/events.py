"""Trainings on spot machines, event by event and many at once, from a seed: what the formulas of
rekindle.plan are compared with. Nothing here knows a formula; the clock moves from one event to the
next: something is done, a commit lands, machines go, or the spot machines are given up."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from rekindle.plan.risk import InterruptibleWork

WAIT, START, TRAIN, HOLD, SAVE, FINISH, OVER = range(7)
SOON = 1e-9


@dataclasses.dataclass(frozen=True)
class Runs:
    """One entry a run, in hours. `rescued`: went to on-demand machines."""

    wall: np.ndarray
    running: np.ndarray
    on_demand: np.ndarray
    interruptions: np.ndarray
    rescued: np.ndarray


@dataclasses.dataclass(frozen=True)
class Deadline:
    """When it has to be done."""

    hours: float


def standard_error(values: np.ndarray) -> float:
    """Of the mean, as a share of it."""
    return float(values.std() / math.sqrt(len(values)) / values.mean())


def remaining_seconds(work: InterruptibleWork, every: int, saved: int) -> float:
    """From the start of machines that nobody takes away to the last commit, by going through it."""
    clock, landed = work.restart_seconds, -math.inf
    while saved < work.steps:
        todo = min(every - saved % every, work.steps - saved)
        saved += todo
        clock = max(clock + todo * work.step_seconds, landed) + work.save_seconds
        landed = clock + work.commit_seconds
    return landed


class _Simulation:
    """All runs side by side; each turn moves every unfinished one to its next event."""

    def __init__(
        self, work: InterruptibleWork, every: int, per_hour: float, runs: int, seed: int
    ) -> None:
        self.work, self.every, self.rate = work, every, per_hour / 3600
        self.rng = np.random.default_rng(seed)
        self.state = np.full(runs, WAIT)
        self.left = self.waits(runs)  # seconds of what is being done
        self.alive = np.full(runs, np.inf)  # seconds until the machines go
        self.tail = np.full(runs, np.inf)  # seconds until the save in flight is committed
        self.clock, self.running, self.on_demand = (np.zeros(runs) for _ in range(3))
        self.done, self.flying, self.saved = (np.zeros(runs, int) for _ in range(3))
        self.rescued = np.zeros(runs, bool)
        self.interruptions = np.zeros(runs, int)
        self.give_up: np.ndarray | None = None

    def until(self, deadline: Deadline) -> None:
        """Spot machines are given up when on-demand ones have to come, by what is saved; they are
        not asked for where not even an undisturbed start saves anything by then."""
        self.give_up = np.full(self.work.steps + 1, np.inf)
        self.rest = np.zeros(self.work.steps + 1)
        for saved in range(0, self.work.steps, self.every):
            self.rest[saved] = remaining_seconds(self.work, self.every, saved)
            latest = deadline.hours * 3600 - self.rest[saved]
            self.give_up[saved] = latest
        first = dataclasses.replace(self.work, steps=min(self.every, self.work.steps))
        if remaining_seconds(first, self.every, 0) > self.give_up[0]:
            self.give_up[0] = 0.0

    def waits(self, count: int) -> np.ndarray:
        return self.rng.exponential(self.work.wait_seconds, count)

    def due(self, who: np.ndarray) -> np.ndarray:
        """Steps until the next save."""
        done = self.done[who]
        return np.minimum(self.every - done % self.every, self.work.steps - done)

    def run(self) -> None:
        while len(active := np.flatnonzero(self.state != OVER)):
            self.turn(active)

    def turn(self, active: np.ndarray) -> None:
        paid = self.state[active] != WAIT
        struck = np.where(paid, self.alive[active], np.inf)
        up = np.full(len(active), np.inf)
        if self.give_up is not None:
            up = np.maximum(0.0, self.give_up[self.saved[active]] - self.clock[active])
        landing = self.tail[active]
        step = np.minimum.reduce([self.left[active], struck, landing, up])
        self.clock[active] += step
        self.left[active] -= step
        self.tail[active] -= step
        self.running[active] += np.where(paid, step, 0.0)
        self.alive[active] -= np.where(paid, step, 0.0)

        kind = np.select([landing <= step + SOON, up <= step, struck <= step], [0, 1, 2], default=3)
        self.commit(active[kind == 0])
        self.rescue(active[kind == 1])
        self.strike(active[kind == 2])
        self.go_on(active[kind == 3])

    def commit(self, who: np.ndarray) -> None:
        self.saved[who], self.tail[who] = self.flying[who], np.inf

    def rescue(self, who: np.ndarray) -> None:
        if self.give_up is not None:
            self.on_demand[who] = self.rest[self.saved[who]]
            self.clock[who] += self.on_demand[who]
        self.rescued[who], self.state[who] = True, OVER

    def strike(self, who: np.ndarray) -> None:
        """The machines go."""
        self.interruptions[who] += 1
        self.state[who], self.left[who] = WAIT, self.waits(len(who))
        self.done[who], self.tail[who] = self.saved[who], np.inf

    def go_on(self, who: np.ndarray) -> None:
        """What was being done is done; the next thing begins."""
        was = self.state[who]
        for state, begin in (
            (WAIT, self.start),
            (START, self.train),
            (TRAIN, self.hold),
            (HOLD, self.save),
            (SAVE, self.after_save),
            (FINISH, self.finish),
        ):
            begin(who[was == state])

    def start(self, who: np.ndarray) -> None:
        self.state[who], self.left[who] = START, self.work.restart_seconds
        self.alive[who] = self.rng.exponential(1 / self.rate, len(who)) if self.rate else np.inf

    def train(self, who: np.ndarray) -> None:
        self.state[who], self.left[who] = TRAIN, self.due(who) * self.work.step_seconds

    def hold(self, who: np.ndarray) -> None:
        """A save waits for the one before."""
        self.done[who] += self.due(who)
        waits = np.isfinite(self.tail[who])
        self.state[who], self.left[who] = HOLD, np.where(waits, self.tail[who], 0.0)

    def save(self, who: np.ndarray) -> None:
        self.state[who], self.left[who] = SAVE, self.work.save_seconds

    def after_save(self, who: np.ndarray) -> None:
        self.flying[who], self.tail[who] = self.done[who], self.work.commit_seconds
        last = self.done[who] == self.work.steps
        self.train(who[~last])
        self.state[who[last]], self.left[who[last]] = FINISH, self.work.commit_seconds
        self.tail[who[last]] = np.inf

    def finish(self, who: np.ndarray) -> None:
        """The last commit."""
        self.saved[who], self.state[who] = self.done[who], OVER


def simulate(
    work: InterruptibleWork,
    every: int,
    per_hour: float,
    runs: int,
    seed: int,
    deadline: Deadline | None = None,
) -> Runs:
    """`runs` trainings with a save every `every` steps and `per_hour` interruptions."""
    simulation = _Simulation(work, every, per_hour, runs, seed)
    if deadline is not None:
        simulation.until(deadline)
    simulation.run()
    clocks = simulation.clock, simulation.running, simulation.on_demand
    hours = (each / 3600 for each in clocks)
    return Runs(*hours, simulation.interruptions, simulation.rescued)
