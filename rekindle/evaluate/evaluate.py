"""From what candidate and champion scored on the same examples to the evidence: why the candidate
may or may not replace the champion.

A pure function of the files that the step `score` left (records.Scores): no model is loaded here.
Models with different tokenizers are compared in bits per byte of text. Shapes: N examples.

The verdict (`judge`) fails closed. A first model must reach every floor and beat the trivial answer
(the most frequent class, or the frequency of single tokens). A later one must also be better than
the champion by `min_delta`, or not worse by `margin`, with the lower bound of a paired bootstrap
(Efron & Tibshirani 1993, percentile interval; both models scored on the same resampled rows) above
it. And it must not lose more than `max_slice_drop` on any slice of at least `min_slice_size` rows,
unless chance explains the loss: p-values are of a normal law with the bootstrap's deviation, and
Holm's steps (1979) bound the chance that any slice refuses a model that is as good. Rows that are
no draws of their own, those of a patient or a day, are resampled together: G clusters.

With `gate.looks`, the comparisons of an epoch, which is one way to draw the test split, share
1 - `confidence` (Bonferroni, in rounds whose parts 1/2 + 1/6 + 1/12 + ... sum to 1)."""

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rekindle import records
from rekindle.data.signals import MOST_ROWS, firsts
from rekindle.evaluate.scores import SCORES, Scores
from rekindle.evaluate.scores.base import Floats, Ints
from rekindle.evaluate.scores.classes import MOST_CURVES
from rekindle.formats import fixed
from rekindle.records import (
    LOWER_IS_BETTER,
    Audit,
    Check,
    Churn,
    ClassResult,
    Comparison,
    Evidence,
    Reference,
    Slice,
)
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec, EvaluateSpec, GateSpec

CHUNK_ELEMENTS = 4_000_000

_POWER = 0.8
_FEWEST = 10  # clusters that a bootstrap can say anything of
_FEWEST_BEYOND = 10  # resamples; an end of an interval that has fewer is of a normal law
_MOST_ROWS = 10  # that must pass and do not, which a check names

TABLE, RECORD, MUST_PASS = "scores.parquet", "scores.json", "must_pass.parquet"


def evaluate(spec: EvaluateSpec, data: DataSpec, scores: Path) -> Evidence:
    """The evidence on the candidate whose scores on the test split of `data` lie in the folder
    `scores`."""
    record, rows = records.Scores.read(scores / RECORD), pq.read_table(scores / TABLE)
    kind = SCORES[record.objective]
    aside_N = _aside(rows, spec.audit, data.split.salt)
    rows, audited = rows.filter(pa.array(~aside_N)), rows.filter(pa.array(aside_N))
    ours, theirs = _contenders(record, rows)
    # what the contenders are compared in, and what on slices
    metric, slice_metric = spec.gate.metric or kind.METRIC, kind.SLICE_METRIC
    if not record.same_targets:
        metric = slice_metric = "bits_per_byte"
    columns = [name for name in data.slices if name != spec.gate.cluster]
    clusters_N, split = _clusters(rows, spec.gate.cluster), data.split
    epoch = digest([split.by, round(split.test, 9), split.salt, split.gap])  # of the test rows
    slices = _slices(spec.gate, slice_metric, rows, columns, ours, theirs, clusters_N)
    churn = churn_of(ours, theirs) if theirs else None
    further = [*_must_pass(spec, record, scores), *_churn_check(spec.gate, churn, theirs)]
    further += _size_check(spec.max_megabytes, record.candidate.bytes)
    if record.champion_version and not record.champion and not record.incomparable:
        detail = f"the champion, version {record.champion_version}, was not scored"
        verdict = refused("champion_scored", f"{detail}; run the step `score` again")
    else:
        if record.incomparable:  # judged as a first model is, for a person to decide
            name, detail = record.incomparable
            may = "a person may promote it, by `rekindle promote RUN --reason TEXT`"
            further.append(Check(name=name, passed=False, detail=f"{detail}; {may}"))
        confidence = _left(spec.gate, record.compared.get(epoch, 0))
        seen = (slices, slice_metric, further, clusters_N, confidence)
        verdict = judge(spec, metric, ours, theirs, *seen)
    told = ("champion_version", "champion_digest", "samples", "smoke", "excluded", "examples",
            "bad_rows")  # fmt: skip
    return Evidence(
        run_key=record.candidate.run_key, model_digest=record.candidate.digest,
        metrics=dict(ours.metrics), champion_metrics=dict(theirs.metrics) if theirs else {},
        labels=record.candidate.labels, confusion=ours.confusion(), classes=_classes(ours, theirs),
        calibration=ours.calibration(), slices=tuple(slices), churn=churn,
        reference=_with_answers(record.reference, ours, rows),
        epoch=epoch if verdict.comparison else "", **vars(verdict),
        audit=_audit(spec.gate, metric, record, audited), rows=record.rows - audited.num_rows,
        **{name: getattr(record, name) for name in told},
    )  # fmt: skip


