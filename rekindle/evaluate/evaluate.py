"""From what candidate and champion scored on the same examples to the evidence: why the
candidate may or may not replace the champion.

A pure function of the files that the step `score` left (records.Scores): no model is
loaded here. Models with different tokenizers are compared in bits per byte of text.
Shapes: N examples.

The verdict (`judge`) fails closed. A first model must reach every floor and beat the
trivial answer (the most frequent class, or the frequency of single tokens). A later one
must also be better than the champion by `min_delta`, or not worse by `margin`, with the
lower bound of the gain above it (bounds.py; both models are scored on the same rows). And
it must not lose more than `max_slice_drop` on any slice of at least `min_slice_size`
rows, unless chance explains the loss: Holm's steps (1979) bound the chance that any slice
refuses a model that is as good. Rows that are no draws of their own, those of a patient
or a day, are drawn together: clusters. Where the test rows cannot tell whatever they say,
the verdict says how many it takes.

With `gate.looks`, the comparisons of an epoch, which is one way to draw the test split,
share 1 - `confidence` (Bonferroni, in rounds whose parts 1/2 + 1/6 + 1/12 + ... sum to
1)."""

import dataclasses
import hashlib
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
from rekindle.evaluate.scores import SCORES, ModelScores
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
from rekindle.spec.model import DataSpec, EvaluateSpec, GateSpec, SplitSpec

_FEWEST_AUDITED = 10  # rows set aside that are compared
_MOST_ROWS = 10  # that must pass and do not, which a check names

TABLE = "scores.parquet"
RECORD = "scores.json"
MUST_PASS = "must_pass.parquet"  # noqa: S105 - the name of a file


def evaluate(spec: EvaluateSpec, data: DataSpec, scores: Path) -> Evidence:
    """The evidence on the candidate whose scores on the
    test split of `data` lie in the folder `scores`."""
    record = records.Scores.read(scores / RECORD)
    scored_rows = pq.read_table(scores / TABLE)
    aside_N = _aside(scored_rows, spec.audit, data.split.salt)
    rows = scored_rows.filter(pa.array(~aside_N))
    audited_rows = scored_rows.filter(pa.array(aside_N))
    ours, theirs = _contenders(record, rows)
    metric, slice_metric = _metrics_to_compare(spec.gate, record)
    clusters_N = _clusters(rows, spec.gate.cluster)
    epoch = _epoch_of(data.split)
    # each cluster would be a slice of its own
    columns = [name for name in data.slices if name != spec.gate.cluster]
    slices = _slices(spec.gate, slice_metric, rows, columns, ours, theirs, clusters_N)
    churn = churn_of(ours, theirs) if theirs else None
    drop = _champion_drop(spec.gate, metric, record, theirs, clusters_N)
    further = [
        *_must_pass(spec, record, scores),
        *_churn_check(spec.gate, churn, theirs),
        *_size_check(spec.max_megabytes, record.candidate.bytes),
        *_drop_check(spec.gate, drop),
        *_incomparable_check(record),
    ]
    if record.champion_version and not record.champion and not record.incomparable:
        verdict = refused(
            "champion_scored",
            f"the champion, version {record.champion_version}, was not scored; "
            "run the step `score` again",
        )
    else:
        confidence = _confidence_of_look(spec.gate, record.compared.get(epoch, 0))
        verdict = judge(
            spec, metric, ours, theirs, slices, slice_metric, further, clusters_N, confidence
        )
    if drop is not None and drop.is_sure and drop.sentence not in verdict.reason:
        verdict = dataclasses.replace(verdict, reason=f"{verdict.reason}; {drop.sentence}")
    return Evidence(
        run_key=record.candidate.run_key,
        model_digest=record.candidate.digest,
        promote=verdict.promote,
        reason=verdict.reason,
        checks=verdict.checks,
        metrics=dict(ours.metrics),
        champion_version=record.champion_version,
        champion_digest=record.champion_digest,
        champion_metrics=dict(theirs.metrics) if theirs else {},
        comparison=verdict.comparison,
        churn=churn,
        labels=record.candidate.labels,
        confusion=ours.confusion(),
        classes=_classes(ours, theirs),
        calibration=ours.calibration(),
        slices=tuple(slices),
        samples=record.samples,
        smoke=record.smoke,
        reference=_with_answers(record.reference, ours, rows),
        rows=record.rows - audited_rows.num_rows,
        excluded=record.excluded,
        examples=record.examples,
        epoch=epoch if verdict.comparison else "",
        bad_rows=record.bad_rows,
        audit=_audit(spec.gate, metric, record, audited_rows),
        champion_drop=drop,
    )


