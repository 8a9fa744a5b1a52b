"""The verdict: why a candidate may or may not replace the champion.

It fails closed. A first model must reach every floor and beat the trivial answer (the
most frequent class, or the frequency of single tokens). A later one must also be better
than the champion by `min_delta`, or not worse by `margin`, with the lower bound of the
gain above it (bounds.py; both models are scored on the same rows). And it must not lose
more than `max_slice_drop` on any slice of at least `min_slice_size` rows, unless chance
explains the loss: Holm's steps (1979) bound the chance that any slice refuses a model
that is as good. Rows that are not independent, those of a patient or a day, are resampled
together: clusters. Where no result on so few test rows could pass, the verdict says how
many rows are needed.

With `gate.looks`, the comparisons of an epoch, which is one way to draw the test split,
share 1 - `confidence` (Bonferroni, in rounds whose parts 1/2 + 1/6 + 1/12 + ... sum to
1)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rekindle import records
from rekindle.evaluate.bounds import PairedAnswers, bounds_of, least_that_differ
from rekindle.evaluate.compare import compare, holm, too_few_units
from rekindle.formats import fixed
from rekindle.objectives import LOWER_IS_BETTER
from rekindle.objectives.classes.scores import MOST_CURVES
from rekindle.objectives.scores import Ints, ModelScores, gain
from rekindle.records import ChampionDrop, Check, Churn, Comparison, Slice
from rekindle.spec.model import EvaluateSpec, GateSpec


@dataclasses.dataclass(frozen=True)
class GateVerdict:
    """The decision, its reason in one sentence, and every check behind it."""

    promote: bool
    reason: str
    checks: tuple[Check, ...]
    comparison: Comparison | None


def judge(
    spec: EvaluateSpec,
    metric: str,
    candidate: ModelScores,
    champion: ModelScores | None,
    slices: Sequence[Slice],
    slice_metric: str,
    further: Sequence[Check] = (),
    clusters_N: Ints | None = None,
    confidence: float | None = None,
) -> GateVerdict:
    """The verdict on the candidate, compared in `metric`, on slices in `slice_metric`.

    `further` checks, made elsewhere, have to pass, too. `clusters_N` numbers the cluster
    of each row; None: every row is its own. `confidence` replaces the gate's where looks
    share it (`confidence_of_look`)."""
    if len(candidate) == 0:
        return refused("examples", "no held-out examples are left to judge on")
    if metric not in candidate.metrics:
        return refused("metric", f"{metric} is measured of at most {MOST_CURVES} classes")
    if champion is not None:
        too_few = too_few_units(candidate, clusters_N, spec.gate.cluster)
        if too_few:
            name = "clusters" if spec.gate.cluster else "examples"
            return refused(name, too_few)
    checks = [
        _finite_check(candidate, "candidate"),
        candidate.trivial(metric),
        *_floor_checks(spec, candidate, slices),
    ]
    comparison = None
    if champion is not None:
        checks.append(_finite_check(champion, "champion"))
        # one NaN among the scores would make every bound a NaN
        if all(check.passed for check in checks if check.name.endswith("_finite")):
            gate = spec.gate.model_copy(update={"confidence": confidence or spec.gate.confidence})
            comparison = compare(gate, metric, candidate, champion, clusters_N)
            checks.append(_gain_check(gate, comparison, champion, clusters_N))
        checks += _slice_checks(spec.gate, slices, slice_metric)
    checks += further
    failed = "; ".join(check.detail for check in checks if not check.passed)
    reason = failed or _reason_to_promote(spec, metric, candidate, comparison)
    return GateVerdict(not failed, reason, tuple(checks), comparison)


def refused(name: str, detail: str) -> GateVerdict:
    """The verdict where nothing can be compared: one check that did not pass says why."""
    return GateVerdict(False, detail, (Check(name=name, passed=False, detail=detail),), None)


def confidence_of_look(spec: GateSpec, earlier: int) -> float:
    """The confidence of a comparison with as many `earlier` ones of its epoch."""
    if spec.looks is None:
        return spec.confidence
    # round r has the part 1 / (r (r + 1)); all parts sum to 1, so that looks never run out
    round_ = earlier // spec.looks + 1
    return 1 - (1 - spec.confidence) / (spec.looks * round_ * (round_ + 1))


def _finite_check(scores: ModelScores, who: str) -> Check:
    """Whether all metrics and predictions of a contender are numbers."""
    bad = sorted(name for name, value in scores.metrics.items() if not math.isfinite(value))
    if not scores.finite:
        bad.append("predictions")
    detail = "metrics are numbers"
    if bad:
        detail = f"{', '.join(bad)} is not a number"
    return Check(name=f"{who}_finite", passed=not bad, detail=f"the {who}'s {detail}")


def _floor_checks(
    spec: EvaluateSpec, candidate: ModelScores, slices: Sequence[Slice]
) -> list[Check]:
    """Whether the candidate reaches each floor, on all rows and on large slices."""
    checks = []
    for name, floor in spec.floor.items():
        checks.append(_floor_check(f"floor_{name}", name, floor, candidate.metrics))
    for part in slices:
        if part.rows < spec.gate.min_slice_size:
            continue
        where = f"{part.column}={part.value}"
        for name, floor in spec.slice_floor.items():
            check = f"floor_{name}:{where}"
            checks.append(_floor_check(check, name, floor, part.candidate, f" of {where}"))
    return checks


def _floor_check(
    check: str, metric: str, floor: float, metrics: Mapping[str, float], where: str = ""
) -> Check:
    """Whether a metric is at least its floor, or at most where less is better."""
    value = metrics.get(metric, math.nan)  # NaN is neither at most nor at least the floor
    if metric in LOWER_IS_BETTER:
        passed = value <= floor
        limit = "at most"
    else:
        passed = value >= floor
        limit = "at least"
    verb = "is" if passed else "is not"
    detail = f"{metric} {fixed(value)}{where} {verb} {limit} {floor:g}"
    return Check(name=check, passed=passed, detail=detail, value=value, threshold=floor)


def _gain_check(
    spec: GateSpec, comparison: Comparison, champion: ModelScores, clusters_N: Ints | None
) -> Check:
    """Whether the candidate is better than the champion, or not worse,
    as the gate asks."""
    if spec.mode == "noninferiority":
        name = "not_worse_than_champion"
        least = -spec.margin
    else:
        name = "better_than_champion"
        least = spec.min_delta
    lower = fixed(comparison.lower, "+")
    upper = fixed(comparison.upper, "+")
    passed = comparison.lower > least and comparison.estimate > least
    relation = "lies above" if passed else "does not lie above"
    detail = f"the gain in {comparison.metric} is {fixed(comparison.estimate, '+')}"
    detail += f" [{lower}, {upper}] at {100 * spec.confidence:.6g}%"
    detail += f", whose lower bound {relation} {least:g}"
    if not passed:
        detail += _too_few_to_tell(spec, comparison.metric, champion, clusters_N)
    return Check(
        name=name,
        passed=passed,
        value=comparison.lower,
        threshold=least,
        detail=detail,
    )


def _too_few_to_tell(
    spec: GateSpec, metric: str, champion: ModelScores, clusters_N: Ints | None
) -> str:
    """The end of a check's sentence: how many test rows are needed, where these are too few
    to pass whatever the candidate answers; else ""."""
    tail = (1 - spec.confidence) / 2
    if clusters_N is None:
        units = len(champion)
        noun = "test rows"
    else:
        units = len(np.unique(clusters_N))
        noun = f"values of {spec.cluster}"
    if spec.mode == "superiority":
        needed = least_that_differ(tail)
        if units >= needed:
            return ""
        return f": {units} {noun} cannot show a gain, it takes {needed} that all speak for it"
    # even a candidate that answers exactly as the champion does may lose so much elsewhere
    bounds = bounds_of(spec, metric, champion, champion, clusters_N, tail)
    possible_loss = -bounds.lower(tail)
    if possible_loss < spec.margin:
        return ""
    # such a loss shrinks about as 1 / n
    needed = math.ceil(units * possible_loss / spec.margin)
    if isinstance(bounds, PairedAnswers):
        # exactly: n equal answers allow a loss of 1 - tail^(1/n) (bounds.py), which is the
        # margin for this n; log1p(-1) is not finite
        needed = math.ceil(math.log(tail) / math.log1p(-min(spec.margin, 1 - 1e-12)))
    return (
        f": {units} {noun} that the models answer alike still allow a loss of"
        f" {fixed(possible_loss)}; to show that it is below {spec.margin:g} takes about"
        f" {needed:,} of them, or a wider evaluate.gate.margin"
    )


def _slice_checks(spec: GateSpec, slices: Sequence[Slice], metric: str) -> list[Check]:
    """A check for each large slice: whether it loses at most what is allowed, or no more
    than chance explains. A slice without the metric fails."""
    checks = []
    judged = [part for part in slices if part.rows >= spec.min_slice_size and part.champion]
    # a slice without a p-value counts as sure: nothing says that chance explains its loss
    sure = holm([part.p_value or 0.0 for part in judged], 1 - spec.confidence)
    for part, is_sure in zip(judged, sure, strict=True):
        candidate_value = part.candidate.get(metric, math.nan)
        champion_value = part.champion.get(metric, math.nan)
        drop = gain(metric, champion_value, candidate_value)
        is_small = drop <= spec.max_slice_drop + 1e-12  # what rounding may add
        passed = is_small or (not is_sure and not math.isnan(drop))
        limit = "within" if is_small else "more than"
        detail = f"{_change_of(part, metric, drop)}, {limit} the {spec.max_slice_drop:g} allowed"
        if passed and not is_small:
            detail += f", which chance may explain (p = {part.p_value:.2g})"
        check = Check(
            name=f"slice:{part.column}={part.value}",
            passed=passed,
            detail=detail,
            value=drop,
            threshold=spec.max_slice_drop,
        )
        checks.append(check)
    return checks


def _change_of(part: Slice, metric: str, drop: float) -> str:
    """By how much the metric of a slice changes, in words; a `drop` below 0 is a gain."""
    where = f"{part.column}={part.value} ({part.rows} rows)"
    if metric in LOWER_IS_BETTER:
        moves = "falls" if drop <= 0 else "rises"
        return f"{metric} of {where} {moves} by {fixed(abs(drop))}"
    moves = "gains" if drop <= 0 else "loses"
    return f"{where} {moves} {fixed(abs(drop))} of {metric}"


def churn_checks(spec: GateSpec, churn: Churn | None, champion: ModelScores | None) -> list[Check]:
    """Whether at most `gate.max_churn` of the answers differ from the champion's."""
    if spec.max_churn is None or champion is None:
        return []
    if churn is None:
        return [Check(name="churn", passed=False, detail="there are no classes to compare")]
    passed = churn.share <= spec.max_churn
    relation = "within" if passed else "more than"
    check = Check(
        name="churn",
        passed=passed,
        detail=f"{churn.share:.4f} of the answers differ from the champion's, "
        f"{relation} the {spec.max_churn:g} allowed",
        value=churn.share,
        threshold=spec.max_churn,
    )
    return [check]