def _with_answers(reference: Reference | None, ours: Scores, rows: pa.Table) -> Reference | None:
    """With how sure the candidate is, or the numbers that it predicts, of rows that lie evenly, and
    how often it predicts each class; of the first row of each content."""
    if reference is None or not ours.finite or not len(ours):
        return reference
    ours = ours.picked(firsts(rows.column("hash").to_pylist()))
    every_N = np.linspace(0, len(ours) - 1, min(MOST_ROWS, len(ours))).astype(int)
    update = dict[str, Any]()
    if (sure_N := ours.confidence()) is not None:
        update["confidence"] = tuple(round(float(one), 4) for one in sure_N[every_N])
        update["predicted"] = {part.label: part.predicted for part in ours.classes()}
    if (values_N := ours.numbers()) is not None:
        update["inputs"] = {**reference.inputs, "value": tuple(values_N[every_N].tolist())}
    return reference.model_copy(update=update)


def _contenders(record: records.Scores, rows: pa.Table) -> tuple[Scores, Scores | None]:
    """Candidate and champion, if there is one, on these rows."""
    kind = SCORES[record.objective]
    ours = kind.of(rows, "candidate", record.candidate)
    return ours, kind.of(rows, "champion", record.champion) if record.champion else None


def _aside(rows: pa.Table, share: float, salt: str) -> NDArray[np.bool_]:
    """[N]: the rows that decide nothing, which are the same in each run that has them."""
    if not share:
        return np.zeros(rows.num_rows, bool)
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    hashes = rows.column("hash").to_pylist()
    drawn = (hashlib.blake2b(one, key=key, digest_size=8).digest() for one in hashes)
    return np.fromiter((int.from_bytes(one) < share * 2**64 for one in drawn), bool, len(hashes))


def _audit(spec: GateSpec, metric: str, record: records.Scores, rows: pa.Table) -> Audit | None:
    if not rows.num_rows:
        return None
    ours, theirs = _contenders(record, rows)
    clusters_N, comparison = _clusters(rows, spec.cluster), None
    enough = rows.num_rows >= _FEWEST and not _too_few(clusters_N) and metric in ours.metrics
    if enough and theirs is not None and ours.finite and theirs.finite:
        comparison = compare(spec, metric, ours, theirs, clusters_N)
    metrics = dict(theirs.metrics) if theirs else {}
    return Audit(
        rows=rows.num_rows, metrics=dict(ours.metrics), champion_metrics=metrics,
        comparison=comparison,
    )  # fmt: skip


def candidate_scores(scores: Path, audit: float, salt: str) -> tuple[Scores, Any]:
    """What the candidate scored on the rows that judge, of the folder `scores`, and what was right:
    the classes and the label of each example, or into how many targets each text was cut."""
    record, rows = records.Scores.read(scores / RECORD), pq.read_table(scores / TABLE)
    rows = rows.filter(pa.array(~_aside(rows, audit, salt)))
    ours = SCORES[record.objective].of(rows, "candidate", record.candidate)
    if record.objective == "tokens":
        return ours, rows.column("candidate").combine_chunks().field("targets").to_pylist()
    return ours, (record.candidate.labels, rows.column("label").to_pylist())


