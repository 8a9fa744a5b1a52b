"""The runs that the planner draws, against ten thousand that are followed event by event."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from rekindle.plan.risk import InterruptibleWork, expected, interval, uninterrupted_seconds
from rekindle.plan.simulation import FEWEST_RUNS, MOST_INTERRUPTIONS, simulate
from tests.plan.events import simulate as followed
from tests.plan.scenarios import MTBF_HOURS, RUNS, SETTINGS
from tests.support.plan_risk import everys, rates, runs_of, works

WITHIN = 0.02
OFF_A_JUMP = 0.003  # hours


def _agrees(drawn: np.ndarray, followed: np.ndarray) -> None:
    for hours in np.quantile(followed, np.linspace(0.02, 0.98, 25)):
        # where waits are all the same the distribution jumps, by rounding to either side
        below, at_most = (float(np.mean(followed <= hours + d)) for d in (-1e-6, 1e-6))
        assert float(np.mean(drawn <= hours - 1e-5)) <= at_most + WITHIN
        assert float(np.mean(drawn <= hours + 1e-5)) >= below - WITHIN


def _check(setting: str, mtbf_hours: float, runs: int) -> None:
    work, every, found = runs_of(setting, mtbf_hours, runs)
    drawn, mean = simulate(work, every, 1 / mtbf_hours), expected(work, every, 1 / mtbf_hours)
    _agrees(drawn.wall, found.wall)
    _agrees(drawn.running, found.running)
    assert drawn.wall.mean() == pytest.approx(mean.wall_hours, rel=0.02)
    assert drawn.running.mean() == pytest.approx(mean.running_hours, rel=0.02)
    for share in (0.3, 0.5, 0.7):
        wall = np.quantile(found.wall, share) + OFF_A_JUMP
        running = np.quantile(found.running, 1 - share) + OFF_A_JUMP
        both = np.mean((found.wall <= wall) & (found.running <= running))
        assert drawn.at_most(wall, running) == pytest.approx(both, abs=WITHIN)


@pytest.mark.parametrize("mtbf_hours", [MTBF_HOURS[0], MTBF_HOURS[2]])
@pytest.mark.parametrize("setting", SETTINGS)
def test_times_and_costs_scatter_as_those_of_ten_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    _check(setting, mtbf_hours, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_times_and_costs_scatter_as_those_of_thirty_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    _check(setting, mtbf_hours, 3 * RUNS)


@pytest.mark.slow
def test_hundreds_of_interruptions_are_counted_too() -> None:
    work = InterruptibleWork(2_500, 10.0, 1.0, 5.0, wait_seconds=60.0)
    found = followed(work, 1, 60.0, 1_000, seed=5)
    assert found.interruptions.mean() > 500
    drawn = simulate(work, 1, 60.0)
    wall, running = np.quantile(found.wall, 0.5), np.quantile(found.running, 0.5)
    both = np.mean((found.wall <= wall) & (found.running <= running))
    assert drawn.at_most(wall, running) == pytest.approx(both, abs=3 * np.sqrt(0.5 / 1_000))


def test_with_thousands_of_interruptions_there_are_fewer_runs_whose_means_are_as_right() -> None:
    work = InterruptibleWork(100_000, 10.0, 5.0, 60.0, wait_seconds=300.0)
    drawn, mean = simulate(work, 20, 10.0), expected(work, 20, 10.0)
    assert mean.interruptions > 2_000
    assert FEWEST_RUNS <= drawn.wall.size < 1_000
    assert drawn.wall.mean() == pytest.approx(mean.wall_hours, rel=0.005)
    assert drawn.running.mean() == pytest.approx(mean.running_hours, rel=0.005)


def test_without_interruptions_only_the_first_wait_is_left_to_chance() -> None:
    work = InterruptibleWork(360, 10.0, 30.0, 120.0, wait_seconds=600.0)
    drawn = simulate(work, 60, 0.0)
    assert drawn.at_most(running_hours=3899 / 3600) == 0.0
    assert drawn.at_most(running_hours=3901 / 3600) == 1.0
    middle = float(np.quantile(drawn.wall, 0.5))
    assert middle * 3600 == pytest.approx(3900 + 600 * np.log(2), rel=0.01)


def test_where_no_attempt_gets_through_there_is_no_distribution() -> None:
    never = simulate(InterruptibleWork(1000, 10.0, 1.0, 1.0), 1000, 9e3)
    assert (never.at_most(wall_hours=1e9), never.at_most(running_hours=1e9)) == (0.0, 0.0)


def test_it_is_deterministic() -> None:
    work = InterruptibleWork(100_000, 1.0, 20.0, 180.0, commit_seconds=30.0, wait_seconds=600.0)
    assert (simulate(work, 300, 0.8).wall == simulate(work, 300, 0.8).wall).all()


@given(works, everys, rates)
@settings(max_examples=50)
def test_no_run_takes_less_than_one_without_interruptions(
    work: InterruptibleWork, every: int, per_hour: float
) -> None:
    if expected(work, every, 10 * per_hour).interruptions > MOST_INTERRUPTIONS:
        return
    drawn = simulate(work, every, per_hour)
    least = uninterrupted_seconds(work, every) / 3600
    assert drawn.running.min() >= least * (1 - 1e-9)
    assert (drawn.wall >= drawn.running * (1 - 1e-9)).all()
    high = float(np.quantile(drawn.wall, 0.9))
    assert drawn.at_most(high) >= 0.9 - 1e-3
    assert drawn.at_most(high, least * 0.999) == 0.0


@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
def test_more_interruptions_never_make_a_time_likelier(mtbf_hours: float) -> None:
    for work, every in SETTINGS.values():
        every = every or interval(work, 1 / mtbf_hours)
        few = simulate(work, every, 1 / mtbf_hours)
        many = simulate(work, every, 2 / mtbf_hours)
        for chance in (0.1, 0.5, 0.9):
            hours = float(np.quantile(many.wall, chance))
            assert few.at_most(hours) >= many.at_most(hours) - WITHIN
