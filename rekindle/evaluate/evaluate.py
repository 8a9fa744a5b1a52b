"""From what candidate and champion scored on the same examples to the evidence: why the candidate
may or may not replace the champion.

A pure function of the files that the step `score` left (records.Scores): no model is loaded here.
Models with different tokenizers are compared in bits per byte of text. Shapes: N examples.

The verdict (`judge`) fails closed. A first model must reach every floor and beat the trivial answer
(the most frequent class, or the frequency of single tokens). A later one must also be better than
the champion by `min_delta`, or not worse by `margin`, with the lower bound of the gain above it
(bounds.py; both models are scored on the same rows). And it must not lose more than
`max_slice_drop` on any slice of at least `min_slice_size` rows, unless chance explains the loss:
Holm's steps (1979) bound the chance that any slice refuses a model that is as good. Rows that are
no draws of their own, those of a patient or a day, are drawn together: clusters. Where the test
rows cannot tell whatever they say, the verdict says how many it takes.

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
from rekindle.evaluate.bounds import (
    FEWEST_UNITS,
    PairedAnswers,
    bounds_of,
    deviation_of,
    least_that_differ,
    units_in,
)
from rekindle.evaluate.scores import SCORES, Scores
from rekindle.evaluate.scores.base import Ints
from rekindle.evaluate.scores.classes import MOST_CURVES
from rekindle.formats import fixed
from rekindle.records import (
    LOWER_IS_BETTER,
    Audit,
    ChampionDrop,
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

_FEWEST = 10  # rows set aside that are compared
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
    drop = _champion_drop(spec.gate, metric, record, theirs, clusters_N)
    further += _drop_check(spec.gate, drop)
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
    if drop is not None and drop.is_sure and drop.sentence not in verdict.reason:
        verdict = dataclasses.replace(verdict, reason=f"{verdict.reason}; {drop.sentence}")
    told = (
        "champion_version",
        "champion_digest",
        "samples",
        "smoke",
        "excluded",
        "examples",
        "bad_rows",
    )
    return Evidence(
        run_key=record.candidate.run_key,
        model_digest=record.candidate.digest,
        metrics=dict(ours.metrics),
        champion_metrics=dict(theirs.metrics) if theirs else {},
        labels=record.candidate.labels,
        confusion=ours.confusion(),
        classes=_classes(ours, theirs),
        calibration=ours.calibration(),
        slices=tuple(slices),
        churn=churn,
        reference=_with_answers(record.reference, ours, rows),
        epoch=epoch if verdict.comparison else "",
        **vars(verdict),
        audit=_audit(spec.gate, metric, record, audited),
        rows=record.rows - audited.num_rows,
        champion_drop=drop,
        **{name: getattr(record, name) for name in told},
    )


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
    enough = rows.num_rows >= _FEWEST and metric in ours.metrics
    enough = enough and not _too_few(ours, clusters_N, spec.cluster)
    if enough and theirs is not None and ours.finite and theirs.finite:
        comparison = compare(spec, metric, ours, theirs, clusters_N)
    metrics = dict(theirs.metrics) if theirs else {}
    return Audit(
        rows=rows.num_rows,
        metrics=dict(ours.metrics),
        champion_metrics=metrics,
        comparison=comparison,
    )


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
    spec: GateSpec,
    metric: str,
    rows: pa.Table,
    columns: Sequence[str],
    ours: Scores,
    theirs: Scores | None,
    clusters_N: Ints | None,
) -> list[Slice]:
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
    if _too_few(ours, clusters_N, spec.cluster):
        return known | {"p_value": 1.0}
    if ours.finite and theirs.finite and metric in ours.metrics and metric in theirs.metrics:
        bounds = bounds_of(spec, metric, ours, theirs, clusters_N)
        known["p_value"] = bounds.chance_of_loss()
        known["detectable"] = bounds.detectable(1 - spec.confidence)
    return known


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The decision, its reason in one sentence, and every check behind it."""

    promote: bool
    reason: str
    checks: tuple[Check, ...]
    comparison: Comparison | None


def judge(
    spec: EvaluateSpec,
    metric: str,
    candidate: Scores,
    champion: Scores | None,
    slices: Sequence[Slice],
    slice_metric: str,
    further: Sequence[Check] = (),
    clusters_N: Ints | None = None,
    confidence: float | None = None,
) -> Verdict:
    """The verdict in `metric`, on slices `slice_metric`, with `further` checks, if any;
    `confidence` of the comparison with the champion is the gate's, or what looks leave of it."""
    confidence = confidence or spec.gate.confidence
    if len(candidate) == 0:
        return refused("examples", "no held-out examples are left to judge on")
    if metric not in candidate.metrics:
        return refused("metric", f"{metric} is measured of at most {MOST_CURVES} classes")
    if champion is not None and (few := _too_few(candidate, clusters_N, spec.gate.cluster)):
        return refused("clusters" if spec.gate.cluster else "examples", few)
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
            checks.append(_gain_check(gate, comparison, champion, clusters_N))
        checks += _slice_checks(spec.gate, slices, slice_metric)
    checks += further
    failed = "; ".join(check.detail for check in checks if not check.passed)
    reason = failed or _praise(spec, metric, candidate, comparison)
    return Verdict(not failed, reason, tuple(checks), comparison)


