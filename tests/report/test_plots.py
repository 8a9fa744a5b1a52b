"""The arithmetic behind the plots, and the words beside them."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rekindle import formats
from rekindle.records import Comparison, Evidence, Registration, RunRecord
from rekindle.report import evaluation, plots, texts, verdicts
from rekindle.report.collect import RunFindings
from rekindle.report.drawing import axis, drawable, thin, time_axis
from rekindle.report.plots import Series, heatmap, mistakes
from rekindle.report.training import running_mean

anything = st.floats(allow_nan=True, allow_infinity=True)


@given(st.lists(anything, max_size=30), st.booleans(), st.booleans())
def test_an_axis_holds_its_values_between_few_round_ticks(
    values: list[float], zero: bool, tight: bool
) -> None:
    found = axis(values, zero=zero, tight=tight)
    assert found.low < found.high
    assert 1 <= len(found.ticks) <= 8
    slack = 1e-9 * max(abs(found.low), abs(found.high))
    for value in values:
        if drawable((0.0, value)):
            assert found.low - slack <= value <= found.high + slack
        assert math.isnan(value) or 0 <= found.at(value) <= 100


def test_ticks_are_the_numbers_a_person_would_choose() -> None:
    assert axis([0.3, 9.1]).ticks == (0, 2, 4, 6, 8, 10)
    assert axis([0.61, 0.98]).ticks == (0.6, 0.7, 0.8, 0.9, 1.0)
    assert axis([5.0, 5.0], zero=True).low == 0
    assert time_axis(40).ticks == (0, 10, 20, 30, 40)
    assert time_axis(0).ticks == (0,)
    assert len(time_axis(1e7).ticks) <= 5


@given(st.lists(st.tuples(anything, anything), max_size=60), st.floats(allow_nan=False))
def test_any_points_give_well_formed_svg(points: list[tuple[float, float]], level: float) -> None:
    ascending = sorted((p for p in points if not math.isnan(p[0])), key=lambda p: p[0])
    judged = [
        plots.Candidate(8e4 * i, y, x, level, bool(i % 2), "<") for i, (x, y) in enumerate(points)
    ]
    live = [(8e4 * i, x) for i, (x, _) in enumerate(points)]
    for drawn in (
        plots.line([Series("<a&", ascending, marks=True)], label='"<', guide=("&", level)),
        plots.life(judged, live, {(0.0, 9e4): "<&"}, end=5e6, label="&"),
        plots.reliability([(x, y, 3) for x, y in points], label="<"),
    ):
        if drawn:
            root = ET.fromstring(drawn)
            assert root.get("role") == "img"
            assert "nan" not in str(drawn)


@given(anything, anything, anything, anything)
@example(0.0, 0.0, 0.0, 5e-324)
@example(1e-310, 1e-310, 2e-310, 0.0)
def test_any_interval_gives_well_formed_svg(a: float, b: float, c: float, d: float) -> None:
    drawn = plots.interval(lower=a, estimate=b, upper=c, threshold=d, label="x")
    if drawn:
        ET.fromstring(drawn)


def test_thinning_keeps_spikes_gaps_and_the_ends() -> None:
    points = [(float(i), 0.0) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[7000] = (7000.0, math.nan)
    kept = thin(points, 400)
    assert len(kept) < 450
    assert (4321.0, 99.0) in kept
    assert any(math.isnan(y) for _, y in kept)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]


def test_a_running_mean_passes_over_gaps() -> None:
    values = [1.0, 3.0, math.nan, 5.0, 7.0]
    means = [y for _, y in running_mean(list(enumerate(values)), 2)]
    assert [means[i] for i in (0, 1, 3, 4)] == [1.0, 2.0, 4.0, 6.0]
    assert math.isnan(means[2])


def test_a_confusion_matrix_of_any_shape_is_drawn() -> None:
    matrix = ((5, 1, 0), (2, 4, 0), (0, 0, 0))
    root = ET.fromstring(heatmap(("a", "<b>"), matrix, label="x"))
    titles = [title.text for title in root.iter("title")]
    assert "a → <b>: 1 of 6 (16.7%)" in titles
    assert "2 → 2: 0 of 0 (0.0%)" in titles
    assert heatmap((), (), label="x") == ""
    ET.fromstring(heatmap(("a",), ((1, 2, 3), ()), label="ragged"))
    assert mistakes(("a", "<b>"), matrix) == (("<b>", "a", 2), ("a", "<b>", 1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (59.6, "1 min"),
        (200, "3 min 20 s"),
        (7500, "2 h 5 min"),
        (3599.7, "1 h"),
        (200_000, "2 d 7 h"),
        (None, "–"),
        (math.inf, "–"),
    ],
)
def test_durations_read_as_a_person_says_them(seconds: float | None, text: str) -> None:
    assert formats.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.97777, "0.9778"),
        (1.0, "1.0"),
        (-0.0087, "-0.0087"),
        (3e-5, "3e-05"),
        (1797, "1,797"),
        (math.nan, "not a number"),
        (-math.inf, "-∞"),
        (None, "–"),
        (0.0, "0.0"),
    ],
)
def test_metrics_have_four_decimals_at_most(value: float | None, text: str) -> None:
    assert formats.metric(value) == text


def test_credentials_are_blotted_out_and_the_rest_is_not() -> None:
    token = "hf_" + "a1B2" * 8
    text = f"https://ada:pw@host/x s3://k:s3cr@bucket {token} HF_TOKEN=abcdef123 max_tokens: 128000"
    shown = texts.without_assignments(text)
    assert shown == "https://•••@host/x s3://•••@bucket ••• HF_TOKEN=••• max_tokens: 128000"
    assert texts.without_credentials("tokenizer: a, HF_TOKEN: env:MY_TOKEN") == (
        "tokenizer: a, HF_TOKEN: env:MY_TOKEN"
    )


def test_a_log_loses_its_colours_and_its_overwritten_lines() -> None:
    assert texts.plain("\x1b[1;32mok\x1b[0m\r\nstep 1\rstep 2\rstep 3\r\n\x00a\tb") == (
        "ok\nstep 3\na\tb"
    )


RUN = RunRecord(run_id="r", name="n", platform="local", status="succeeded", started_at="")
BASE = Evidence(
    run_key="k",
    promote=True,
    reason="why",
    checks=(),
    metrics={"log_loss": 0.5},
    rows=1,
    examples="e",
)


def registered(
    decision: str, *, created: bool = True, aliases: tuple[str, ...] = ()
) -> RunFindings:
    registration = Registration(
        name="m",
        version="2",
        aliases=aliases,
        created=created,
        decision=decision,  # type: ignore[arg-type]
        tracking_uri="",
    )
    return RunFindings(registration=registration, evidence=BASE)


VERDICTS = {
    "promoted": (
        RUN,
        registered("promoted", aliases=("champion",)),
        "good",
        "Promoted: version 2 of m is now the champion.",
    ),
    "refused, no champion": (
        RUN,
        registered("refused"),
        "bad",
        "Refused: version 2 of m is kept as a challenger, there is still no champion.",
    ),
    "exact rerun": (
        RUN,
        registered("promoted", created=False, aliases=("champion",)),
        "good",
        "Nothing new: the same work is already version 2 of m, the champion. No version was made.",
    ),
    "approval": (
        RUN,
        registered("approval_needed"),
        "wait",
        "Waiting for approval: version 2 of m passed the gate"
        " and becomes champion when a person promotes it.",
    ),
    "passed, unregistered": (
        RUN,
        RunFindings(evidence=BASE),
        "quiet",
        "The gate passed; this run registered no model.",
    ),
    "failed after the gate": (
        RUN.model_copy(update={"status": "failed"}),
        RunFindings(evidence=BASE),
        "bad",
        "Failed. No model was promoted.",
    ),
    "failed after promotion": (
        RUN.model_copy(update={"status": "failed"}),
        registered("promoted", aliases=("champion",)),
        "bad",
        "Failed. Version 2 of m had become champion before.",
    ),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_verdict_claims_no_more_than_the_records(case: str) -> None:
    run, found, tone, sentence = VERDICTS[case]
    said = verdicts.verdict(run, found)
    assert (said.tone, said.sentence) == (tone, sentence)


def test_the_side_that_promotes_is_that_of_gains_for_any_metric() -> None:
    """Comparisons are turned so that more is better, also of a loss."""
    comparison = Comparison(
        metric="log_loss",
        estimate=0.1,
        lower=0.05,
        upper=0.15,
        confidence=0.95,
        resamples=100,
        seed=0,
    )
    evidence = BASE.model_copy(
        update={"champion_metrics": {"log_loss": 0.6}, "comparison": comparison}
    )
    run = RUN.model_copy(update={"spec": {"evaluate": {"gate": {"min_delta": 0.01}}}})
    drawn, said = evaluation.interval(run, evidence)
    root = ET.fromstring(drawn)
    goal = next(element for element in root.iter("rect") if element.get("class") == "goal")
    assert goal.get("x") != "0.00%"
    assert "span good" in str(drawn)
    assert said.startswith("The gain in log loss is +0.1")