def drop_checks(spec: GateSpec, drop: ChampionDrop | None) -> list[Check]:
    """Whether the champion itself is still about as good as when it was judged."""
    if spec.max_champion_drop is None or drop is None:
        return []
    passed = drop.drop <= spec.max_champion_drop or not drop.is_sure
    detail = f"the champion's {drop.metric} fell by {fixed(drop.drop)} since it was judged"
    if not passed:
        detail = f"{drop.sentence}. That is more than the {spec.max_champion_drop:g} of"
        detail += " evaluate.gate.max_champion_drop, so a person decides: look at the data, then"
        detail += " `rekindle promote RUN --reason TEXT`"
    check = Check(
        name="champion_drop",
        passed=passed,
        detail=detail,
        value=drop.drop,
        threshold=spec.max_champion_drop,
    )
    return [check]


def size_checks(most_megabytes: float | None, size_bytes: int | None) -> list[Check]:
    """Whether the model's files take at most as much as is allowed."""
    if most_megabytes is None:
        return []
    if size_bytes is None:
        detail = "the size of the model was not recorded; run the step `score` again"
        return [Check(name="size", passed=False, detail=detail)]
    megabytes = size_bytes / 1e6
    passed = size_bytes <= most_megabytes * 1e6
    relation = "within" if passed else "more than"
    check = Check(
        name="size",
        passed=passed,
        detail=f"the model takes {megabytes:.4g} MB, {relation} the {most_megabytes:g} allowed",
        value=megabytes,
        threshold=most_megabytes,
    )
    return [check]


def incomparable_checks(record: records.Scores) -> list[Check]:
    """A check that fails where the champion cannot score these rows, such as one of other
    classes: the candidate is judged as a first model is, and a person decides."""
    if not record.incomparable:
        return []
    name, why = record.incomparable
    detail = f"{why}; a person may promote it, by `rekindle promote RUN --reason TEXT`"
    return [Check(name=name, passed=False, detail=detail)]


def _reason_to_promote(
    spec: EvaluateSpec, metric: str, candidate: ModelScores, comparison: Comparison | None
) -> str:
    """The reason of a verdict that promotes."""
    value = fixed(candidate.metrics[metric])
    if comparison is None:
        if spec.floor:
            return f"first model: {metric} {value} reaches every floor"
        return f"first model: {candidate.trivial(metric).detail}"
    relation = "is better than the champion by"
    if spec.gate.mode == "noninferiority":
        relation = f"is not {spec.gate.margin:g} worse than the champion: it differs by"
    interval = f"[{fixed(comparison.lower, '+')}, {fixed(comparison.upper, '+')}]"
    return f"{metric} {value} {relation} {fixed(comparison.estimate, '+')} {interval}"
