"""How often the gate errs in the cases that hurt, by simulation, as docs/gate.md has it:
`python -m tests.evaluate.gate_table [REPEATS]` prints the table, `make gate-table` writes it there.

Of each case a draw gives two models of which the candidate is exactly as good as the champion, or
exactly at the margin; `power` are draws of one that is truly better. `before`: the same draws by
what decided before these bounds, percentiles of a paired bootstrap."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.evaluate.compare import compare, too_few_units
from rekindle.objectives import LOWER_IS_BETTER
from rekindle.objectives.classes.scores import ClassScores
from rekindle.objectives.numbers.scores import NumberScores
from rekindle.objectives.scores import ModelScores
from rekindle.objectives.tokens.scores import TokenScores
from rekindle.spec.model import GateSpec

SEED, REPEATS, RESAMPLES = 1, 200, 800
PROMISED = 0.025
DOCS = Path(__file__).parents[2] / "docs" / "gate.md"
BEGIN, END = "<!-- results: make gate-table writes them -->", "<!-- end of results -->"

Draw = Callable[[np.random.Generator], tuple[ModelScores, ModelScores, Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of data: `draw` gives candidate, champion and clusters; the true gain is `truth`."""

    name: str
    rows: int
    metric: str
    draw: Draw
    truth: float = 0.0


def classes_of(probability_N: np.ndarray, labels_N: np.ndarray) -> ClassScores:
    """Two classes, of which the true one has this probability."""
    known = np.stack([probability_N, 1 - probability_N], 1)
    rows_NC = np.where(labels_N[:, None] == 0, known, known[:, ::-1])
    return ClassScores(rows_NC, labels_N, ("a", "b"))


def of_right(random: np.random.Generator, right_N: np.ndarray) -> ClassScores:
    """Answers that are right where `right_N` says."""
    return classes_of(np.where(right_N, 0.9, 0.1), random.integers(0, 2, len(right_N)))


def pair_of_right(
    random: np.random.Generator, ours_N: np.ndarray, theirs_N: np.ndarray
) -> tuple[ClassScores, ClassScores]:
    """Two models on the same rows."""
    labels_N = random.integers(0, 2, len(ours_N))
    ours, theirs = (
        classes_of(np.where(right_N, 0.9, 0.1), labels_N) for right_N in (ours_N, theirs_N)
    )
    return ours, theirs


def differing(rows: int, share: float, gain: float = 0.0) -> Draw:
    """One of the two is right in a `share` of rows; `gain` shifts which."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        drawn_N, both_N = random.random(rows), random.random(rows) < 0.85
        fixed_N = drawn_N < (share + gain) / 2
        broken_N = ~fixed_N & (drawn_N < share)
        ours_N, theirs_N = both_N.copy(), both_N.copy()
        ours_N[fixed_N], theirs_N[fixed_N] = True, False
        ours_N[broken_N], theirs_N[broken_N] = False, True
        return *pair_of_right(random, ours_N, theirs_N), None

    return draw


def breaking(rows: int, loss: float) -> Draw:
    """The candidate breaks a share of right answers and fixes none."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        right_N = random.random(rows) < 0.9
        kept_N = right_N & (random.random(rows) >= loss / 0.9)
        return *pair_of_right(random, kept_N, right_N), None

    return draw


def clustered(sizes: list[int], shift: float = 0.15) -> Draw:
    """What makes one of the models better belongs to a cluster."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        clusters_N = np.repeat(np.arange(len(sizes)), sizes)
        shift_N = np.repeat(random.normal(0, shift, len(sizes)), sizes)
        drawn_2N = random.random((2, len(clusters_N)))
        pair = pair_of_right(random, drawn_2N[0] < 0.8 + shift_N, drawn_2N[1] < 0.8 - shift_N)
        return *pair, clusters_N

    return draw


def rarely_wrong(rows: int) -> Draw:
    """The candidate is sure and wrong in 1 % of rows, and better in the others: equal on average."""
    champion, wrong = -math.log(0.8), -math.log(1e-6)
    better = (champion - 0.01 * wrong) / 0.99

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        labels_N = random.integers(0, 2, rows)
        wrong_N = random.random(rows) < 0.01
        candidate = classes_of(np.where(wrong_N, 1e-6, math.exp(-better)), labels_N)
        return candidate, classes_of(np.full(rows, 0.8), labels_N), None

    return draw


def calibrated(rows: int, gain: float = 0.0) -> Draw:
    """Two classifiers that share part of what they see; well behaved."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        labels_N, shared_N = random.integers(0, 2, rows), random.standard_normal(rows)
        signs_N = 1 - 2 * labels_N
        models = []
        for strength in (1.28 + gain, 1.28):
            own_N = random.standard_normal(rows)
            seen_N = strength + 1.12 * signs_N * (shared_N + own_N)
            models.append(classes_of(1 / (1 + np.exp(-seen_N)), labels_N))
        return models[0], models[1], None

    return draw


