"""Scores of regressions: metrics as scikit-learn has them, slices, and what decides on a champion."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import mean_absolute_error, r2_score, root_mean_squared_error

from rekindle.evaluate import gate
from rekindle.objectives.numbers.scores import NumberScores
from rekindle.records import Contender
from rekindle.spec.model import EvaluateSpec

RANDOM = np.random.default_rng(0)
TRUE = RANDOM.normal(1e6, 250.0, 400)


def scores_of(values, true=TRUE):
    predicted = pa.array(
        [{"value": value} for value in values], pa.struct([("value", pa.float64())])
    )
    contender = Contender(run_key="k", digest="d", scores="s", precision="fp32", labels=())
    rows = pa.table({"label": pa.array(true), "candidate": predicted})
    return NumberScores.of(rows, "candidate", contender)


def test_metrics_are_those_of_scikit_learn():
    values = TRUE + RANDOM.normal(20, 100, len(TRUE))
    assert scores_of(values).metrics == pytest.approx(
        {
            "r2": r2_score(TRUE, values),
            "rmse": root_mean_squared_error(TRUE, values),
            "mae": mean_absolute_error(TRUE, values),
        }
    )
    assert scores_of([], true=TRUE[:0]).metrics == {}


def test_a_slice_is_measured_by_the_variance_of_all_rows():
    near = np.abs(TRUE - 1e6) < 5
    assert near.sum() > 3
    values = TRUE + 10
    one = scores_of(values).picked(near)
    assert one.metrics["r2"] == pytest.approx(1 - 100 / TRUE.var())
    assert r2_score(TRUE[near], values[near]) < 0, "by their own variance it would seem useless"


@pytest.mark.parametrize(
    ("metric", "middle"), [("r2", np.mean), ("rmse", np.mean), ("mae", np.median)]
)
def test_it_has_to_beat_the_best_constant(metric, middle):
    true = np.exp(RANDOM.normal(0, 1, 300))
    constant = scores_of(np.full(300, middle(true)), true).trivial(metric)
    assert not constant.passed
    assert constant.value == pytest.approx(constant.threshold)
    assert scores_of(true + 0.1, true).trivial(metric).passed


def test_a_number_that_is_none_makes_all_metrics_none_and_is_refused():
    values = TRUE.copy()
    values[7] = math.nan
    broken = scores_of(values)
    assert not broken.finite
    assert all(math.isnan(value) for value in broken.metrics.values())
    verdict = gate.judge(EvaluateSpec(), "r2", broken, None, [], "r2")
    assert not verdict.promote
    assert broken.calibration() == ()


@pytest.mark.parametrize("metric", ["r2", "rmse", "mae"])
def test_a_gate_promotes_smaller_errors_and_refuses_larger_ones(metric):
    good, bad = (scores_of(TRUE + RANDOM.normal(0, noise, len(TRUE))) for noise in (50, 100))
    judged = gate.judge(EvaluateSpec(), metric, good, bad, [], "r2")
    assert judged.promote, judged.reason
    assert judged.comparison.estimate > 0
    assert not gate.judge(EvaluateSpec(), metric, bad, good, [], "r2").promote
    assert not gate.judge(EvaluateSpec(), metric, good, good, [], "r2").promote, (
        "as good is not better"
    )


def test_predictions_are_drawn_in_groups_of_like_size_over_the_true_numbers():
    values = TRUE + 30
    bins = scores_of(values).calibration()
    assert sum(one.rows for one in bins) == len(TRUE)
    assert {one.rows for one in bins} <= {26, 27}
    for one in bins:
        assert one.confidence - one.accuracy == pytest.approx(30)
        assert one.lower <= one.confidence <= one.upper


@pytest.mark.parametrize("unit", [1e-12, 1e-6, 1.0, 1e9])
def test_r2_knows_no_unit(unit):
    noise = RANDOM.normal(0, 100, len(TRUE))
    plain = scores_of(TRUE - 1e6 + noise, TRUE - 1e6)
    scaled = scores_of(unit * (TRUE - 1e6 + noise), unit * (TRUE - 1e6))
    assert scaled.metrics["r2"] == pytest.approx(plain.metrics["r2"])
    verdict = gate.judge(EvaluateSpec(floor={"rmse": 1e-20}), "rmse", scaled, None, [], "r2")
    assert "rmse 0.0000" not in verdict.reason


def test_where_nothing_varies_there_is_no_r2_and_no_promotion():
    flat = scores_of([5.0, 5.5], np.array([5.0, 5.0]))
    assert math.isnan(flat.metrics["r2"])
    assert flat.metrics["mae"] == 0.25
    assert not gate.judge(EvaluateSpec(), "r2", flat, None, [], "r2").promote