def _metrics_to_compare(spec: GateSpec, record: records.Scores) -> tuple[str, str]:
    """What the contenders are compared in, and what they are compared in on slices."""
    if not record.same_targets:  # tokenizers that cut a text into different tokens
        return "bits_per_byte", "bits_per_byte"
    objective = SCORES[record.objective]
    return spec.metric or objective.METRIC, objective.SLICE_METRIC


def _epoch_of(split: SplitSpec) -> str:
    """What identifies the drawn test rows; comparisons on the same rows share it."""
    return digest([split.by, round(split.test, 9), split.salt, split.gap])


def _incomparable_check(record: records.Scores) -> list[Check]:
    """A check that fails where the champion cannot score these rows, such as one of other
    classes: the candidate is judged as a first model is, and a person decides."""
    if not record.incomparable:
        return []
    name, why = record.incomparable
    detail = f"{why}; a person may promote it, by `rekindle promote RUN --reason TEXT`"
    return [Check(name=name, passed=False, detail=detail)]


def _with_answers(
    reference: Reference | None, ours: ModelScores, rows: pa.Table
) -> Reference | None:
    """The reference with the candidate's answers to the first row of each content: how
    often it predicts each class, and of rows that lie evenly how sure it is, or the
    predicted numbers."""
    if reference is None or not ours.finite or not len(ours):
        return reference
    ours = ours.picked(firsts(rows.column("hash").to_pylist()))
    # evenly, as rows may lie in the order of their classes
    every_N = np.linspace(0, len(ours) - 1, min(MOST_ROWS, len(ours))).astype(int)
    update = dict[str, Any]()
    confidence_N = ours.confidence()
    if confidence_N is not None:
        update["confidence"] = tuple(round(float(value), 4) for value in confidence_N[every_N])
        update["predicted"] = {part.label: part.predicted for part in ours.classes()}
    values_N = ours.numbers()
    if values_N is not None:
        update["inputs"] = {**reference.inputs, "value": tuple(values_N[every_N].tolist())}
    return reference.model_copy(update=update)


def _contenders(record: records.Scores, rows: pa.Table) -> tuple[ModelScores, ModelScores | None]:
    """Candidate and champion, if there is one, on these rows."""
    objective = SCORES[record.objective]
    ours = objective.of(rows, "candidate", record.candidate)
    if not record.champion:
        return ours, None
    return ours, objective.of(rows, "champion", record.champion)


def _aside(rows: pa.Table, share: float, salt: str) -> NDArray[np.bool_]:
    """[N]: the rows that decide nothing, which are the same in each run that has them."""
    if not share:
        return np.zeros(rows.num_rows, bool)
    # by content: a row stays aside whatever rows come and go beside it
    key = hashlib.blake2b(salt.encode(), digest_size=32).digest()
    hashes = rows.column("hash").to_pylist()
    aside_N = np.zeros(len(hashes), bool)
    for row, content_hash in enumerate(hashes):
        drawn = hashlib.blake2b(content_hash, key=key, digest_size=8).digest()
        aside_N[row] = int.from_bytes(drawn) < share * 2**64
    return aside_N


def _audit(spec: GateSpec, metric: str, record: records.Scores, rows: pa.Table) -> Audit | None:
    """What the contenders reach on rows that decide nothing;
    None where there are none."""
    if not rows.num_rows:
        return None
    ours, theirs = _contenders(record, rows)
    clusters_N = _clusters(rows, spec.cluster)
    can_compare = (
        rows.num_rows >= _FEWEST_AUDITED
        and metric in ours.metrics
        and not _too_few(ours, clusters_N, spec.cluster)
    )
    comparison = None
    if can_compare and theirs is not None and ours.finite and theirs.finite:
        comparison = compare(spec, metric, ours, theirs, clusters_N)
    return Audit(
        rows=rows.num_rows,
        metrics=dict(ours.metrics),
        champion_metrics=dict(theirs.metrics) if theirs else {},
        comparison=comparison,
    )


def candidate_scores(scores: Path, audit: float, salt: str) -> tuple[ModelScores, object]:
    """The candidate's scores on the rows that judge, of the folder `scores`, and the
    right answers: the classes and the label of each example, or into how many targets
    each text was cut."""
    record = records.Scores.read(scores / RECORD)
    rows = pq.read_table(scores / TABLE)
    rows = rows.filter(pa.array(~_aside(rows, audit, salt)))
    ours = SCORES[record.objective].of(rows, "candidate", record.candidate)
    if record.objective == "tokens":
        return ours, rows.column("candidate").combine_chunks().field("targets").to_pylist()
    return ours, (record.candidate.labels, rows.column("label").to_pylist())


