"""Spot machines until on-demand ones have to come, against the same rule in the simulation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.plan.risk import InterruptibleWork, interval, uninterrupted_seconds
from rekindle.plan.simulation import fallback
from tests.plan.events import Deadline, simulate, standard_error
from tests.plan.scenarios import MTBF_HOURS, RUNS, SETTINGS
from tests.support.plan_risk import everys, rates, works

SPOT, ON_DEMAND = 1.0, 3.0
# hours; an uninterrupted run takes a little over two
DEADLINES = (2.2, 2.6, 3.0, 4.0, 6.0)


def _check(setting: str, mtbf_hours: float, deadline_hours: float, runs: int) -> None:
    work, every = SETTINGS[setting]
    every = every or interval(work, 1 / mtbf_hours)
    found = fallback(work, every, 1 / mtbf_hours, deadline_hours)
    deadline = Deadline(deadline_hours)
    simulated = simulate(work, every, 1 / mtbf_hours, runs, 7, deadline)
    paid = SPOT * simulated.running + ON_DEMAND * simulated.on_demand
    assert standard_error(paid) < 0.005
    assert found.chance == pytest.approx(simulated.rescued.mean(), abs=0.02)
    assert found.cost_usd(SPOT, ON_DEMAND) == pytest.approx(paid.mean(), rel=0.02)
    if found.feasible:
        assert simulated.wall.max() <= deadline_hours + 1e-6


@pytest.mark.parametrize("deadline_hours", DEADLINES[1:4])
@pytest.mark.parametrize("mtbf_hours", [MTBF_HOURS[0], MTBF_HOURS[1]])
@pytest.mark.parametrize("setting", ["saves that block", "saves beside training"])
def test_chance_and_cost_of_the_fallback_are_those_of_ten_thousand_runs(
    setting: str, mtbf_hours: float, deadline_hours: float
) -> None:
    _check(setting, mtbf_hours, deadline_hours, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("deadline_hours", DEADLINES)
@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_chance_and_cost_of_the_fallback_are_those_of_many_runs(
    setting: str, mtbf_hours: float, deadline_hours: float
) -> None:
    _check(setting, mtbf_hours, deadline_hours, 2 * RUNS)


def test_it_may_fall_behind_by_the_deadline_less_what_all_of_it_takes_with_one_more_start() -> None:
    work = InterruptibleWork(steps=720, step_seconds=10, save_seconds=30, restart_seconds=120)
    # two hours of steps, 2 min for each start, 12 saves of half a minute, 5 min until machines are there
    found = fallback(work, 60, 1.0, 4.0)
    assert found.slack_hours == pytest.approx(4 - (7200 + 2 * 120 + 12 * 30) / 3600)


def test_a_deadline_that_on_demand_machines_miss_is_not_feasible() -> None:
    work = InterruptibleWork(steps=720, step_seconds=10, save_seconds=30, restart_seconds=120)
    least = uninterrupted_seconds(work, 60) / 3600
    assert not fallback(work, 60, 1.0, least - 0.05).feasible
    just = fallback(work, 60, 1.0, least + 0.01)
    assert (just.feasible, just.chance, just.spot_hours) == (True, 1.0, 0.0)
    assert just.on_demand_hours == pytest.approx(least)


@given(works, everys, rates, st.floats(1.0, 4.0))
@settings(max_examples=30)
def test_more_time_never_makes_the_fallback_likelier(
    work: InterruptibleWork, every: int, per_hour: float, share: float
) -> None:
    least = uninterrupted_seconds(work, every) / 3600
    deadlines = (share * least, share * least + 0.1, 2 * share * least + 1)
    found = [fallback(work, every, per_hour, hours) for hours in deadlines]
    chances = [each.chance for each in found]
    assert all(0 <= chance <= 1 for chance in chances)
    noise = 0.01  # of 4,096 simulated courses; 0.0052 was met
    assert chances[1] <= chances[0] + noise
    assert chances[2] <= chances[1] + noise
    for each in found:
        assert each.on_demand_hours <= least * (1 + 1e-6)
        assert each.spot_hours >= 0
