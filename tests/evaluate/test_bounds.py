"""The gate's bounds against tests and intervals that others wrote, and against all that can happen."""

from statistics import NormalDist

import numpy as np
import pytest
from scipy import stats

from rekindle.evaluate.bounds import (
    PairedAnswers,
    Resamples,
    bounds_of,
    least_that_differ,
    units_in,
)
from rekindle.objectives.classes.scores import ClassScores
from rekindle.objectives.numbers.scores import NumberScores
from rekindle.objectives.tags.scores import Scheme, TagScores
from rekindle.objectives.tokens.scores import TokenScores
from rekindle.spec.model import GateSpec

TAIL = 0.025


@pytest.mark.parametrize("tail", [0.025, 0.001])
def test_above_zero_they_are_the_exact_test_of_mcnemar(tail):
    for fixed in range(0, 25, 2):
        for broken in range(0, 12, 2):
            p_value = (
                stats.binomtest(fixed, fixed + broken, alternative="greater").pvalue
                if fixed + broken
                else 1.0
            )
            above = PairedAnswers(fixed, broken, 200).lower(tail) > 0
            assert above is bool(p_value <= tail), (fixed, broken, p_value)
            mirrored = PairedAnswers(broken, fixed, 200).chance_of_loss()
            assert mirrored == pytest.approx(p_value)


def test_of_one_proportion_they_are_those_of_clopper_and_pearson():
    for broken in range(6):
        exact = stats.binomtest(broken, 40).proportion_ci(1 - 2 * TAIL, "exact")
        assert PairedAnswers(0, broken, 40).lower(TAIL) == pytest.approx(-exact.high)
        assert PairedAnswers(broken, 0, 40).upper(TAIL) == pytest.approx(exact.high)


def tango(b, c, n, tail=TAIL):
    """The score interval of Tango (1998, Statistics in Medicine 17: 891-908), by his equations 9 to 12."""

    def score(delta):
        linear = -b - c + (2 * n - b + c) * delta
        root = np.sqrt(linear**2 + 8 * n * c * delta * (1 - delta))
        share = (root - linear) / (4 * n)
        return (b - c - n * delta) / np.sqrt(n * (2 * share + delta * (1 - delta)))

    ends = []
    for wanted in (NormalDist().inv_cdf(1 - tail), NormalDist().inv_cdf(tail)):
        low, high = -1 + 1e-9, 1 - 1e-9
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if score(middle) > wanted else (low, middle)
        ends.append(low)
    return ends


def test_published_examples():
    """Airway hyper-responsiveness before and after a transplantation, 21 children of whom 1 and 7 changed (Bentur et al. 2009),
    in Fagerland, Lydersen & Laake, BMC Med Res Methodol 13:91 (2013): the exact conditional test has p = 0.0703; and in their
    Statistics in Medicine 33: 2850 (2014): Tango's interval is -0.517 to -0.026."""
    children = PairedAnswers(fixed=1, broken=7, rows=21)
    assert 2 * children.chance_of_loss() == pytest.approx(0.0703, abs=5e-5)
    lower, upper = tango(1, 7, 21)
    assert (lower, upper) == pytest.approx((-0.517, -0.026), abs=6e-4)
    assert children.lower(TAIL) <= lower < upper <= children.upper(TAIL)
    assert children.upper(TAIL) > 0, "p is above 0.05"
    # complete response to a therapy, 161 patients of whom 6 and 16 changed (Cavo et al. 2012): p = 0.0525
    patients = PairedAnswers(fixed=6, broken=16, rows=161)
    assert 2 * patients.chance_of_loss() == pytest.approx(0.0525, abs=5e-5)


@pytest.mark.parametrize(("b", "c", "n"), [(60, 40, 1_000), (30, 30, 300), (5, 3, 400)])
def test_they_are_those_of_tango_but_for_about_one_answer(b, c, n):
    bounds = PairedAnswers(b, c, n)
    for ours, theirs in zip((bounds.lower(TAIL), bounds.upper(TAIL)), tango(b, c, n), strict=True):
        assert ours == pytest.approx(theirs, abs=1.5 / n)


@pytest.mark.parametrize(("rows", "tail"), [(8, 0.025), (15, 0.025), (20, 0.002)])
def test_of_all_that_can_happen_no_more_errs_than_promised(rows, tail):
    """Every table of so many rows, at every share that differs, for true gains from -0.3 to 0.2."""
    tables = [(b, c) for b in range(rows + 1) for c in range(rows + 1 - b)]
    lower = {table: PairedAnswers(*table, rows).lower(tail) for table in tables}
    for gain in (-0.3, -0.1, -0.05, -0.01, 0.0, 0.02, 0.2):
        wrong = np.array([table for table in tables if lower[table] > gain])
        if not len(wrong):
            continue
        for broken in np.linspace(max(0.0, -gain), (1 - gain) / 2, 40):
            shares = [broken + gain, broken, max(0.0, 1 - 2 * broken - gain)]
            counts = np.column_stack([wrong, rows - wrong.sum(1)])
            assert stats.multinomial.pmf(counts, rows, shares).sum() <= tail + 1e-9, (gain, broken)


def of_right(right_N, labels_N):
    answers = np.where(right_N, labels_N, 1 - labels_N)
    return ClassScores(np.eye(2)[answers] * 0.8 + 0.1, labels_N, ("a", "b"))


