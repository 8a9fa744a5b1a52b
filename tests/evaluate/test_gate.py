"""The gate: a table of who is promoted and who is not, and why."""

import numpy as np
import pytest

from rekindle.evaluate import metrics
from rekindle.evaluate.gate import Scored, judge
from rekindle.records import Slice
from rekindle.spec.model import EvaluateSpec

ROWS, CLASSES = 400, 4
LABELS = np.random.default_rng(7).integers(0, CLASSES, ROWS)


def contender(accuracy, seed=0, labels=LABELS):
    """Predictions of which exactly `accuracy` are right, each with probability 0.7 on its answer."""
    answers = labels.copy()
    wrong = np.random.default_rng(seed).permutation(len(labels))[
        : round((1 - accuracy) * len(labels))
    ]
    answers[wrong] = (answers[wrong] + 1) % CLASSES
    probabilities = np.full((len(labels), CLASSES), 0.1)
    probabilities[np.arange(len(labels)), answers] = 0.7
    return Scored(probabilities, metrics.score(probabilities, labels))


def spec(**fields):
    return EvaluateSpec.model_validate(fields)


def part(candidate, champion, rows=100, name="a"):
    return Slice(
        column="c",
        value=name,
        rows=rows,
        candidate={"accuracy": candidate},
        champion={"accuracy": champion},
    )


FLOOR = {"floor": {"accuracy": 0.8}}
TABLE = [
    ("a first model that reaches the floor is promoted", FLOOR, 0.9, None, (), True, ""),
    ("a first model below the floor is not", FLOOR, 0.7, None, (), False, "floor_accuracy"),
    ("a first model that guesses the majority is not", {}, 0.25, None, (), False, "beats_majority"),
    ("a ceiling on log-loss is a floor turned round", {"floor": {"log_loss": 0.1}}, 0.99, None, (), False, "floor_log_loss"),
    ("a clearly better model is promoted", FLOOR, 0.95, 0.85, (), True, ""),
    ("an equal model is not", FLOOR, 0.9, "same", (), False, "better_than_champion"),
    ("a model better by noise is not", FLOOR, 0.905, 0.9, (), False, "better_than_champion"),
    ("a worse model is not", FLOOR, 0.85, 0.95, (), False, "better_than_champion"),
    ("better, but by less than min_delta, is not", {"gate": {"min_delta": 0.2}}, 0.95, 0.85, (), False, "better_than_champion"),
    ("better in log-loss, where less is more", {"gate": {"metric": "log_loss"}}, 0.97, 0.8, (), True, ""),
    ("better, but below the floor, is not", {"floor": {"accuracy": 0.97}}, 0.95, 0.8, (), False, "floor_accuracy"),
    ("a slice that drops too much refuses", FLOOR, 0.95, 0.85, (part(0.7, 0.9),), False, "slice:c=a"),
    ("a small slice does not decide", FLOOR, 0.95, 0.85, (part(0.0, 1.0, rows=29),), True, ""),
    ("a drop within the limit is allowed", FLOOR, 0.95, 0.85, (part(0.85, 0.9),), True, ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "ours", "theirs", "slices", "promoted", "failing"),
    [t[1:] for t in TABLE],
    ids=[t[0] for t in TABLE],
)
def test_the_gate_decides(fields, ours, theirs, slices, promoted, failing):
    candidate = contender(ours)
    champion = (
        candidate if theirs == "same" else None if theirs is None else contender(theirs, seed=1)
    )
    verdict = judge(spec(**fields), LABELS, candidate, champion, slices)
    assert verdict.promote is promoted, verdict.reason
    assert [c.name for c in verdict.checks if not c.passed] == ([failing] if failing else [])
    assert verdict.reason


@pytest.mark.parametrize("who", ["candidate", "champion"])
def test_what_is_not_a_number_refuses(who):
    broken = contender(0.95)
    broken.probabilities_NC[3, 0] = np.nan
    broken = Scored(broken.probabilities_NC, metrics.score(broken.probabilities_NC, LABELS))
    fine = contender(0.8, seed=1)
    pair = (broken, fine) if who == "candidate" else (contender(0.95), broken)
    verdict = judge(spec(), LABELS, *pair, ())
    assert not verdict.promote
    assert f"the {who}'s" in verdict.reason


def test_no_examples_refuse():
    empty = Scored(np.zeros((0, CLASSES)), {})
    assert not judge(spec(), np.zeros(0, np.int64), empty, empty, ()).promote


def test_the_interval_is_the_same_every_time_and_holds_the_estimate():
    pair = contender(0.95), contender(0.9, seed=1)
    first, second = (judge(spec(), LABELS, *pair, ()).comparison for _ in range(2))
    assert first == second
    assert first.lower < first.estimate < first.upper


def test_the_bootstrap_interval_covers_the_truth_about_as_often_as_it_says():
    """Two models of equal skill: in about 95 of 100 samples the interval must hold zero."""
    generator = np.random.default_rng(0)
    held = 0
    for i in range(100):
        labels = generator.integers(0, CLASSES, 200)
        ours, theirs = (
            contender(float(generator.binomial(200, 0.9)) / 200, seed=1000 * i + k, labels=labels)
            for k in (1, 2)
        )
        found = judge(spec(gate={"resamples": 400}), labels, ours, theirs, ()).comparison
        held += found.lower <= 0 <= found.upper
    assert 85 <= held <= 100
