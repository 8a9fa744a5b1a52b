"""How good a model is at each class: against scikit-learn's own report, and entities by reading them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from rekindle.evaluate.evaluate import _classes
from rekindle.objectives.classes.scores import ClassScores
from rekindle.objectives.tags.scores import Scheme, TagScores
from rekindle.records import Evidence

NAMES = ("bad", "fair", "good", "never", "absent")


def predicted(answers, labels, names=NAMES):
    return ClassScores(np.eye(len(names))[answers] * 0.8 + 0.04, labels, names)


def test_classes_are_those_of_scikit_learn():
    random = np.random.default_rng(3)
    labels = random.integers(0, 4, 500)  # nothing is absent's
    answers = np.where(random.random(500) < 0.7, labels % 3, random.integers(0, 3, 500))
    found = predicted(answers, labels).classes()
    theirs = zip(
        *precision_recall_fscore_support(labels, answers, labels=range(5), zero_division=np.nan),
        strict=True,
    )
    for part, (precision, recall, f1, rows) in zip(found, theirs, strict=True):
        numbers = [float("nan") if n is None else n for n in (part.precision, part.recall, part.f1)]
        assert numbers == pytest.approx([precision, recall, f1], nan_ok=True), part
        assert (part.rows, part.predicted) == (
            rows,
            int((answers == NAMES.index(part.label)).sum()),
        )


def evidence_of(scores, champion=None):
    return Evidence(
        run_key="k",
        promote=False,
        reason="",
        checks=(),
        metrics={},
        classes=_classes(scores, champion),
        rows=20,
        examples="e",
    )


def test_a_class_that_is_never_predicted_is_warned_of_and_an_absent_one_is_not():
    labels = np.array([0, 1, 2, 3, 3])
    evidence = evidence_of(predicted(np.array([0, 1, 2, 0, 1]), labels))
    assert evidence.warnings == ("the model never predicts `never` (2 held out)",)
    assert evidence_of(predicted(labels, labels)).warnings == ()


def test_of_many_classes_that_are_never_predicted_the_most_frequent_are_named():
    part = evidence_of(predicted(np.zeros(4, int), np.array([0, 1, 2, 3]))).classes[0]
    never = [
        part.model_copy(update={"label": f"c{n}", "rows": n, "predicted": 0}) for n in range(1, 101)
    ]
    evidence = Evidence(
        run_key="k",
        promote=False,
        reason="",
        checks=(),
        metrics={},
        classes=tuple(never),
        rows=20,
        examples="e",
    )
    assert evidence.warnings == (
        "the model never predicts `c100` (100 held out), `c99` (99 held out), `c98` (98 held out), "
        "`c97` (97 held out), `c96` (96 held out) and 95 more of 100 classes",
    )


def test_the_champions_f1_stands_beside_each_class():
    labels = np.array([0, 1, 2, 3])
    ours, theirs = predicted(labels, labels), predicted(np.zeros(4, int), labels)
    found = {part.label: (part.f1, part.champion_f1) for part in evidence_of(ours, theirs).classes}
    assert found["bad"] == (1.0, 0.4)
    assert found["fair"] == (1.0, 0.0)
    assert found["absent"] == (None, None)


def test_entities_are_counted_by_type():
    tags = ("B-A", "B-B", "I-A", "O")
    true, guess = np.array([0, 2, 3, 1, 3, 1]), np.array([0, 2, 3, 0, 1, 1])
    scores = TagScores(true, guess, np.zeros(6), np.array([4, 2]), Scheme.of(tags))
    found = {p.label: (p.rows, p.predicted, p.precision, p.recall) for p in scores.classes()}
    assert found == {"A": (1, 2, 0.5, 1.0), "B": (2, 2, 0.5, 0.5)}