def test_drawn_weights_give_what_the_closed_form_gives():
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, 150)
    right = random.random((2, 150)) < 0.8
    pair = of_right(right[0], labels), of_right(right[1], labels)
    exact = bounds_of(GateSpec(), "accuracy", *pair)
    drawn = bounds_of(GateSpec(resamples=100_000), "accuracy", *pair, np.arange(150))
    assert isinstance(exact, PairedAnswers)
    assert isinstance(drawn, Resamples)
    assert drawn.estimate == pytest.approx(exact.estimate)
    for tail in (0.025, 0.001):
        assert drawn.lower(tail) == pytest.approx(exact.lower(tail), abs=0.003)
        assert drawn.upper(tail) == pytest.approx(exact.upper(tail), abs=0.003)
    assert drawn.chance_of_loss() == pytest.approx(exact.chance_of_loss(), abs=0.01)


def test_they_are_gaffkes_bound_in_the_form_of_order_statistics():
    """Learned-Miller & Thomas (2020, arXiv:1905.06208): of numbers in [0, 1], sorted, 1 less the mean of gaps weighted by
    sorted uniform draws."""
    random = np.random.default_rng(0)
    n, draws = 40, 40_000
    ours, theirs = -np.log(random.uniform(1e-12, 1, (2, n)))
    cost = 27.6310211
    gains = np.sort((theirs - ours + cost) / (2 * cost))[::-1]  # in [0, 1]
    from_above = 1 - gains
    gaps = np.diff(from_above, append=1.0)
    sums = 1 - np.sort(random.random((draws, n)), axis=1) @ gaps
    expected = (1 - np.quantile(sums, 1 - TAIL)) * 2 * cost - cost
    labels = np.zeros(n, np.int64)
    pair = (
        ClassScores(np.stack([np.exp(-x), 1 - np.exp(-x)], 1), labels, ("a", "b"))
        for x in (ours, theirs)
    )
    bounds = bounds_of(GateSpec(metric="log_loss", resamples=draws), "log_loss", *pair)
    assert bounds.lower(TAIL) == pytest.approx(expected, abs=0.06)


def test_of_many_rows_they_are_those_of_student():
    random = np.random.default_rng(3)
    true, noise = random.normal(0, 1, 20_000), random.normal(0, 0.3, (2, 20_000))
    pair = [NumberScores(true + one, true, 1.0) for one in noise]
    losses = np.abs(noise[1]) - np.abs(noise[0])
    expected = stats.ttest_1samp(losses, 0).confidence_interval(0.95)
    bounds = bounds_of(GateSpec(), "mae", *pair)
    reach = expected.high - expected.low
    assert bounds.lower(TAIL) == pytest.approx(expected.low, abs=0.08 * reach)
    assert bounds.upper(TAIL) == pytest.approx(expected.high, abs=0.08 * reach)


def nearly_equal():
    """Two models that answer all of fifty examples alike, of each kind; and metrics of it."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 50)
    probabilities = np.eye(3)[labels] * 0.7 + 0.1
    classes = ClassScores(probabilities, labels, ("a", "b", "c"))
    targets = random.integers(5, 20, 50).astype(float)
    tokens = TokenScores(3 * targets, targets / 2, targets, 4 * targets, 5.0)
    true = random.normal(0, 1, 50)
    scheme = Scheme.of(("O", "B-X"))
    tags = np.tile([0, 1, 0, 0], 50)
    texts = TagScores(tags, tags, np.full(200, 0.1), np.full(50, 4), scheme)
    return [
        *((classes, name) for name in classes.metrics),
        *((tokens, name) for name in tokens.metrics),
        *(
            (NumberScores(true + 0.1, true, float(true.var())), name)
            for name in ("r2", "rmse", "mae")
        ),
        *((texts, name) for name in texts.metrics),
    ]


@pytest.mark.parametrize(
    ("scores", "metric"), nearly_equal(), ids=[f"{type(s).__name__}-{m}" for s, m in nearly_equal()]
)
def test_no_interval_of_equal_models_has_no_width(scores, metric):
    bounds = bounds_of(GateSpec(), metric, scores, scores)
    assert bounds.estimate == 0
    assert bounds.lower(TAIL) < -1e-4
    assert bounds.upper(TAIL) > 1e-4
    assert bounds.detectable(TAIL) > 1e-4
    assert bounds.chance_of_loss() > 0.4


def test_an_end_beyond_the_resamples_lies_further_out_than_one_that_they_reach():
    values = -np.random.default_rng(0).exponential(size=1_000_000)
    few, many = Resamples(0.0, values[:2_000], values[:2_000]), Resamples(0.0, values, values)
    for tail in (1e-3, 1e-4):
        assert few.lower(tail) == pytest.approx(np.log(tail), rel=0.15)
        assert many.lower(tail) == pytest.approx(np.log(tail), rel=0.05)
    assert few.lower(1e-3) < few.lower(5e-3) < few.lower(0.025)


def test_units_are_counted_by_what_they_weigh():
    assert units_in(None, np.ones(7)) == 7
    clusters = np.repeat(np.arange(30), [290] + [10] * 29)
    assert units_in(clusters, np.ones(580)) == pytest.approx(3.87, abs=0.01)
    assert units_in(None, np.array([1000.0, 1, 1])) == pytest.approx(1.004, abs=1e-3)
    assert units_in(None, np.zeros(4)) == 0


def test_as_few_as_chance_allows_have_to_differ():
    assert [least_that_differ(tail) for tail in (0.025, 0.05, 0.001)] == [6, 5, 10]