def numbers(rows: int, sigma: float, gain: float = 0.0) -> Draw:
    """Errors of a log-normal law."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        true_N = random.normal(0, 1, rows)
        models = []
        for scale in (1 - gain, 1.0):
            signs_N = random.choice([-1.0, 1.0], rows)
            errors_N = scale * signs_N * random.lognormal(0, sigma, rows)
            models.append(NumberScores(true_N + errors_N, true_N, 1.0))
        return models[0], models[1], None

    return draw


def far_off(rows: int) -> Draw:
    """The candidate's numbers are five deviations off in 0.04 % of rows: R² falls by 0.01."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        true_N = random.normal(0, 1, rows)
        champion = NumberScores(true_N + random.normal(0, 0.3, rows), true_N, 1.0)
        off_N = np.where(random.random(rows) < 0.0004, 5.0, 0.0)
        errors_N = champion.values_N - true_N
        moved_N = true_N + np.sqrt(errors_N**2 + off_N**2)
        return NumberScores(moved_N, true_N, 1.0), champion, None

    return draw


def broken_texts(rows: int) -> Draw:
    """One text in a thousand costs the candidate ten nats a token more: the margin of 0.01."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        targets_N = random.integers(10, 40, rows).astype(float)
        theirs_N = random.normal(3, 0.2, rows)
        ours_N = theirs_N + np.where(random.random(rows) < 0.001, 10.0, 0.0)
        models = [
            TokenScores(nats_N * targets_N, targets_N / 3, targets_N, 4 * targets_N, 6.0)
            for nats_N in (ours_N, theirs_N)
        ]
        return models[0], models[1], None

    return draw


def texts(rows: int, gain: float = 0.0) -> Draw:
    """Two language models on texts of uneven length."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        targets_N = np.maximum(1, random.lognormal(3, 0.8, rows).astype(int)).astype(float)
        hard_N = random.normal(3, 0.5, rows)
        models = [
            TokenScores(
                (hard_N + random.normal(-better, 0.2, rows)) * targets_N,
                targets_N / 3,
                targets_N,
                4 * targets_N,
                6.0,
            )
            for better in (gain, 0.0)
        ]
        return models[0], models[1], None

    return draw


