"""Expected time and cost of interruptions, against a simulation that knows no formula.

A point is 10,000 seeded runs, which puts the standard error of each mean under 0.5 %; the test says
so where it does not."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.errors import RequestError
from rekindle.plan.risk import (
    LARGEST_SHARE,
    LONGEST_SECONDS,
    InterruptibleWork,
    daly_seconds,
    expected,
    hazard,
    interval,
    uninterrupted_seconds,
)
from tests.plan.events import standard_error
from tests.plan.scenarios import MTBF_HOURS, RUNS, SETTINGS
from tests.support.plan_risk import everys, rates, runs_of, works

ROOT = Path(__file__).parents[2]
HOUR = InterruptibleWork(steps=360, step_seconds=10.0, save_seconds=30.0, restart_seconds=120.0)


# The hazard


def test_a_hazard_is_a_preset_by_name_or_a_number_of_the_users() -> None:
    assert hazard("rough").per_node_hour == 0.1
    assert hazard("rough").chosen == "preset rough"
    assert hazard(0.05) == dataclasses.replace(hazard("rough"), per_node_hour=0.05, chosen="given")


@pytest.mark.parametrize("choice", [-0.1, math.nan, math.inf])
def test_a_number_that_is_no_rate_is_refused(choice: float) -> None:
    with pytest.raises(RequestError) as caught:
        hazard(choice)
    assert caught.value.problems[0].fix


def test_a_cluster_is_struck_n_times_as_often_as_a_node_or_as_often_as_one() -> None:
    rough = hazard("rough")
    assert rough.per_hour(8, "independent") == pytest.approx(0.8)
    assert rough.per_hour(8, "together") == pytest.approx(0.1)


# The formula


def test_the_worked_example_of_the_docstring_holds() -> None:
    found = expected(HOUR, 60, 2.0)
    assert found.running_hours == pytest.approx(1.3783, abs=5e-5)
    assert found.lost_hours == pytest.approx(0.2072, abs=5e-5)
    assert found.interruptions == pytest.approx(2.757, abs=5e-4)
    assert found.cost_usd(10.0) == pytest.approx(13.783, abs=5e-4)


def test_with_saves_that_block_and_no_wait_it_is_dalys_formula_and_a_first_start() -> None:
    m, tau, save, start, solve = 24 * 3600, 100 * 60, 300.0, 600.0, 500 * 3600
    daly = m * math.exp(start / m) * (math.exp((tau + save) / m) - 1) * solve / tau
    first = m * (math.exp(start / m) - 1)
    work = InterruptibleWork(
        steps=500 * 60, step_seconds=60, save_seconds=save, restart_seconds=start
    )
    assert expected(work, 100, 1 / 24).wall_hours * 3600 == pytest.approx(daly + first, rel=1e-12)


def test_without_interruptions_it_is_one_wait_one_start_the_steps_and_the_saves() -> None:
    work = dataclasses.replace(HOUR, wait_seconds=300.0, commit_seconds=20.0)
    found = expected(work, 100, 0.0)
    assert found.wall_hours * 3600 == pytest.approx(300 + 120 + 3600 + 4 * 30 + 20)
    assert found.running_hours * 3600 == pytest.approx(uninterrupted_seconds(work, 100))
    assert (found.interruptions, found.lost_hours) == (0.0, 0.0)
    assert expected(work, 100, 1e-12).wall_hours == pytest.approx(found.wall_hours, rel=1e-9)


def test_what_can_never_get_through_takes_for_ever() -> None:
    found = expected(
        InterruptibleWork(steps=1000, step_seconds=10, save_seconds=1, restart_seconds=1), 1000, 9e3
    )
    assert math.isinf(found.wall_hours)
    assert math.isinf(found.cost_usd(1.0))


# Against the simulation


def _agrees(formula: float, values: np.ndarray, within: float = 0.02) -> None:
    mean = float(values.mean())
    error = float(values.std()) / math.sqrt(len(values))
    # a mean next to nothing has no meaningful share: what counts is how far the runs scatter
    assert abs(formula - mean) <= max(4.5 * error, 1e-6), (formula, mean, error)
    assert error > 0.005 * mean or abs(formula - mean) <= within * mean, (formula, mean)


def _check(setting: str, mtbf_hours: float, runs: int) -> None:
    work, every, found = runs_of(setting, mtbf_hours, runs)
    assert len(found.wall) >= 10_000
    assert standard_error(found.wall) < 0.005
    assert standard_error(found.running) < 0.005
    mean = expected(work, every, 1 / mtbf_hours)
    assert mean.wall_hours == pytest.approx(found.wall.mean(), rel=0.02)
    assert mean.cost_usd(55.04) == pytest.approx(55.04 * found.running.mean(), rel=0.02)
    _agrees(mean.wall_hours, found.wall)
    _agrees(mean.running_hours, found.running)
    _agrees(mean.wall_hours - mean.running_hours, found.wall - found.running)
    _agrees(mean.interruptions, found.interruptions)


@pytest.mark.parametrize("mtbf_hours", [MTBF_HOURS[0], MTBF_HOURS[2], MTBF_HOURS[-1]])
@pytest.mark.parametrize("setting", SETTINGS)
def test_expected_time_and_cost_are_those_of_ten_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    _check(setting, mtbf_hours, RUNS)


@pytest.mark.slow
@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_expected_time_and_cost_are_those_of_thirty_thousand_runs(
    setting: str, mtbf_hours: float
) -> None:
    _check(setting, mtbf_hours, 3 * RUNS)


# The interval


@pytest.mark.parametrize(("mtbf_hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_dalys_interval_is_that_of_his_figures(mtbf_hours: float, minutes: float) -> None:
    # figures 3 to 5: saves of 5 min
    assert daly_seconds(300, mtbf_hours * 3600) / 60 == pytest.approx(minutes, abs=0.5)


@pytest.mark.parametrize("mtbf_hours", MTBF_HOURS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_no_other_interval_within_the_bounds_is_more_than_half_a_percent_better(
    setting: str, mtbf_hours: float
) -> None:
    work, _ = SETTINGS[setting]
    chosen = interval(work, 1 / mtbf_hours)
    most = math.ceil(max(LONGEST_SECONDS, work.save_seconds / LARGEST_SHARE) / work.step_seconds)
    least = max(1, math.ceil(work.commit_seconds / work.step_seconds))
    others = range(least, min(most, work.steps) + 1)
    best = min(expected(work, every, 1 / mtbf_hours).running_hours for every in others)
    assert expected(work, chosen, 1 / mtbf_hours).running_hours <= 1.005 * best


def test_nothing_is_risked_longer_than_an_hour_unless_saves_are_dear() -> None:
    week = InterruptibleWork(steps=60_000, step_seconds=10, save_seconds=20, restart_seconds=100)
    assert interval(week, 0.0) * 10 <= LONGEST_SECONDS
    dear = dataclasses.replace(week, save_seconds=300)
    assert interval(dear, 0.0) * 10 == pytest.approx(300 / LARGEST_SHARE, rel=0.05)


# What holds for every training


SLIGHT = 1 + 1e-9


@given(works, everys, rates)
def test_it_never_takes_less_than_without_interruptions_and_adds_up(
    work: InterruptibleWork, every: int, per_hour: float
) -> None:
    found = expected(work, every, per_hour)
    least = uninterrupted_seconds(work, every) / 3600
    assert found.running_hours * SLIGHT >= least
    assert found.running_hours * SLIGHT >= work.steps * work.step_seconds / 3600
    if math.isfinite(found.wall_hours):
        assert 0.0 <= found.lost_hours <= found.running_hours
        waits = (1 + found.interruptions) * work.wait_seconds / 3600
        assert found.wall_hours == pytest.approx(found.running_hours + waits)


@given(works, everys, rates, st.floats(1.0, 10.0))
def test_more_interruptions_never_take_less(
    work: InterruptibleWork, every: int, per_hour: float, more: float
) -> None:
    less, most = expected(work, every, per_hour), expected(work, every, per_hour * more)
    assert less.wall_hours <= most.wall_hours * SLIGHT
    assert less.running_hours <= most.running_hours * SLIGHT
    assert less.interruptions <= most.interruptions * SLIGHT


@given(works, everys, rates, st.integers(1, 5_000))
def test_more_steps_never_take_less(
    work: InterruptibleWork, every: int, per_hour: float, more: int
) -> None:
    longer = dataclasses.replace(work, steps=work.steps + more)
    less, most = expected(work, every, per_hour), expected(longer, every, per_hour)
    assert less.wall_hours <= most.wall_hours * SLIGHT


@given(works, everys, st.floats(1e-6, 0.3), st.integers(1, 64))
def test_more_nodes_never_take_less_and_one_node_is_the_same_at_both_ends(
    work: InterruptibleWork, every: int, per_node_hour: float, nodes: int
) -> None:
    found = hazard(per_node_hour)
    together = expected(work, every, found.per_hour(nodes, "together"))
    independent = expected(work, every, found.per_hour(nodes, "independent"))
    assert together.wall_hours <= independent.wall_hours * SLIGHT
    if nodes == 1:
        assert together == independent


@given(works, st.floats(0, 4.0))
@settings(max_examples=200)
def test_the_interval_is_a_whole_number_of_steps_within_its_bounds(
    work: InterruptibleWork, per_hour: float
) -> None:
    every = interval(work, per_hour)
    assert isinstance(every, int)
    assert 1 <= every <= work.steps
    assert every * work.step_seconds >= min(work.commit_seconds, work.steps * work.step_seconds)
    longest = max(LONGEST_SECONDS, work.save_seconds / LARGEST_SHARE, work.commit_seconds)
    assert every * work.step_seconds <= longest + 2 * work.step_seconds
