"""The whole distribution of time and cost, against ten thousand simulated runs a point."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings

from rekindle.plan.odds import CELLS, SMOOTHED, Curve, odds
from rekindle.plan.risk import Work, expected, interval
from tests.plan.scenarios import MTBF_HOURS, RUNS, SETTINGS
from tests.plan.test_risk import everys, rates, runs_of, works

WITHIN = 0.02


def _agrees(curve: Curve, values: np.ndarray) -> None:
    sideways = SMOOTHED * curve.cell_hours if curve.disturbed else 0.0
    for hours in np.quantile(values, np.linspace(0.02, 0.98, 25)):
        simulated_below = float(np.mean(values < hours - 1e-6))
        simulated = float(np.mean(values <= hours + 1e-6))
        assert curve.at_most(hours - sideways - 1e-6) <= simulated + WITHIN
        assert curve.at_most(hours + sideways + 1e-6) >= simulated_below - WITHIN
        # and where there is no jump, without any play
        if simulated - simulated_below < 0.001:
            assert curve.at_most(hours) == pytest.approx(simulated, abs=WITHIN)


@pytest.mark.parametrize("mtbf_hours", [MTBF_HOURS[0], MTBF_HOURS[2]])
@pytest.mark.parametrize("setting", SETTINGS)
def test_chances_of_time_and_cost_are_those_of_ten_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    work, every, found = runs_of(setting, mtbf_hours)
    both = odds(work, every, 1 / mtbf_hours)
    _agrees(both.wall, found.wall)
    _agrees(both.running, found.running)


@pytest.mark.slow
@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_chances_of_time_and_cost_are_those_of_thirty_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    work, every, found = runs_of(setting, mtbf_hours, 3 * RUNS)
    both = odds(work, every, 1 / mtbf_hours)
    _agrees(both.wall, found.wall)
    _agrees(both.running, found.running)


@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_mean_of_the_distribution_is_the_expected_value(
    setting: str, mtbf_hours: float
) -> None:
    work, every = SETTINGS[setting]
    every = every or interval(work, 1 / mtbf_hours)
    mean, both = expected(work, every, 1 / mtbf_hours), odds(work, every, 1 / mtbf_hours)
    chances = (np.arange(250) + 0.5) / 250
    for curve, hours in ((both.wall, mean.wall_hours), (both.running, mean.running_hours)):
        assert np.mean([curve.quantile(c) for c in chances]) == pytest.approx(hours, rel=0.004)


def test_without_interruptions_only_the_first_wait_is_left_to_chance() -> None:
    work = Work(360, 10.0, 30.0, 120.0, wait_seconds=600.0)
    both = odds(work, 60, 0.0)
    assert both.running.at_most(3899 / 3600) == 0.0
    assert both.running.at_most(3901 / 3600) == 1.0
    assert both.wall.quantile(0.5) * 3600 == pytest.approx(3900 + 600 * np.log(2))
    fixed = odds(dataclasses.replace(work, wait="fixed"), 60, 0.0)
    assert fixed.wall.quantile(0.9) * 3600 == pytest.approx(4500)


def test_where_no_attempt_gets_through_there_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="no chance"):
        odds(Work(1000, 10.0, 1.0, 1.0), 1000, 9e3)


def test_the_far_end_is_sure_where_the_excess_begins_at_once() -> None:
    # next to no chance an attempt, and nothing but lost work: nearly an exponential distribution
    both = odds(Work(177, 60.0, 0.0, 0.0, commit_seconds=63.0), 177, 4.0)
    mean = expected(Work(177, 60.0, 0.0, 0.0, commit_seconds=63.0), 177, 4.0).running_hours
    assert both.running.at_most(18 * mean) == pytest.approx(1.0, abs=1e-6)
    assert both.running.at_most(0.05 * mean) == pytest.approx(1 - np.exp(-0.05), abs=1e-3)


def test_it_is_deterministic_and_takes_less_than_fifty_milliseconds() -> None:
    work = Work(100_000, 1.0, 20.0, 180.0, commit_seconds=30.0, wait_seconds=600.0)
    took = []
    for _ in range(5):
        began = time.perf_counter()
        first = odds(work, 300, 0.8)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.05
    assert first == odds(work, 300, 0.8)


@given(works, everys, rates)
@settings(max_examples=50)
def test_chances_rise_with_time_and_quantiles_turn_them_round(
    work: Work, every: int, per_hour: float
) -> None:
    if expected(work, every, per_hour).wall_hours > 1e5:
        return
    both = odds(work, every, per_hour)
    for curve in (both.wall, both.running):
        assert len(curve.disturbed) in (0, CELLS)
        quantiles = [curve.quantile(chance) for chance in (0.1, 0.5, 0.9, 0.99)]
        assert quantiles == sorted(quantiles)
        chances = [curve.at_most(hours) for hours in quantiles]
        assert all(
            found >= c - 1e-6 for found, c in zip(chances, (0.1, 0.5, 0.9, 0.99), strict=True)
        )
        assert curve.at_most(curve.start_hours * 0.999) == 0.0
        assert curve.at_most(1e7) == pytest.approx(1.0, abs=1e-6)


@given(works, everys, rates)
@settings(max_examples=50)
def test_more_interruptions_never_make_a_time_likelier(
    work: Work, every: int, per_hour: float
) -> None:
    if expected(work, every, 2 * per_hour).wall_hours > 1e5:
        return
    few, many = odds(work, every, per_hour).wall, odds(work, every, 2 * per_hour).wall
    slight = SMOOTHED * (few.cell_hours + many.cell_hours)
    for chance in (0.1, 0.5, 0.9):
        hours = many.quantile(chance)
        assert few.at_most(hours + slight) >= many.at_most(hours) - 0.005
