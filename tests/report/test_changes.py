"""What a change is coloured by on cards: where chance does not explain it."""

from __future__ import annotations

import pytest

from rekindle.records import Comparison, Slice
from rekindle.report.verdicts import improvement


def gain(metric: str, lower: float, upper: float) -> Comparison:
    return Comparison(
        metric=metric,
        estimate=(lower + upper) / 2,
        lower=lower,
        upper=upper,
        confidence=0.95,
        resamples=0,
        seed=0,
    )


@pytest.mark.parametrize(
    ("metric", "candidate", "champion", "comparison", "tone"),
    [
        ("accuracy", 0.9061, 0.9, gain("accuracy", -0.01, 0.022), "quiet"),
        ("accuracy", 0.95, 0.9, gain("accuracy", 0.02, 0.08), "good"),
        ("accuracy", 0.85, 0.9, gain("accuracy", -0.08, -0.02), "bad"),
        ("log_loss", 0.3, 0.4, gain("log_loss", 0.05, 0.15), "good"),
        ("macro_f1", 0.95, 0.9, gain("accuracy", 0.02, 0.08), "quiet"),
        ("accuracy", 0.95, 0.9, None, "quiet"),
        ("accuracy", float("nan"), 0.9, None, "quiet"),
    ],
)
def test_a_change_has_a_colour_where_its_interval_holds_no_zero(
    metric: str, candidate: float, champion: float, comparison: Comparison | None, tone: str
) -> None:
    assert improvement(metric, candidate, champion, comparison)[1] == tone


@pytest.mark.parametrize(
    ("candidate", "p_value", "tone"),
    [(0.7, 0.001, "bad"), (0.7, 0.2, "quiet"), (0.95, 1.0, "quiet"), (0.7, None, "quiet")],
)
def test_a_loss_on_a_slice_has_a_colour_where_chance_does_not_explain_it(
    candidate: float, p_value: float | None, tone: str
) -> None:
    part = Slice(
        column="c",
        value="a",
        rows=59,
        candidate={"accuracy": candidate},
        champion={"accuracy": 0.9},
        p_value=p_value,
    )
    assert improvement("accuracy", candidate, 0.9, None, part)[1] == tone