def _classes(ours: Scores, theirs: Scores | None) -> tuple[ClassResult, ...]:
    known = {part.label: part.f1 for part in theirs.classes()} if theirs else {}
    found = ((part, {"champion_f1": known.get(part.label)}) for part in ours.classes())
    return tuple(part.model_copy(update=update) for part, update in found)


def _slices(
    spec: GateSpec, metric: str, rows: pa.Table, columns: Sequence[str], ours: Scores,
    theirs: Scores | None, clusters_N: Ints | None,
) -> list[Slice]:  # fmt: skip
    """Metrics for each value of each slice column, in order of column and value."""
    result = []
    for column in columns:
        found: list[Any] = rows.column("slices").combine_chunks().field(column).to_pylist()
        values_N = np.array(["" if value is None else str(value) for value in found])
        for value in sorted(set(values_N)):
            pick = values_N == value
            mine = ours.picked(pick)
            known: dict[str, Any] = {"rows": int(pick.sum()), "candidate": mine.metrics}
            some = clusters_N
            if some is not None:
                some = np.unique(some[pick], return_inverse=True)[1]
            if theirs is not None:
                known |= _against(spec, metric, mine, theirs.picked(pick), some)
            result.append(Slice(column=column, value=value, **known))
    return result


def _against(
    spec: GateSpec, metric: str, ours: Scores, theirs: Scores, clusters_N: Ints | None
) -> dict[str, Any]:
    """What a slice tells of the champion, and how often a model as good would seem so bad."""
    known: dict[str, Any] = {"champion": theirs.metrics}
    if _too_few(clusters_N):
        return known | {"p_value": 1.0}
    if ours.finite and theirs.finite and metric in ours.metrics and metric in theirs.metrics:
        gain = _gain(metric, ours, theirs)
        deviation = differences(spec, metric, ours, theirs, clusters_N).std()
        chance = NormalDist().cdf(gain / deviation) if deviation else float(gain >= 0)
        known |= {"p_value": chance, "detectable": _detectable(spec, float(deviation), sides=1)}
    return known


def _gain(metric: str, candidate: Scores, champion: Scores) -> float:
    gain = candidate.metrics[metric] - champion.metrics[metric]
    return -gain if metric in LOWER_IS_BETTER else gain


def _detectable(spec: GateSpec, deviation: float, sides: int) -> float:
    """The change that differs from none in `_POWER` of cases."""
    normal = NormalDist()
    known = normal.inv_cdf(1 - (1 - spec.confidence) / sides) + normal.inv_cdf(_POWER)
    return known * deviation


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision, its reason in one sentence, and every check behind it."""

    promote: bool
    reason: str
    checks: tuple[Check, ...]
    comparison: Comparison | None


def judge(
    spec: EvaluateSpec, metric: str, candidate: Scores, champion: Scores | None,
    slices: Sequence[Slice], slice_metric: str, further: Sequence[Check] = (),
    clusters_N: Ints | None = None, confidence: float | None = None,
) -> Verdict:  # fmt: skip
    """The verdict in `metric`, on slices `slice_metric`, with `further` checks, if any;
    `confidence` of the comparison with the champion is the gate's, or what looks leave of it."""
    confidence = confidence or spec.gate.confidence
    if len(candidate) == 0:
        return refused("examples", "no held-out examples are left to judge on")
    if metric not in candidate.metrics:
        return refused("metric", f"{metric} is measured of at most {MOST_CURVES} classes")
    if champion is not None and _too_few(clusters_N):
        what = f"the test examples have fewer than {_FEWEST} values of {spec.gate.cluster}"
        return refused("clusters", f"{what}: they cannot tell models apart")
    checks = [_finite(candidate, "candidate"), candidate.trivial(metric)]
    checks += [_floor(f"floor_{n}", n, floor, candidate.metrics) for n, floor in spec.floor.items()]
    for part in (part for part in slices if part.rows >= spec.gate.min_slice_size):
        where = f"{part.column}={part.value}"
        checks += [
            _floor(f"floor_{name}:{where}", name, floor, part.candidate, f" of {where}")
            for name, floor in spec.slice_floor.items()
        ]
    comparison = None
    if champion is not None:
        checks.append(_finite(champion, "champion"))
        if all(check.passed for check in checks if check.name.endswith("_finite")):
            gate = spec.gate.model_copy(update={"confidence": confidence})
            comparison = compare(gate, metric, candidate, champion, clusters_N)
            worse = spec.gate.mode == "noninferiority"
            least = -spec.gate.margin if worse else spec.gate.min_delta
            lower, upper = comparison.lower, comparison.upper
            passed = lower > least and comparison.estimate > least
            gain = f"the gain in {metric} is {fixed(comparison.estimate, '+')}"
            interval = f"[{fixed(lower, '+')}, {fixed(upper, '+')}] at {100 * confidence:.6g}%"
            relation = "lies above" if passed else "does not lie above"
            bound = f"whose lower bound {relation} {least:g}"
            checks.append(Check(
                name="not_worse_than_champion" if worse else "better_than_champion",
                passed=passed, value=lower, threshold=least,
                detail=f"{gain} {interval}, {bound}",
            ))  # fmt: skip
        checks += _slice_checks(spec.gate, slices, slice_metric)
    checks += further
    failed = "; ".join(check.detail for check in checks if not check.passed)
    reason = failed or _praise(spec, metric, candidate, comparison)
    return Verdict(not failed, reason, tuple(checks), comparison)


