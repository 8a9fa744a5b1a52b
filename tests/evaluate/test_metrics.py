"""Metrics against scikit-learn, and those of resamples against themselves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from rekindle.evaluate.gate import judge
from rekindle.objectives.classes import KIND
from rekindle.objectives.classes.scores import ClassScores
from rekindle.spec.model import EvaluateSpec


def scores(probabilities, labels):
    return ClassScores(probabilities, labels, tuple(map(str, range(probabilities.shape[1]))))


def predictions(seed, rows, classes):
    generator = np.random.default_rng(seed)
    raw = generator.random((rows, classes)) + 1e-3
    return raw / raw.sum(1, keepdims=True), generator.integers(0, classes, rows)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 200), st.integers(2, 6))
def test_metrics_agree_with_scikit_learn(seed, rows, classes):
    probabilities, labels = predictions(seed, rows, classes)
    found = scores(probabilities, labels).metrics
    guesses = probabilities.argmax(1)
    seen = sorted(set(labels) | set(guesses))
    assert found["accuracy"] == pytest.approx(reference.accuracy_score(labels, guesses))
    assert found["macro_f1"] == pytest.approx(
        reference.f1_score(labels, guesses, labels=seen, average="macro", zero_division=0)
    )
    assert found["log_loss"] == pytest.approx(
        reference.log_loss(labels, probabilities, labels=range(classes))
    )
    assert (
        np.array(scores(probabilities, labels).confusion())
        == reference.confusion_matrix(labels, guesses, labels=range(classes))
    ).all()


def recall_at_90_precision(is_class, probabilities):
    precision, recall, _ = reference.precision_recall_curve(is_class, probabilities)
    return recall[precision >= 0.9].max()


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 200), st.integers(2, 6), st.booleans())
def test_areas_agree_with_scikit_learn(seed, rows, classes, tied):
    probabilities, labels = predictions(seed, rows, classes)
    if tied:
        probabilities = np.round(probabilities, 1)
    found = scores(probabilities, labels).metrics
    known = [c for c in range(classes) if 0 < (labels == c).sum() < rows]
    for name, function in (
        ("roc_auc", reference.roc_auc_score),
        ("average_precision", reference.average_precision_score),
        ("recall_at_90_precision", recall_at_90_precision),
    ):
        each = [function(labels == c, probabilities[:, c]) for c in known]
        assert found[name] == pytest.approx(np.mean(each) if each else 0.5), name


def test_many_classes_have_no_areas_and_a_gate_that_asks_for_one_says_so():
    probabilities, labels = predictions(0, 50, 21)
    found = scores(probabilities, labels)
    assert "roc_auc" not in found.metrics
    assert scores(probabilities[:, :20], labels % 20).metrics["roc_auc"] > 0
    verdict = judge(
        EvaluateSpec(gate={"metric": "roc_auc"}), "roc_auc", found, None, [], "accuracy"
    )
    assert not verdict.promote
    assert verdict.reason == "roc_auc is measured of at most 20 classes"


def test_a_model_of_a_rare_class_has_to_beat_blind_answers_in_the_gates_metric():
    """It never predicts the class, and so is right as often as the most frequent answer; but it ranks well."""
    random = np.random.default_rng(0)
    labels = (np.arange(500) % 50 == 0).astype(np.int64)
    rare = np.where(labels, 0.3, 0.02) * random.random(500)
    ranking = scores(np.stack([1 - rare, rare], 1), labels)
    blind = scores(np.tile([0.98, 0.02], (500, 1)), labels)
    for metric, expected in (
        ("accuracy", 0.98),
        ("average_precision", 0.5),
        ("roc_auc", 0.5),
        ("macro_f1", 0.4949),
        ("recall_at_90_precision", 0.5),
        ("log_loss", 0.0980),
        ("calibration_error", 0.98),
    ):
        spec, told = EvaluateSpec(gate={"metric": metric}), (metric, ranking, None, [], "accuracy")
        check = next(c for c in judge(spec, *told).checks if c.name == "beats_majority")
        assert check.threshold == pytest.approx(expected, abs=1e-4), metric
        passes = metric not in ("accuracy", "macro_f1", "calibration_error")
        assert check.passed is passes, check.detail
        assert not blind.trivial(metric).passed


def test_calibration_error_of_a_worked_example():
    # two answers at 0.9 of which one is right, two at 0.6 of which both are: (2*|0.9-0.5| + 2*|0.6-1|) / 4
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    found = scores(probabilities, np.array([0, 1, 0, 0])).metrics
    assert found["calibration_error"] == pytest.approx(0.4)


@pytest.mark.parametrize("metric", KIND.metrics)
def test_a_resample_scores_as_the_rows_it_picked(metric):
    probabilities, labels = predictions(1, 50, 3)
    picks = np.random.default_rng(0).integers(0, 50, (7, 50))
    one_by_one = [scores(probabilities[row], labels[row]).metrics[metric] for row in picks]
    counts = np.stack([np.bincount(row, minlength=50) for row in picks]).astype(float)
    assert scores(probabilities, labels).weighted(metric, counts) == pytest.approx(one_by_one)