def _classes(ours: ModelScores, theirs: ModelScores | None) -> tuple[ClassResult, ...]:
    """The candidate's result for each class, with the champion's F1."""
    champion_f1 = {part.label: part.f1 for part in theirs.classes()} if theirs else {}
    results = []
    for part in ours.classes():
        update = {"champion_f1": champion_f1.get(part.label)}
        results.append(part.model_copy(update=update))
    return tuple(results)


def _slices(
    spec: GateSpec,
    metric: str,
    rows: pa.Table,
    columns: Sequence[str],
    ours: ModelScores,
    theirs: ModelScores | None,
    clusters_N: Ints | None,
) -> list[Slice]:
    """Metrics for each value of each slice column, in order of column and value."""
    slices = []
    for column in columns:
        values: list[object] = rows.column("slices").combine_chunks().field(column).to_pylist()
        names_N = np.array(["" if value is None else str(value) for value in values])
        for name in sorted(set(names_N)):
            pick_N = names_N == name
            candidate = ours.picked(pick_N)
            part = Slice(
                column=column,
                value=name,
                rows=int(pick_N.sum()),
                candidate=candidate.metrics,
            )
            if theirs is not None:
                picked_clusters = None
                if clusters_N is not None:
                    picked_clusters = np.unique(clusters_N[pick_N], return_inverse=True)[1]
                champion = theirs.picked(pick_N)
                part = _against(spec, metric, part, candidate, champion, picked_clusters)
            slices.append(part)
    return slices


def _against(
    spec: GateSpec,
    metric: str,
    part: Slice,
    ours: ModelScores,
    theirs: ModelScores,
    clusters_N: Ints | None,
) -> Slice:
    """The slice with what the champion reaches, and how often a model as good as the
    champion would seem as bad as the candidate."""
    update = dict[str, Any](champion=theirs.metrics)
    if _too_few(ours, clusters_N, spec.cluster):
        update["p_value"] = 1.0  # so few rows refuse no candidate
    elif ours.finite and theirs.finite and metric in ours.metrics and metric in theirs.metrics:
        bounds = bounds_of(spec, metric, ours, theirs, clusters_N)
        update["p_value"] = bounds.chance_of_loss()
        update["detectable"] = bounds.detectable(1 - spec.confidence)
    return part.model_copy(update=update)


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
    """The verdict in `metric`, on slices `slice_metric`, with `further` checks, if any;
    `confidence` of the comparison with the champion is the gate's, or what looks leave of
    it."""
    if len(candidate) == 0:
        return refused("examples", "no held-out examples are left to judge on")
    if metric not in candidate.metrics:
        return refused("metric", f"{metric} is measured of at most {MOST_CURVES} classes")
    if champion is not None:
        too_few = _too_few(candidate, clusters_N, spec.gate.cluster)
        if too_few:
            return refused("clusters" if spec.gate.cluster else "examples", too_few)
    checks = [
        _finite(candidate, "candidate"),
        candidate.trivial(metric),
        *_floor_checks(spec, candidate, slices),
    ]
    comparison = None
    if champion is not None:
        checks.append(_finite(champion, "champion"))
        # with a NaN among the scores every bound would be one
        if all(check.passed for check in checks if check.name.endswith("_finite")):
            gate = spec.gate.model_copy(update={"confidence": confidence or spec.gate.confidence})
            comparison = compare(gate, metric, candidate, champion, clusters_N)
            checks.append(_gain_check(gate, comparison, champion, clusters_N))
        checks += _slice_checks(spec.gate, slices, slice_metric)
    checks += further
    failed = "; ".join(check.detail for check in checks if not check.passed)
    reason = failed or _praise(spec, metric, candidate, comparison)
    return GateVerdict(not failed, reason, tuple(checks), comparison)


def _floor_checks(
    spec: EvaluateSpec, candidate: ModelScores, slices: Sequence[Slice]
) -> list[Check]:
    """Whether the candidate reaches each floor, on all rows and on large slices."""
    checks = []
    for name, floor in spec.floor.items():
        checks.append(_floor(f"floor_{name}", name, floor, candidate.metrics))
    for part in slices:
        if part.rows < spec.gate.min_slice_size:
            continue
        where = f"{part.column}={part.value}"
        for name, floor in spec.slice_floor.items():
            check = f"floor_{name}:{where}"
            checks.append(_floor(check, name, floor, part.candidate, f" of {where}"))
    return checks


