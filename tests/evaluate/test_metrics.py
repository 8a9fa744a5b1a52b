"""Metrics against scikit-learn, and the paired bootstrap against itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference

from rekindle.evaluate.scores import ClassScores


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


def test_calibration_error_of_a_worked_example():
    # two answers at 0.9 of which one is right, two at 0.6 of which both are: (2*|0.9-0.5| + 2*|0.6-1|) / 4
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]])
    found = scores(probabilities, np.array([0, 1, 0, 0])).metrics
    assert found["calibration_error"] == pytest.approx(0.4)


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1", "log_loss", "calibration_error"])
def test_a_resample_scores_as_the_rows_it_picked(metric):
    probabilities, labels = predictions(1, 50, 3)
    picks = np.random.default_rng(0).integers(0, 50, (7, 50))
    one_by_one = [scores(probabilities[row], labels[row]).metrics[metric] for row in picks]
    assert scores(probabilities, labels).resampled(metric, picks) == pytest.approx(one_by_one)
