"""What gates do over a hundred retrainings, by simulation: `pytest -m slow -s` prints the table of docs/run.md."""

import numpy as np
import pytest

from rekindle.evaluate import gate
from rekindle.objectives.classes.scores import ClassScores
from rekindle.spec.model import EvaluateSpec

ROWS, RETRAININGS, EPOCHS, TRIALS = 1_000, 100, 60, 150
POLICIES = {
    "superiority": {},
    "superiority, looks: 12": {"looks": 12},
    "noninferiority, margin: 0.01": {"mode": "noninferiority"},
    "noninferiority, margin: 0.01, looks: 12": {"mode": "noninferiority", "looks": 12},
}


class Contest:
    """Models of one skill: each is right in a row with that row's own probability, 0.8 in the mean."""

    def __init__(self, seed, policy):
        self.random = np.random.default_rng(seed)
        self.spec = EvaluateSpec.model_validate({"gate": {"resamples": 100, **policy}})
        self.labels = self.random.integers(0, 2, ROWS)
        self.easy = self.random.beta(2.4, 0.6, ROWS)

    def model(self, better=0.0):
        right = self.random.random(ROWS) < self.easy
        right |= self.random.random(ROWS) < better / 0.2
        answers = np.where(right, self.labels, 1 - self.labels)
        return ClassScores(np.eye(2)[answers] * 0.8 + 0.1, self.labels, ("a", "b"))

    def promotes(self, candidate, champion, earlier):
        level = gate.confidence_of_look(self.spec.gate, earlier)
        told = (candidate, champion, (), "accuracy", (), None, level)
        return gate.judge(self.spec, "accuracy", *told).promote


def epoch(seed, policy):
    """How many of a hundred models of one skill are promoted, and how many points the last champion looks better than it is."""
    contest, promoted = Contest(seed, policy), 0
    champion = contest.model()
    for earlier in range(RETRAININGS):
        candidate = contest.model()
        if contest.promotes(candidate, champion, earlier):
            champion, promoted = candidate, promoted + 1
    return promoted, 100 * (champion.metrics["accuracy"] - contest.easy.mean())


def power(policy, better, earlier):
    """How often a model that is better is promoted against a champion that was not flattered."""
    contests = (Contest(seed, policy) for seed in range(TRIALS))
    return np.mean([c.promotes(c.model(better), c.model(), earlier) for c in contests])


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_a_hundred_retrainings_that_change_nothing(name):
    policy = POLICIES[name]
    promoted, flattered = np.array([epoch(seed, policy) for seed in range(EPOCHS)]).T
    found = [power(policy, better, earlier) for earlier in (0, 24) for better in (0.01, 0.02, 0.03)]
    figures = " | ".join(f"{share:.0%}" for share in [np.mean(promoted > 0), *found])
    print(f"\n| {name} | {promoted.mean():.2f} | {flattered.mean():+.1f} | {figures} |")
    if "looks" in name and "non" not in name:
        assert np.mean(promoted > 0) <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / EPOCHS)
        assert abs(flattered.mean()) < 0.5
    if not policy:
        assert np.mean(promoted > 0) > 0.2
    assert found[2] > found[0]


@pytest.mark.slow
def test_rows_that_decide_nothing_do_not_flatter_the_champion():
    """The same hundred retrainings, a fifth of the rows set aside (`evaluate.audit`): points that the last champion looks
    better than it is, on the rows that picked it and on the others."""
    found = []
    for seed in range(2 * EPOCHS):
        contest = Contest(seed, {})
        aside = np.arange(ROWS) % 5 == 0
        champion = contest.model()
        for _ in range(RETRAININGS):
            candidate = contest.model()
            if contest.promotes(candidate.picked(~aside), champion.picked(~aside), 0):
                champion = candidate
        found.append(
            [
                champion.picked(part).metrics["accuracy"] - contest.easy[part].mean()
                for part in (~aside, aside)
            ]
        )
    judged, audited = 100 * np.mean(found, axis=0)
    deviation = 100 * np.std(found, axis=0)[1] / np.sqrt(2 * EPOCHS)
    print(
        f"\nlooks better by {judged:+.2f} points on rows that judge, {audited:+.2f} aside (±{deviation:.2f})"
    )
    assert judged > 1
    assert abs(audited) < 3 * deviation < judged