def churn_of(ours: Scores, theirs: Scores) -> Churn | None:
    """How often two contenders answer differently; None without classes, or without answers."""
    mine, other = ours.answers(), theirs.answers()
    if mine is None or other is None or not len(mine[0]):
        return None
    (mine_N, true_N), other_N = mine, other[0]
    changed_N = mine_N != other_N
    fixed, broken = (int((changed_N & (one_N == true_N)).sum()) for one_N in (mine_N, other_N))
    share = float(changed_N.mean())
    return Churn(answers=len(true_N), share=share, fixed=fixed, broken=broken)


def _churn_check(spec: GateSpec, churn: Churn | None, champion: Scores | None) -> list[Check]:
    if spec.max_churn is None or champion is None:
        return []
    if churn is None:
        return [Check(name="churn", passed=False, detail="there are no classes to compare")]
    passed = churn.share <= spec.max_churn
    detail = f"{churn.share:.4f} of the answers differ from the champion's, "
    detail += f"{'within' if passed else 'more than'} the {spec.max_churn:g} allowed"
    value = {"value": churn.share, "threshold": spec.max_churn}
    return [Check(name="churn", passed=passed, detail=detail, **value)]


def _size_check(most: float | None, size: int | None) -> list[Check]:
    if most is None:
        return []
    if size is None:
        detail = "the size of the model was not recorded; run the step `score` again"
        return [Check(name="size", passed=False, detail=detail)]
    taken, passed = size / 1e6, size <= most * 1e6
    detail = f"the model takes {taken:.4g} MB, {'within' if passed else 'more than'} the {most:g}"
    known = {"value": taken, "threshold": most}
    return [Check(name="size", passed=passed, detail=f"{detail} allowed", **known)]


def _must_pass(spec: EvaluateSpec, record: records.Scores, scores: Path) -> list[Check]:
    """Whether the candidate answers all golden rows as they are labelled."""
    if spec.must_pass is None:
        return []
    if record.must_pass != spec.must_pass.content:
        detail = "the rows that must pass were not scored; run the step `score` again"
        return [Check(name="must_pass", passed=False, detail=detail)]
    rows = pq.read_table(scores / MUST_PASS).to_pylist()
    missed = []
    for number, row in enumerate(rows, 1):
        right = row["label"] if isinstance(row["label"], list) else [row["label"]]
        logits_WC = np.array(row["logits"], np.float64).reshape(len(right), -1)
        # a word that was cut off has the same logits for all tags
        known_W = np.isfinite(logits_WC).all(1) & (logits_WC.max(1) != logits_WC.min(1))
        picks = zip(logits_WC.argmax(1), known_W, strict=True)
        found = [record.candidate.labels[pick] if known else "–" for pick, known in picks]
        wrong = (pair for pair in zip(right, found, strict=True) if pair[0] != pair[1])
        for expected, predicted in itertools.islice(wrong, 1):
            missed.append(f"row {number} expected `{expected}`, predicted `{predicted}`")
    text = f"all {len(rows)} rows that must pass do"
    if missed:
        more = [f"and {len(missed) - _MOST_ROWS} more"] if len(missed) > _MOST_ROWS else []
        text = f"{len(missed)} of {len(rows)} rows that must pass do not: "
        text += "; ".join([*missed[:_MOST_ROWS], *more])
    return [Check(name="must_pass", passed=not missed, detail=text, value=len(missed), threshold=0)]


