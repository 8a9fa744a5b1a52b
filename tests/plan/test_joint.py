"""Time and budget kept at once, against ten thousand simulated runs a point."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.plan.joint import chance_of_both
from rekindle.plan.odds import hopeless, odds
from rekindle.plan.risk import Work
from tests.plan.scenarios import SETTINGS
from tests.plan.simulation import simulate
from tests.plan.test_odds import WITHIN
from tests.plan.test_risk import everys, rates, runs_of, works

OFF_A_JUMP = 0.003  # hours


@pytest.mark.parametrize("mtbf_hours", [1 / 3, 6.0])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_chance_of_keeping_both_limits_is_that_of_ten_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    work, every, found = runs_of(setting, mtbf_hours)
    both = odds(work, every, 1 / mtbf_hours)
    for share in (0.3, 0.5, 0.7):
        wall = np.quantile(found.wall, share) + OFF_A_JUMP
        running = np.quantile(found.running, 1 - share) + OFF_A_JUMP
        least, most = chance_of_both(both, work, every, 1 / mtbf_hours, wall, running)
        assert least == most
        simulated = np.mean((found.wall <= wall) & (found.running <= running))
        assert least == pytest.approx(simulated, abs=WITHIN)


def test_hundreds_of_interruptions_are_counted_too() -> None:
    work = Work(2_500, 10.0, 1.0, 5.0, wait_seconds=60.0)
    every, per_hour, runs = 1, 60.0, 1_000
    found = simulate(work, every, per_hour, runs, seed=5)
    assert found.interruptions.mean() > 500
    wall, running = np.quantile(found.wall, 0.5), np.quantile(found.running, 0.5)
    both = odds(work, every, per_hour)
    least, most = chance_of_both(both, work, every, per_hour, wall, running)
    assert least == most
    simulated = np.mean((found.wall <= wall) & (found.running <= running))
    assert least == pytest.approx(simulated, abs=3 * np.sqrt(0.25 / runs))


def test_with_thousands_of_interruptions_there_are_bounds() -> None:
    work = Work(100_000, 10.0, 5.0, 60.0, wait_seconds=300.0)
    both = odds(work, 20, 10.0)
    wall, running = both.wall.quantile(0.5), both.running.quantile(0.5)
    least, most = chance_of_both(both, work, 20, 10.0, wall, running)
    assert (least, most) == pytest.approx((0.0, 0.5), abs=1e-3)


@given(works, everys, rates, st.floats(0.01, 0.99), st.floats(0.01, 0.99))
@settings(max_examples=30)
def test_both_is_never_likelier_than_either(
    work: Work, every: int, per_hour: float, in_time: float, in_budget: float
) -> None:
    if hopeless(work, every, per_hour):
        return
    both = odds(work, every, per_hour)
    wall, running = both.wall.quantile(in_time), both.running.quantile(in_budget)
    chances = both.wall.at_most(wall), both.running.at_most(running)
    least, most = chance_of_both(both, work, every, per_hour, wall, running)
    assert max(0.0, sum(chances) - 1) - 1e-9 <= least <= most <= min(chances) + 1e-9
