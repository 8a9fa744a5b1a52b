"""May the candidate replace the champion? A pure function of predictions, and it fails closed.

A first model must reach every floor and beat the most frequent class. A later one must also be
better than the champion by `min_delta` with the lower bound of a paired bootstrap (Efron &
Tibshirani 1993, percentile interval; both models scored on the same resampled rows) above it, and
must not lose more than `max_slice_drop` of accuracy on any slice of at least `min_slice_size` rows.
Whatever is missing or not a number refuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from rekindle.evaluate import metrics
from rekindle.evaluate.metrics import Floats, Ints
from rekindle.records import Check, Comparison, Slice
from rekindle.spec.model import LOWER_IS_BETTER, EvaluateSpec, GateSpec

CHUNK_ELEMENTS = 4_000_000


@dataclasses.dataclass(frozen=True)
class Scored:
    """A contender's predictions on the rows that decide, and its metrics on them."""

    probabilities_NC: Floats
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision, its reason in one sentence, and every check behind it."""

    promote: bool
    reason: str
    checks: tuple[Check, ...]
    comparison: Comparison | None


def judge(
    spec: EvaluateSpec,
    labels_N: Ints,
    candidate: Scored,
    champion: Scored | None,
    slices: Sequence[Slice],
) -> Verdict:
    """The verdict on `candidate`; `champion` is None only when the registry has none."""
    if len(labels_N) == 0:
        nothing = Check(
            name="examples", passed=False, detail="no held-out examples are left to judge on"
        )
        return Verdict(False, nothing.detail, (nothing,), None)
    checks = [
        _finite(candidate, "candidate"),
        _majority(labels_N, candidate),
        *_floors(spec, candidate),
    ]
    comparison = None
    if champion is not None:
        checks.append(_finite(champion, "champion"))
        if all(check.passed for check in checks if check.name.endswith("_finite")):
            comparison = compare(spec.gate, labels_N, candidate, champion)
            checks.append(_better(spec.gate, comparison))
        checks += _slice_checks(spec.gate, slices)
    failed = [check for check in checks if not check.passed]
    if failed:
        return Verdict(
            False, "; ".join(check.detail for check in failed), tuple(checks), comparison
        )
    praise = _praise(spec, candidate, comparison)
    return Verdict(True, praise, tuple(checks), comparison)


def compare(spec: GateSpec, labels_N: Ints, candidate: Scored, champion: Scored) -> Comparison:
    """Candidate minus champion in `spec.metric`, turned so that more is better, with its bootstrap
    interval.
    """
    sign = -1.0 if spec.metric in LOWER_IS_BETTER else 1.0
    generator = np.random.default_rng(spec.seed)
    differences: list[Floats] = []
    rows = len(labels_N)
    chunk = max(1, CHUNK_ELEMENTS // rows)
    for start in range(0, spec.resamples, chunk):
        picks_RN = generator.integers(0, rows, (min(chunk, spec.resamples - start), rows))
        ours = metrics.resampled(spec.metric, candidate.probabilities_NC, labels_N, picks_RN)
        theirs = metrics.resampled(spec.metric, champion.probabilities_NC, labels_N, picks_RN)
        differences.append(sign * (ours - theirs))
    tail = (1 - spec.confidence) / 2
    lower, upper = np.quantile(np.concatenate(differences), [tail, 1 - tail])
    estimate = sign * (candidate.metrics[spec.metric] - champion.metrics[spec.metric])
    return Comparison(
        metric=spec.metric, estimate=estimate, lower=float(lower), upper=float(upper),
        confidence=spec.confidence, resamples=spec.resamples, seed=spec.seed,
    )  # fmt: skip


def _finite(scored: Scored, who: str) -> Check:
    bad = sorted(name for name, value in scored.metrics.items() if not math.isfinite(value))
    bad += [] if np.isfinite(scored.probabilities_NC).all() else ["probabilities"]
    detail = (
        f"the {who}'s {', '.join(bad)} is not a number"
        if bad
        else f"the {who}'s metrics are numbers"
    )
    return Check(name=f"{who}_finite", passed=not bad, detail=detail)


def _majority(labels_N: Ints, candidate: Scored) -> Check:
    share = float(np.bincount(labels_N).max() / len(labels_N))
    value = candidate.metrics["accuracy"]
    passed = value > share
    relation = "beats" if passed else "does not beat"
    detail = (
        f"accuracy {value:.4f} {relation} always answering the most frequent class ({share:.4f})"
    )
    return Check(name="beats_majority", passed=passed, detail=detail, value=value, threshold=share)


def _floors(spec: EvaluateSpec, candidate: Scored) -> list[Check]:
    checks = []
    for name, floor in spec.floor.items():
        value = candidate.metrics[name]
        lower = name in LOWER_IS_BETTER
        passed = value <= floor if lower else value >= floor
        side = "at most" if lower else "at least"
        detail = f"{name} {value:.4f} {'is' if passed else 'is not'} {side} {floor:g}"
        checks.append(
            Check(name=f"floor_{name}", passed=passed, detail=detail, value=value, threshold=floor)
        )
    return checks


def _better(spec: GateSpec, comparison: Comparison) -> Check:
    passed = comparison.lower > spec.min_delta and comparison.estimate > spec.min_delta
    interval = f"[{comparison.lower:+.4f}, {comparison.upper:+.4f}] at {spec.confidence:.0%}"
    relation = "lies above" if passed else "does not lie above"
    detail = (
        f"{spec.metric} is better by {comparison.estimate:+.4f} {interval}, "
        f"whose lower bound {relation} {spec.min_delta:g}"
    )
    return Check(
        name="better_than_champion", passed=passed, detail=detail,
        value=comparison.lower, threshold=spec.min_delta,
    )  # fmt: skip


def _slice_checks(spec: GateSpec, slices: Sequence[Slice]) -> list[Check]:
    checks = []
    for part in slices:
        if part.rows < spec.min_slice_size or not part.champion:
            continue
        drop = part.champion["accuracy"] - part.candidate["accuracy"]
        passed = drop <= spec.max_slice_drop + 1e-12
        where = f"{part.column}={part.value} ({part.rows} rows)"
        verb = "loses" if drop > 0 else "gains"
        limit = "within" if passed else "more than"
        allowed = f"{limit} the {spec.max_slice_drop:g} allowed"
        detail = f"{where} {verb} {abs(drop):.4f} of accuracy, {allowed}"
        checks.append(
            Check(name=f"slice:{part.column}={part.value}", passed=passed, detail=detail,
                  value=drop, threshold=spec.max_slice_drop)
        )  # fmt: skip
    return checks


def _praise(spec: EvaluateSpec, candidate: Scored, comparison: Comparison | None) -> str:
    metric = spec.gate.metric
    value = candidate.metrics[metric]
    if comparison is None:
        reached = "reaches every floor" if spec.floor else "beats the most frequent class"
        return f"first model: {metric} {value:.4f} {reached}"
    return (
        f"{metric} {value:.4f} is better than the champion by {comparison.estimate:+.4f} "
        f"[{comparison.lower:+.4f}, {comparison.upper:+.4f}]"
    )
