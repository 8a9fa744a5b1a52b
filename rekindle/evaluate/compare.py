"""Two models on the same rows: by how much one is better, how often their answers differ,
which rows belong together, and which of several changes chance does not explain.
Shapes: N examples."""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from rekindle import records
from rekindle.evaluate.bounds import FEWEST_UNITS, bounds_of, deviation_of, units_in
from rekindle.objectives.scores import Ints, ModelScores, gain
from rekindle.records import ChampionDrop, Churn, Comparison
from rekindle.spec.model import GateSpec


def compare(
    spec: GateSpec,
    metric: str,
    candidate: ModelScores,
    champion: ModelScores,
    clusters_N: Ints | None = None,
) -> Comparison:
    """Candidate minus champion in `metric`, more is better, with its interval."""
    tail = (1 - spec.confidence) / 2
    bounds = bounds_of(spec, metric, candidate, champion, clusters_N, tail)
    # + 0.0: none of them is a negative zero
    return Comparison(
        metric=metric,
        estimate=bounds.estimate + 0.0,
        lower=bounds.lower(tail) + 0.0,
        upper=bounds.upper(tail) + 0.0,
        confidence=spec.confidence,
        resamples=bounds.resamples,
        seed=spec.seed,
        detectable=bounds.detectable(tail),
    )


def clusters_of(rows: pa.Table, column: str | None) -> Ints | None:
    """[N]: which rows are drawn together, those without a value alone; None: each is."""
    if column is None:
        return None
    values: list[object] = rows.column("slices").combine_chunks().field(column).to_pylist()
    numbers = dict[object, int]()
    clusters = []
    for row, value in enumerate(values):
        # rows without a value are not one cluster
        key = row if value is None else value
        clusters.append(numbers.setdefault(key, len(numbers)))
    return np.array(clusters, np.int64)


def too_few_units(scores: ModelScores, clusters_N: Ints | None, column: str | None) -> str:
    """What makes the rows tell as little as a few do, if anything: few clusters, or
    answers most of which belong to a few of them, or to a few long examples."""
    sizes_N = scores.sizes_N
    if clusters_N is None and (not len(sizes_N) or sizes_N.min() == sizes_N.max()):
        return ""
    units = len(sizes_N)
    weight = units_in(clusters_N, sizes_N)
    # a few examples are judged all the same: their bounds are wide
    if weight >= FEWEST_UNITS or (clusters_N is None and units < FEWEST_UNITS):
        return ""
    subject = f"the {units} test examples, which differ in length,"
    if clusters_N is not None:
        units = len(np.unique(clusters_N))
        subject = f"the {units} values of {column} among the test examples"
    return (
        f"{subject} tell as much as {weight:.1f} of equal size: it takes {FEWEST_UNITS} to tell"
        " models apart"
    )


def churn_of(candidate: ModelScores, champion: ModelScores) -> Churn | None:
    """How often two contenders answer differently; None without classes or answers."""
    candidate_answers = candidate.answers()
    champion_answers = champion.answers()
    if candidate_answers is None or champion_answers is None or not len(candidate_answers[0]):
        return None
    candidate_N, true_N = candidate_answers
    champion_N, _ = champion_answers
    changed_N = candidate_N != champion_N
    return Churn(
        answers=len(true_N),
        share=float(changed_N.mean()),
        fixed=int((changed_N & (candidate_N == true_N)).sum()),
        broken=int((changed_N & (champion_N == true_N)).sum()),
    )


def champion_drop_of(
    spec: GateSpec,
    metric: str,
    record: records.Scores,
    champion: ModelScores | None,
    clusters_N: Ints | None,
) -> ChampionDrop | None:
    """How much worse the champion does on these rows than on those that it was judged on,
    which are others: of these only the metric is known, so their deviation is taken from
    these."""
    judged = record.champion_judged.get(metric)
    judged_rows = record.champion_judged_rows
    if champion is None or judged is None or not judged_rows or not len(champion):
        return None
    now = champion.metrics.get(metric, math.nan)
    if not (champion.finite and math.isfinite(now) and math.isfinite(judged)):
        return None
    drop = gain(metric, judged, now)
    # of the difference of two means, each of its own rows
    deviation = deviation_of(spec, metric, champion, clusters_N)
    deviation *= math.sqrt(1 + len(champion) / judged_rows)
    chance = float(drop <= 0)  # without any spread a drop is real
    if deviation:
        chance = 1 - NormalDist().cdf(drop / deviation)
    return ChampionDrop(
        metric=metric,
        judged=judged,
        judged_rows=judged_rows,
        now=now,
        rows=len(champion),
        drop=drop,
        p_value=chance,
    )


def holm(
    p_values: Sequence[float], level: float, weights: Sequence[float] | None = None
) -> list[bool]:
    """Which of several changes chance does not explain, all together at this level; one
    of a larger weight has a larger part of it (Holm 1979)."""
    weights = weights or [1.0] * len(p_values)
    is_sure = [False] * len(p_values)
    remaining_weight = sum(weights)
    for at in sorted(range(len(p_values)), key=lambda at: p_values[at] / weights[at]):
        if p_values[at] * remaining_weight > level * weights[at]:
            break
        is_sure[at] = True
        remaining_weight -= weights[at]
    return is_sure