def refused(name: str, detail: str) -> Verdict:
    """The verdict where nothing can be compared: one check that did not pass says why."""
    return Verdict(False, detail, (Check(name=name, passed=False, detail=detail),), None)


def _clusters(rows: pa.Table, column: str | None) -> Ints | None:
    """[N]: which rows are drawn together, those without a value alone; None: each is."""
    if column is None:
        return None
    values: list[Any] = rows.column("slices").combine_chunks().field(column).to_pylist()
    known = dict[Any, int]()
    keys = (i if value is None else value for i, value in enumerate(values))
    return np.array([known.setdefault(key, len(known)) for key in keys], np.int64)


def _too_few(clusters_N: Ints | None) -> bool:
    return clusters_N is not None and len(np.unique(clusters_N)) < _FEWEST


def _left(spec: GateSpec, earlier: int) -> float:
    """The confidence of a comparison with as many `earlier` ones of its epoch."""
    if spec.looks is None:
        return spec.confidence
    round_ = earlier // spec.looks + 1
    return 1 - (1 - spec.confidence) / (spec.looks * round_ * (round_ + 1))


def _picks(generator: np.random.Generator, resamples: int, clusters_N: Ints) -> Ints:
    """[R, N]: the rows of clusters drawn with replacement, as many as fill N; the last is cut."""
    order_N, sizes_G = np.argsort(clusters_N, kind="stable"), np.bincount(clusters_N)
    rows, starts_G = len(clusters_N), np.cumsum(sizes_G) - sizes_G
    picks_RN = np.empty((resamples, rows), np.int64)
    for picks_N in picks_RN:
        drawn = generator.integers(0, len(sizes_G), len(sizes_G))
        while sizes_G[drawn].sum() < rows:
            drawn = np.append(drawn, generator.integers(0, len(sizes_G), len(sizes_G)))
        sizes = sizes_G[drawn]
        shifts = starts_G[drawn] - (np.cumsum(sizes) - sizes)
        picks_N[:] = order_N[(np.arange(sizes.sum()) + np.repeat(shifts, sizes))[:rows]]
    return picks_RN