def _gain_check(
    spec: GateSpec, comparison: Comparison, champion: ModelScores, clusters_N: Ints | None
) -> Check:
    """Whether the candidate is better than the champion, or not worse,
    as the gate asks."""
    may_be_worse = spec.mode == "noninferiority"
    least = -spec.margin if may_be_worse else spec.min_delta
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
        name="not_worse_than_champion" if may_be_worse else "better_than_champion",
        passed=passed,
        value=comparison.lower,
        threshold=least,
        detail=detail,
    )


def _too_few_to_tell(
    spec: GateSpec, metric: str, champion: ModelScores, clusters_N: Ints | None
) -> str:
    """How many test rows are needed,
    where these cannot show what is asked in any case."""
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
    # the bound of a candidate that answers exactly as the champion does
    bounds = bounds_of(spec, metric, champion, champion, clusters_N, tail)
    unseen = -bounds.lower(tail)
    if unseen < spec.margin:
        return ""
    needed = math.ceil(units * unseen / spec.margin)
    if isinstance(bounds, PairedAnswers):
        # n equal answers leave a share of 1 - tail^(1/n)
        # open; a margin of 1 has no logarithm
        needed = math.ceil(math.log(tail) / math.log1p(-min(spec.margin, 1 - 1e-12)))
    return (
        f": {units} {noun} that the models answer alike still allow a loss of {fixed(unseen)};"
        f" to show that it is below {spec.margin:g} takes about {needed:,} of them, or a wider"
        " evaluate.gate.margin"
    )


def churn_of(ours: ModelScores, theirs: ModelScores) -> Churn | None:
    """How often two contenders answer differently; None without classes or answers."""
    our_answers = ours.answers()
    their_answers = theirs.answers()
    if our_answers is None or their_answers is None or not len(our_answers[0]):
        return None
    ours_N, true_N = our_answers
    theirs_N, _ = their_answers
    changed_N = ours_N != theirs_N
    return Churn(
        answers=len(true_N),
        share=float(changed_N.mean()),
        fixed=int((changed_N & (ours_N == true_N)).sum()),
        broken=int((changed_N & (theirs_N == true_N)).sum()),
    )


def _churn_check(spec: GateSpec, churn: Churn | None, champion: ModelScores | None) -> list[Check]:
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


def _champion_drop(
    spec: GateSpec,
    metric: str,
    record: records.Scores,
    theirs: ModelScores | None,
    clusters_N: Ints | None,
) -> ChampionDrop | None:
    """How much worse the champion does on these rows than on those that it was judged on,
    which are others: of these only the metric is known, so their deviation is taken from
    these."""
    judged = record.champion_judged.get(metric)
    judged_rows = record.champion_judged_rows
    if theirs is None or judged is None or not judged_rows or not len(theirs):
        return None
    now = theirs.metrics.get(metric, math.nan)
    if not (theirs.finite and math.isfinite(now) and math.isfinite(judged)):
        return None
    drop = now - judged if metric in LOWER_IS_BETTER else judged - now
    # of the difference of two means, each of its own rows
    deviation = deviation_of(spec, metric, theirs, clusters_N)
    deviation *= math.sqrt(1 + len(theirs) / judged_rows)
    chance = float(drop <= 0)  # without any spread a drop is real
    if deviation:
        chance = 1 - NormalDist().cdf(drop / deviation)
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
    check = Check(
        name="champion_drop",
        passed=passed,
        detail=detail,
        value=drop.drop,
        threshold=spec.max_champion_drop,
    )
    return [check]


def _size_check(most_megabytes: float | None, size_bytes: int | None) -> list[Check]:
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


def _must_pass(spec: EvaluateSpec, record: records.Scores, scores: Path) -> list[Check]:
    """Whether the candidate answers all golden rows as they are labelled."""
    if spec.must_pass is None:
        return []
    # the rows are of the config: another file may have been named since
    if record.must_pass != spec.must_pass.content:
        detail = "the rows that must pass were not scored; run the step `score` again"
        return [Check(name="must_pass", passed=False, detail=detail)]
    rows = pq.read_table(scores / MUST_PASS).to_pylist()
    misses = []
    for number, row in enumerate(rows, 1):
        miss = _first_miss(row["label"], row["logits"], record.candidate.labels)
        if miss:
            expected, predicted = miss
            misses.append(f"row {number} expected `{expected}`, predicted `{predicted}`")
    detail = f"all {len(rows)} rows that must pass do"
    if misses:
        listed = misses[:_MOST_ROWS]
        if len(misses) > _MOST_ROWS:
            listed.append(f"and {len(misses) - _MOST_ROWS} more")
        detail = f"{len(misses)} of {len(rows)} rows that must pass do not: " + "; ".join(listed)
    check = Check(
        name="must_pass",
        passed=not misses,
        detail=detail,
        value=len(misses),
        threshold=0,
    )
    return [check]