def _gain_check(
    spec: GateSpec, comparison: Comparison, champion: Scores, clusters_N: Ints | None
) -> Check:
    """Whether the candidate is better than the champion, or not worse, as the gate asks."""
    may_be_worse = spec.mode == "noninferiority"
    least = -spec.margin if may_be_worse else spec.min_delta
    lower, upper = fixed(comparison.lower, "+"), fixed(comparison.upper, "+")
    passed = comparison.lower > least and comparison.estimate > least
    relation = "lies above" if passed else "does not lie above"
    detail = f"the gain in {comparison.metric} is {fixed(comparison.estimate, '+')}"
    detail += f" [{lower}, {upper}] at {100 * spec.confidence:.6g}%"
    detail += f", whose lower bound {relation} {least:g}"
    if not passed:
        detail += _too_few_to_tell(spec, comparison.metric, champion, clusters_N)
    return Check(
        name="not_worse_than_champion" if may_be_worse else "better_than_champion",
        passed=passed,
        value=comparison.lower,
        threshold=least,
        detail=detail,
    )


def _too_few_to_tell(spec: GateSpec, metric: str, champion: Scores, clusters_N: Ints | None) -> str:
    """How many test rows it takes, where these cannot show what is asked whatever they say."""
    tail = (1 - spec.confidence) / 2
    units = len(champion) if clusters_N is None else len(np.unique(clusters_N))
    what = "test rows" if clusters_N is None else f"values of {spec.cluster}"
    if spec.mode == "superiority":
        needed = least_that_differ(tail)
        if units >= needed:
            return ""
        return f": {units} {what} cannot show a gain, it takes {needed} that all speak for it"
    # the bound of a candidate that answers exactly as the champion does
    bounds = bounds_of(spec, metric, champion, champion, clusters_N, tail)
    unseen = -bounds.lower(tail)
    if unseen < spec.margin:
        return ""
    needed = math.ceil(units * unseen / spec.margin)
    if isinstance(bounds, PairedAnswers):
        needed = math.ceil(math.log(tail) / math.log1p(-min(spec.margin, 1 - 1e-12)))
    return (
        f": {units} {what} that the models answer alike still allow a loss of {fixed(unseen)};"
        f" to show that it is below {spec.margin:g} takes about {needed:,} of them, or a wider"
        " evaluate.gate.margin"
    )


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


def _champion_drop(
    spec: GateSpec,
    metric: str,
    record: records.Scores,
    theirs: Scores | None,
    clusters_N: Ints | None,
) -> ChampionDrop | None:
    """How much worse the champion does on these rows than on those that it was judged on, which are
    others: of these only the metric is known, so their deviation is taken from these."""
    judged, judged_rows = record.champion_judged.get(metric), record.champion_judged_rows
    if theirs is None or judged is None or not judged_rows or not len(theirs):
        return None
    now = theirs.metrics.get(metric, math.nan)
    if not (theirs.finite and math.isfinite(now) and math.isfinite(judged)):
        return None
    drop = now - judged if metric in LOWER_IS_BETTER else judged - now
    deviation = deviation_of(spec, metric, theirs, clusters_N)
    deviation *= math.sqrt(1 + len(theirs) / judged_rows)
    chance = 1 - NormalDist().cdf(drop / deviation) if deviation else float(drop <= 0)
    return ChampionDrop(
        metric=metric,
        judged=judged,
        judged_rows=judged_rows,
        now=now,
        rows=len(theirs),
        drop=drop,
        p_value=chance,
    )


def _drop_check(spec: GateSpec, drop: ChampionDrop | None) -> list[Check]:
    if spec.max_champion_drop is None or drop is None:
        return []
    passed = drop.drop <= spec.max_champion_drop or not drop.is_sure
    detail = f"the champion's {drop.metric} fell by {fixed(drop.drop)} since it was judged"
    if not passed:
        detail = f"{drop.sentence}. That is more than the {spec.max_champion_drop:g} of"
        detail += " evaluate.gate.max_champion_drop, so a person decides: look at the data, then"
        detail += " `rekindle promote RUN --reason TEXT`"
    value = {"value": drop.drop, "threshold": spec.max_champion_drop}
    return [Check(name="champion_drop", passed=passed, detail=detail, **value)]


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


def _too_few(scores: Scores, clusters_N: Ints | None, column: str | None) -> str:
    """What makes the rows tell as little as a few do, if anything: few clusters, or answers most of
    which belong to a few of them, or to a few long examples."""
    sizes_N = scores.sizes_N
    if clusters_N is None and (not len(sizes_N) or sizes_N.min() == sizes_N.max()):
        return ""
    units, weigh = len(sizes_N), units_in(clusters_N, sizes_N)
    if weigh >= FEWEST_UNITS or (clusters_N is None and units < FEWEST_UNITS):
        return ""
    what = f"the {units} test examples, which differ in length,"
    if clusters_N is not None:
        units = len(np.unique(clusters_N))
        what = f"the {units} values of {column} among the test examples"
    return (
        f"{what} tell as much as {weigh:.1f} of equal size: it takes {FEWEST_UNITS} to tell models"
        " apart"
    )


def _left(spec: GateSpec, earlier: int) -> float:
    """The confidence of a comparison with as many `earlier` ones of its epoch."""
    if spec.looks is None:
        return spec.confidence
    round_ = earlier // spec.looks + 1
    return 1 - (1 - spec.confidence) / (spec.looks * round_ * (round_ + 1))


def compare(
    spec: GateSpec,
    metric: str,
    candidate: Scores,
    champion: Scores,
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
