"""Scores of taggers: metrics by hand, words without a prediction, numbers that are none."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from rekindle.errors import DataError
from rekindle.evaluate import compare, gate
from rekindle.objectives.tags.scores import TagScores
from rekindle.records import Churn, Contender
from rekindle.spec.model import EvaluateSpec

LABELS = ("B-A", "I-A", "O")
LOUD = 5.0


def scores_of(texts, labels=LABELS):
    """Of texts as lists of (true tag, predicted tag or None for a word that was cut off)."""
    logits = [[LOUD * (name == guess) for _, guess in text for name in labels] for text in texts]
    rows = pa.table(
        {
            "label": pa.array(
                [[true for true, _ in text] for text in texts], pa.list_(pa.string())
            ),
            "candidate": pa.array(
                [{"logits": row} for row in logits], pa.struct([("logits", pa.list_(pa.float32()))])
            ),
        }
    )
    return TagScores.of(
        rows,
        "candidate",
        Contender(run_key="k", digest="d", scores="s", precision="fp32", labels=labels),
    )


TEXTS = [
    [("B-A", "B-A"), ("I-A", "I-A"), ("O", "O")],  # found
    [("B-A", "B-A"), ("I-A", "O"), ("O", "B-A")],  # too short, and one that is none
    [("O", "O"), ("O", None), ("B-A", None)],  # cut off
]


def test_metrics_are_ratios_over_all_texts():
    scores = scores_of(TEXTS)
    certain, wrong = -math.log(math.exp(5) / (math.exp(5) + 2)), -math.log(1 / (math.exp(5) + 2))
    assert scores.metrics == pytest.approx(
        {
            "entity_f1": 2 * 1 / (3 + 3),
            "entity_precision": 1 / 3,
            "entity_recall": 1 / 3,
            "token_accuracy": 5 / 9,
            "log_loss": (5 * certain + 2 * wrong + 2 * math.log(3)) / 9,
        }
    )
    assert scores.confusion() == ((2, 0, 0), (0, 1, 1), (1, 0, 2))
    assert scores.trivial("entity_f1").passed
    assert scores.trivial("entity_f1").threshold == pytest.approx(4 / 9)


def test_churn_is_of_words_and_a_word_without_a_prediction_is_an_answer_of_its_own():
    ours = scores_of([TEXTS[0], [("B-A", "B-A"), ("I-A", "I-A"), ("O", "O")], TEXTS[2]])
    found = compare.churn_of(ours, scores_of(TEXTS))
    assert found == Churn(answers=9, share=2 / 9, fixed=2, broken=0)
    known = [("O", "O"), ("O", "O"), ("B-A", None)]
    found = compare.churn_of(scores_of(TEXTS), scores_of([*TEXTS[:2], known]))
    assert found == Churn(answers=9, share=1 / 9, fixed=0, broken=1)


def test_resamples_and_parts_give_what_their_texts_alone_give():
    scores, picks = scores_of(TEXTS), np.array([[0, 0, 1], [2, 2, 2], [2, 1, 0]])
    counts = np.stack([np.bincount(row, minlength=3) for row in picks]).astype(float)
    for metric in scores.metrics:
        expected = [scores_of([TEXTS[i] for i in row]).metrics[metric] for row in picks]
        assert scores.weighted(metric, counts) == pytest.approx(expected), metric
    part = scores.picked(np.array([True, False, True]))
    assert part.metrics == pytest.approx(scores_of([TEXTS[0], TEXTS[2]]).metrics)
    assert len(part) == 2


def test_texts_without_an_entity_score_zero_and_no_more():
    scores = scores_of([[("O", "O")]])
    assert (scores.metrics["entity_f1"], scores.metrics["token_accuracy"]) == (0.0, 1.0)


def test_what_is_not_a_number_is_refused():
    scores = scores_of(TEXTS)
    broken = TagScores(
        scores.true_W,
        scores.predicted_W,
        np.where(scores.true_W == 1, np.nan, scores.nats_W),
        scores.lengths_N,
        scores.scheme,
    )
    assert all(math.isnan(value) for value in broken.metrics.values())
    verdict = gate.judge(EvaluateSpec(), "entity_f1", broken, None, [], "token_accuracy")
    assert not verdict.promote
    assert "is not a number" in verdict.reason


def test_a_better_tagger_wins_and_an_equal_one_does_not():
    good, bad = TEXTS[0], [("B-A", "O"), ("I-A", "O"), ("O", "O")]
    champion = scores_of([bad, good] * 30)
    better = gate.judge(
        EvaluateSpec(), "entity_f1", scores_of([good, good] * 30), champion, [], "token_accuracy"
    )
    assert better.promote, better.reason
    assert "entity_f1 1.0000 is better than the champion by +0.3333" in better.reason
    equal = gate.judge(EvaluateSpec(), "entity_f1", champion, champion, [], "token_accuracy")
    assert not equal.promote


def test_tags_that_the_model_does_not_know_and_other_words_are_refused():
    with pytest.raises(DataError, match=r"does not know: \['I-A'\]"):
        scores_of(TEXTS, labels=("B-A", "O"))
    rows = pa.table(
        {
            "label": pa.array([["O", "O"]]),
            "candidate": pa.array([{"logits": [1.0, 2.0, 3.0]}]),
        }
    )
    with pytest.raises(DataError, match="other words"):
        TagScores.of(
            rows,
            "candidate",
            Contender(run_key="k", digest="d", scores="s", precision="fp32", labels=LABELS),
        )
    assert scores_of([]).metrics == {}