def differences(
    spec: GateSpec, metric: str, candidate: Scores, champion: Scores,
    clusters_N: Ints | None = None,
) -> Floats:  # fmt: skip
    """[resamples]: candidate minus champion in `metric`, more is better, on resampled rows."""
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    generator = np.random.default_rng(spec.seed)
    found: list[Floats] = []
    rows = len(candidate)
    chunk = max(1, CHUNK_ELEMENTS // rows)
    for start in range(0, spec.resamples, chunk):
        some = min(chunk, spec.resamples - start)
        if clusters_N is None:
            picks_RN = generator.integers(0, rows, (some, rows))
        else:
            picks_RN = _picks(generator, some, clusters_N)
        ours, theirs = (each.resampled(metric, picks_RN) for each in (candidate, champion))
        found.append(sign * (ours - theirs))
    return np.concatenate(found)


def compare(
    spec: GateSpec, metric: str, candidate: Scores, champion: Scores,
    clusters_N: Ints | None = None,
) -> Comparison:  # fmt: skip
    """Candidate minus champion in `metric`, more is better, with its bootstrap interval."""
    found = differences(spec, metric, candidate, champion, clusters_N)
    tail = (1 - spec.confidence) / 2
    lower, upper = np.quantile(found, [tail, 1 - tail])
    if tail * spec.resamples < _FEWEST_BEYOND:
        reach = NormalDist().inv_cdf(1 - tail) * found.std()
        lower, upper = found.mean() - reach, found.mean() + reach
    # + 0.0: none of them is a negative zero
    return Comparison(
        metric=metric, estimate=_gain(metric, candidate, champion) + 0.0, lower=float(lower) + 0.0,
        upper=float(upper) + 0.0, confidence=spec.confidence, resamples=spec.resamples,
        seed=spec.seed, detectable=_detectable(spec, float(found.std()), sides=2),
    )  # fmt: skip


def _floor(
    check: str, metric: str, floor: float, metrics: Mapping[str, float], where: str = ""
) -> Check:
    value, falls = metrics.get(metric, math.nan), metric in LOWER_IS_BETTER
    passed = value <= floor if falls else value >= floor
    reached = f"{'is' if passed else 'is not'} {'at most' if falls else 'at least'} {floor:g}"
    detail = f"{metric} {fixed(value)}{where} {reached}"
    return Check(name=check, passed=passed, detail=detail, value=value, threshold=floor)


def _finite(scores: Scores, who: str) -> Check:
    bad = sorted(name for name, value in scores.metrics.items() if not math.isfinite(value))
    bad += [] if scores.finite else ["predictions"]
    detail = f"{', '.join(bad)} is not a number" if bad else "metrics are numbers"
    return Check(name=f"{who}_finite", passed=not bad, detail=f"the {who}'s {detail}")


def _slice_checks(spec: GateSpec, slices: Sequence[Slice], metric: str) -> list[Check]:
    """Whether no slice of some size loses more than allowed; what lacks the metric loses."""
    checks = []
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    judged = [part for part in slices if part.rows >= spec.min_slice_size and part.champion]
    sure = holm([part.p_value or 0.0 for part in judged], 1 - spec.confidence)
    for part, is_sure in zip(judged, sure, strict=True):
        ours, theirs = (side.get(metric, math.nan) for side in (part.candidate, part.champion))
        drop = sign * (theirs - ours)
        small = drop <= spec.max_slice_drop + 1e-12
        passed = small or (not is_sure and not math.isnan(drop))
        where = f"{part.column}={part.value} ({part.rows} rows)"
        limit = "within" if small else "more than"
        allowed = f"{limit} the {spec.max_slice_drop:g} allowed"
        if passed and not small:
            allowed += f", which chance may explain (p = {part.p_value:.2g})"
        if sign > 0:
            detail = f"{where} {'gains' if drop <= 0 else 'loses'} {fixed(abs(drop))} of {metric}"
        else:
            moves = "falls" if drop <= 0 else "rises"
            detail = f"{metric} of {where} {moves} by {fixed(abs(drop))}"
        name, detail = f"slice:{part.column}={part.value}", f"{detail}, {allowed}"
        known = {"value": drop, "threshold": spec.max_slice_drop}
        checks.append(Check(name=name, passed=passed, detail=detail, **known))
    return checks


def holm(
    p_values: Sequence[float], level: float, weights: Sequence[float] | None = None
) -> list[bool]:
    """Which of several changes chance does not explain, all together at this level; one of a
    larger weight has a larger part of it (Holm 1979)."""
    weights = weights or [1.0] * len(p_values)
    sure, left = [False] * len(p_values), sum(weights)
    for at in sorted(range(len(p_values)), key=lambda at: p_values[at] / weights[at]):
        if p_values[at] * left > level * weights[at]:
            break
        sure[at] = True
        left -= weights[at]
    return sure


def _praise(spec: EvaluateSpec, metric: str, ours: Scores, comparison: Comparison | None) -> str:
    value = ours.metrics[metric]
    if comparison is None:
        reached = f"{metric} {fixed(value)} reaches every floor"
        return f"first model: {reached if spec.floor else ours.trivial(metric).detail}"
    how = "is better than the champion by"
    if spec.gate.mode == "noninferiority":
        how = f"is not {spec.gate.margin:g} worse than the champion: it differs by"
    interval = f"[{fixed(comparison.lower, '+')}, {fixed(comparison.upper, '+')}]"
    return f"{metric} {fixed(value)} {how} {fixed(comparison.estimate, '+')} {interval}"