def rare_class(rows: int) -> Draw:
    """Three classes, one of 3 % of the rows; a fifth of the answers are guesses."""

    def draw(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
        labels_N = random.choice(3, rows, p=[0.6, 0.37, 0.03])
        models = []
        for _ in range(2):
            guessed_N = random.choice(3, rows, p=[0.5, 0.4, 0.1])
            answers_N = np.where(random.random(rows) < 0.2, guessed_N, labels_N)
            models.append(ClassScores(np.eye(3)[answers_N] * 0.85 + 0.05, labels_N, tuple("abc")))
        return models[0], models[1], None

    return draw


NOT_WORSE = [
    *(
        Case("breaks 1.0 % of rows, fixes none", n, "accuracy", breaking(n, 0.01), -0.01)
        for n in (10, 20, 50, 100, 200, 400, 1_000)
    ),
    *(
        Case("breaks 2.5 %, fixes 1.5 %", n, "accuracy", differing(n, 0.04, -0.01), -0.01)
        for n in (100, 400, 1_000)
    ),
    *(
        Case("0.1 % of texts broken", n, "log_loss", broken_texts(n), -0.01)
        for n in (50, 400, 1_000)
    ),
    *(Case("0.04 % of numbers far off", n, "r2", far_off(n), -0.01) for n in (50, 400, 1_000)),
]
BETTER = [
    *(
        Case(f"{share:.1%} of rows differ", n, "accuracy", differing(n, share))
        for n, share in (
            (10, 0.5),
            (20, 0.3),
            (50, 0.1),
            (100, 0.05),
            (300, 0.02),
            (1_000, 0.005),
            (1_000, 0.1),
        )
    ),
    *(
        Case("sure and wrong in 1 % of rows", n, "log_loss", rarely_wrong(n))
        for n in (50, 200, 500, 1_000)
    ),
    *(Case("well behaved", n, "log_loss", calibrated(n)) for n in (50, 300, 1_000)),
    *(
        Case("well behaved", 300, metric, calibrated(300))
        for metric in (
            "roc_auc",
            "average_precision",
            "recall_at_90_precision",
            "calibration_error",
        )
    ),
    *(Case("a class of 3 %", n, "macro_f1", rare_class(n)) for n in (100, 300)),
    *(Case("texts of uneven length", n, "log_loss", texts(n)) for n in (50, 300)),
    *(
        Case(f"{n} clusters of 10 rows", 10 * n, "accuracy", clustered([10] * n))
        for n in (10, 15, 40)
    ),
    *(
        Case(
            f"{n} clusters, one has half the rows",
            20 * (n - 1),
            "accuracy",
            clustered([10 * (n - 1)] + [10] * (n - 1)),
        )
        for n in (12, 30)
    ),
    Case(
        "60 clusters of 2 to 80 rows",
        1_120,
        "accuracy",
        clustered([2, 3, 5, 10, 20, 80] * 8 + [5, 10, 25] * 4),
    ),
    *(
        Case("log-normal errors", n, metric, numbers(n, 1.5))
        for n in (10, 20, 50, 200, 1_000)
        for metric in ("mae", "rmse")
    ),
]
POWER = [
    *(
        Case(f"+{gain:.0%}, {share:.0%} of rows differ", n, "accuracy", differing(n, share, gain))
        for n, share, gain in ((100, 0.1, 0.05), (300, 0.1, 0.03), (1_000, 0.1, 0.02))
    ),
    *(
        Case(f"about +{nats} nats, well behaved", n, "log_loss", calibrated(n, gain))
        for n, gain, nats in ((300, 0.3, 0.08), (1_000, 0.3, 0.08), (3_000, 0.3, 0.08))
    ),
    *(
        Case("+0.05 nats, texts of uneven length", n, "log_loss", texts(n, 0.05))
        for n in (100, 300, 1_000)
    ),
    *(
        Case("errors smaller by 30 %, log-normal", n, "mae", numbers(n, 1.0, 0.3))
        for n in (50, 200, 1_000)
    ),
    *(
        Case("30 clusters of 10 rows, +10 %", 300, "accuracy", draw)
        for draw in [lambda random: _better_in_clusters(random)]
    ),
]


def _better_in_clusters(random: np.random.Generator) -> tuple[ModelScores, ModelScores, Any]:
    clusters_N = np.repeat(np.arange(30), 10)
    drawn_2N = random.random((2, 300))
    return *pair_of_right(random, drawn_2N[0] < 0.85, drawn_2N[1] < 0.75), clusters_N


def before(
    gate: GateSpec, case: Case, ours: ModelScores, theirs: ModelScores, clusters: Any
) -> float:
    """The lower bound that decided before: a percentile of resampled rows or clusters."""
    generator = np.random.default_rng(0)
    units = len(ours) if clusters is None else int(clusters.max()) + 1
    counts_RU = generator.multinomial(units, np.full(units, 1 / units), RESAMPLES).astype(float)
    counts_RN = counts_RU if clusters is None else counts_RU[:, clusters]
    sign = -1 if case.metric in LOWER_IS_BETTER else 1
    with np.errstate(invalid="ignore", divide="ignore"):
        gains = sign * (
            ours.weighted(case.metric, counts_RN) - theirs.weighted(case.metric, counts_RN)
        )
    return float(np.nanquantile(gains, (1 - gate.confidence) / 2))


def measure(case: Case, repeats: int, seed: int = SEED) -> tuple[float, float, float]:
    """The share of draws whose lower bound lies above the true gain, now and before, and the share
    that were refused because units tell too little. Of a case of `POWER`: above zero."""
    random = np.random.default_rng([seed, case.rows, len(case.name)])
    now = then = refused = 0
    policy = GateSpec(
        resamples=RESAMPLES, mode="noninferiority" if case.truth < 0 else "superiority"
    )
    for repeat in range(repeats):
        ours, theirs, clusters = case.draw(random)
        gate = policy.model_copy(update={"seed": repeat})
        then += before(gate, case, ours, theirs, clusters) > case.truth
        if too_few_units(ours, clusters, "a column"):
            refused += 1
            continue
        now += compare(gate, case.metric, ours, theirs, clusters).lower > case.truth
    return now / repeats, then / repeats, refused / repeats


def most_by_chance(repeats: int) -> float:
    """What a share of 0.025 exceeds in one of 740 tables: three deviations."""
    return PROMISED + 3 * math.sqrt(PROMISED * (1 - PROMISED) / repeats)


def lines(repeats: int) -> Iterator[str]:
    """The table in Markdown."""
    yield f"`make gate-table`, {repeats} repeats each, seed {SEED}, {RESAMPLES:,} resamples."
    parts = (
        ('false "not worse": truly at a margin of 0.01', NOT_WORSE),
        ('false "better": truly equal', BETTER),
        ("power: truly better", POWER),
    )
    for title, cases in parts:
        yield from (
            "",
            f"| {title} | rows | metric | promoted | before |",
            "|---|---:|---|---:|---:|",
        )
        for case in cases:
            now, then, refused = measure(case, repeats)
            shown = f"{now:.1%}"
            if refused:
                shown += f" ({refused:.0%} refused: too few clusters)"
            yield f"| {case.name} | {case.rows:,} | `{case.metric}` | {shown} | {then:.1%} |"


def main() -> None:
    """Print the table; with `--write` put it into docs/gate.md."""
    numbers_given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    shown = list[str]()
    for line in lines(numbers_given[0] if numbers_given else REPEATS):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        shown.append(line)
    text = "\n".join(shown)
    if "--write" in sys.argv:
        head, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        tail = rest.partition(END)[2]
        DOCS.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