def _first_miss(
    label: str | list[str], logits: list[float], classes: Sequence[str]
) -> tuple[str, str] | None:
    """The expected and the predicted class of the first word, or of the text, that the
    candidate answers wrong; None where all are right."""
    expected_W = label if isinstance(label, list) else [label]
    logits_WC = np.array(logits, np.float64).reshape(len(expected_W), -1)
    # a word that was cut off has the same logits for all tags
    is_known_W = np.isfinite(logits_WC).all(1) & (logits_WC.max(1) != logits_WC.min(1))
    picks_W = logits_WC.argmax(1)
    for expected, pick, is_known in zip(expected_W, picks_W, is_known_W, strict=True):
        predicted = classes[pick] if is_known else "–"
        if predicted != expected:
            return expected, predicted
    return None


def refused(name: str, detail: str) -> GateVerdict:
    """The verdict where nothing can be compared: one check that did not pass says why."""
    return GateVerdict(False, detail, (Check(name=name, passed=False, detail=detail),), None)


def _clusters(rows: pa.Table, column: str | None) -> Ints | None:
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


def _too_few(scores: ModelScores, clusters_N: Ints | None, column: str | None) -> str:
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


def _confidence_of_look(spec: GateSpec, earlier: int) -> float:
    """The confidence of a comparison with as many `earlier` ones of its epoch."""
    if spec.looks is None:
        return spec.confidence
    # the parts of all rounds, 1 / (r (r + 1)), sum to 1, so that the looks never end
    round_ = earlier // spec.looks + 1
    return 1 - (1 - spec.confidence) / (spec.looks * round_ * (round_ + 1))


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


def _floor(
    check: str, metric: str, floor: float, metrics: Mapping[str, float], where: str = ""
) -> Check:
    """Whether a metric is at least its floor, or at most where less is better."""
    value = metrics.get(metric, math.nan)  # which no comparison passes
    if metric in LOWER_IS_BETTER:
        passed = value <= floor
        limit = "at most"
    else:
        passed = value >= floor
        limit = "at least"
    verb = "is" if passed else "is not"
    detail = f"{metric} {fixed(value)}{where} {verb} {limit} {floor:g}"
    return Check(name=check, passed=passed, detail=detail, value=value, threshold=floor)


def _finite(scores: ModelScores, who: str) -> Check:
    """Whether all metrics and predictions of a contender are numbers."""
    bad = sorted(name for name, value in scores.metrics.items() if not math.isfinite(value))
    if not scores.finite:
        bad.append("predictions")
    detail = f"{', '.join(bad)} is not a number" if bad else "metrics are numbers"
    return Check(name=f"{who}_finite", passed=not bad, detail=f"the {who}'s {detail}")


def _slice_checks(spec: GateSpec, slices: Sequence[Slice], metric: str) -> list[Check]:
    """Whether no large slice loses more than is allowed; one without the metric fails."""
    checks = []
    sign = -1.0 if metric in LOWER_IS_BETTER else 1.0
    judged = [part for part in slices if part.rows >= spec.min_slice_size and part.champion]
    # without a p-value nothing explains a loss
    sure = holm([part.p_value or 0.0 for part in judged], 1 - spec.confidence)
    for part, is_sure in zip(judged, sure, strict=True):
        ours = part.candidate.get(metric, math.nan)
        theirs = part.champion.get(metric, math.nan)
        drop = sign * (theirs - ours)
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


def _praise(
    spec: EvaluateSpec, metric: str, ours: ModelScores, comparison: Comparison | None
) -> str:
    """The reason of a verdict that promotes."""
    value = fixed(ours.metrics[metric])
    if comparison is None:
        if spec.floor:
            return f"first model: {metric} {value} reaches every floor"
        return f"first model: {ours.trivial(metric).detail}"
    relation = "is better than the champion by"
    if spec.gate.mode == "noninferiority":
        relation = f"is not {spec.gate.margin:g} worse than the champion: it differs by"
    interval = f"[{fixed(comparison.lower, '+')}, {fixed(comparison.upper, '+')}]"
    return f"{metric} {value} {relation} {fixed(comparison.estimate, '+')} {interval}"
