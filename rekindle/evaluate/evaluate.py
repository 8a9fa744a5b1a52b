"""From what candidate and champion scored on the same examples to the evidence: the
metrics of both, on all rows and on slices, what differs, and the verdict (gate.py).

A pure function of the files that the step `score` left (records.Scores): no model is
loaded here. Models with different tokenizers are compared in bits per byte of text.
Shapes: N examples."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from rekindle import records
from rekindle.data.signals import MOST_ROWS, firsts
from rekindle.evaluate.bounds import bounds_of
from rekindle.evaluate.compare import (
    champion_drop_of,
    churn_of,
    clusters_of,
    compare,
    too_few_units,
)
from rekindle.evaluate.gate import (
    churn_checks,
    confidence_of_look,
    drop_checks,
    incomparable_checks,
    judge,
    refused,
    size_checks,
)
from rekindle.objectives import KINDS, scores_of
from rekindle.objectives.scores import Ints, ModelScores
from rekindle.records import Audit, Check, ClassResult, Evidence, Reference, Slice
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
    candidate, champion = _contenders(record, rows)
    metric, slice_metric = _metrics_to_compare(spec.gate, record)
    clusters_N = clusters_of(rows, spec.gate.cluster)
    epoch = _epoch_of(data.split)
    # each cluster would be a slice of its own
    columns = [name for name in data.slices if name != spec.gate.cluster]
    slices = _slices(spec.gate, slice_metric, rows, columns, candidate, champion, clusters_N)
    churn = None
    champion_metrics = dict[str, float]()
    if champion is not None:
        churn = churn_of(candidate, champion)
        champion_metrics = dict(champion.metrics)
    drop = champion_drop_of(spec.gate, metric, record, champion, clusters_N)
    further = [
        *_must_pass_checks(spec, record, scores),
        *churn_checks(spec.gate, churn, champion),
        *size_checks(spec.max_megabytes, record.candidate.bytes),
        *drop_checks(spec.gate, drop),
        *incomparable_checks(record),
    ]
    if record.champion_version and not record.champion and not record.incomparable:
        verdict = refused(
            "champion_scored",
            f"the champion, version {record.champion_version}, was not scored; "
            "run the step `score` again",
        )
    else:
        confidence = confidence_of_look(spec.gate, record.compared.get(epoch, 0))
        verdict = judge(
            spec, metric, candidate, champion, slices, slice_metric, further, clusters_N, confidence
        )
    if drop is not None and drop.is_sure and drop.sentence not in verdict.reason:
        verdict = dataclasses.replace(verdict, reason=f"{verdict.reason}; {drop.sentence}")
    return Evidence(
        run_key=record.candidate.run_key,
        model_digest=record.candidate.digest,
        promote=verdict.promote,
        reason=verdict.reason,
        checks=verdict.checks,
        metrics=dict(candidate.metrics),
        champion_version=record.champion_version,
        champion_digest=record.champion_digest,
        champion_metrics=champion_metrics,
        comparison=verdict.comparison,
        churn=churn,
        labels=record.candidate.labels,
        confusion=candidate.confusion(),
        classes=_classes(candidate, champion),
        calibration=candidate.calibration(),
        slices=tuple(slices),
        samples=record.samples,
        smoke=record.smoke,
        reference=_with_answers(record.reference, candidate, rows),
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
    objective = scores_of(record.objective)
    return spec.metric or objective.METRIC, objective.SLICE_METRIC


def _epoch_of(split: SplitSpec) -> str:
    """What identifies the drawn test rows; comparisons on the same rows share it."""
    return digest([split.by, round(split.test, 9), split.salt, split.gap])


def _with_answers(
    reference: Reference | None, candidate: ModelScores, rows: pa.Table
) -> Reference | None:
    """The reference with the candidate's answers to the first row of each content: how
    often it predicts each class, and of rows that lie evenly how sure it is, or the
    predicted numbers."""
    if reference is None or not candidate.finite or not len(candidate):
        return reference
    candidate = candidate.picked(firsts(rows.column("hash").to_pylist()))
    # evenly, as rows may lie in the order of their classes
    every_N = np.linspace(0, len(candidate) - 1, min(MOST_ROWS, len(candidate))).astype(int)
    update = dict[str, Any]()
    confidence_N = candidate.confidence()
    if confidence_N is not None:
        update["confidence"] = tuple(round(float(value), 4) for value in confidence_N[every_N])
        update["predicted"] = {part.label: part.predicted for part in candidate.classes()}
    values_N = candidate.numbers()
    if values_N is not None:
        update["inputs"] = {**reference.inputs, "value": tuple(values_N[every_N].tolist())}
    return reference.model_copy(update=update)


def _contenders(record: records.Scores, rows: pa.Table) -> tuple[ModelScores, ModelScores | None]:
    """Candidate and champion, if there is one, on these rows."""
    objective = scores_of(record.objective)
    candidate = objective.of(rows, "candidate", record.candidate)
    if not record.champion:
        return candidate, None
    return candidate, objective.of(rows, "champion", record.champion)


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
    candidate, champion = _contenders(record, rows)
    clusters_N = clusters_of(rows, spec.cluster)
    can_compare = (
        rows.num_rows >= _FEWEST_AUDITED
        and metric in candidate.metrics
        and not too_few_units(candidate, clusters_N, spec.cluster)
    )
    comparison = None
    champion_metrics = dict[str, float]()
    if champion is not None:
        champion_metrics = dict(champion.metrics)
        if can_compare and candidate.finite and champion.finite:
            comparison = compare(spec, metric, candidate, champion, clusters_N)
    return Audit(
        rows=rows.num_rows,
        metrics=dict(candidate.metrics),
        champion_metrics=champion_metrics,
        comparison=comparison,
    )


def candidate_scores(scores: Path, audit: float, salt: str) -> tuple[ModelScores, object]:
    """The candidate's scores on the rows that judge, of the folder `scores`, and the
    right answers: the classes and the label of each example, or into how many targets
    each text was cut."""
    record = records.Scores.read(scores / RECORD)
    rows = pq.read_table(scores / TABLE)
    rows = rows.filter(pa.array(~_aside(rows, audit, salt)))
    candidate = scores_of(record.objective).of(rows, "candidate", record.candidate)
    if KINDS[record.objective].writes:
        return candidate, rows.column("candidate").combine_chunks().field("targets").to_pylist()
    return candidate, (record.candidate.labels, rows.column("label").to_pylist())


def _classes(candidate: ModelScores, champion: ModelScores | None) -> tuple[ClassResult, ...]:
    """The candidate's result for each class, with the champion's F1."""
    champion_f1 = dict[str, float | None]()
    if champion is not None:
        champion_f1 = {part.label: part.f1 for part in champion.classes()}
    results = []
    for part in candidate.classes():
        update = {"champion_f1": champion_f1.get(part.label)}
        results.append(part.model_copy(update=update))
    return tuple(results)


def _slices(
    spec: GateSpec,
    metric: str,
    rows: pa.Table,
    columns: Sequence[str],
    candidate: ModelScores,
    champion: ModelScores | None,
    clusters_N: Ints | None,
) -> list[Slice]:
    """Metrics for each value of each slice column, in order of column and value."""
    slices = []
    for column in columns:
        values: list[object] = rows.column("slices").combine_chunks().field(column).to_pylist()
        names_N = np.array(["" if value is None else str(value) for value in values])
        for name in sorted(set(names_N)):
            pick_N = names_N == name
            candidate_part = candidate.picked(pick_N)
            part = Slice(
                column=column,
                value=name,
                rows=int(pick_N.sum()),
                candidate=candidate_part.metrics,
            )
            if champion is not None:
                picked_clusters = None
                if clusters_N is not None:
                    picked_clusters = np.unique(clusters_N[pick_N], return_inverse=True)[1]
                champion_part = champion.picked(pick_N)
                part = _against(spec, metric, part, candidate_part, champion_part, picked_clusters)
            slices.append(part)
    return slices


def _against(
    spec: GateSpec,
    metric: str,
    part: Slice,
    candidate: ModelScores,
    champion: ModelScores,
    clusters_N: Ints | None,
) -> Slice:
    """The slice with what the champion reaches, and how often a model as good as the
    champion would seem as bad as the candidate."""
    update = dict[str, Any](champion=champion.metrics)
    have_metric = metric in candidate.metrics and metric in champion.metrics
    if too_few_units(candidate, clusters_N, spec.cluster):
        update["p_value"] = 1.0  # so few rows refuse no candidate
    elif candidate.finite and champion.finite and have_metric:
        bounds = bounds_of(spec, metric, candidate, champion, clusters_N)
        update["p_value"] = bounds.chance_of_loss()
        update["detectable"] = bounds.detectable(1 - spec.confidence)
    return part.model_copy(update=update)


def _must_pass_checks(spec: EvaluateSpec, record: records.Scores, scores: Path) -> list[Check]:
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
    # a text has one label, a row of words one for each
    expected_W = label
    if isinstance(label, str):
        expected_W = [label]
    logits_WC = np.array(logits, np.float64).reshape(len(expected_W), -1)
    # a word that was cut off has the same logits for all tags
    is_known_W = np.isfinite(logits_WC).all(1) & (logits_WC.max(1) != logits_WC.min(1))
    picks_W = logits_WC.argmax(1)
    for expected, pick, is_known in zip(expected_W, picks_W, is_known_W, strict=True):
        predicted = classes[pick] if is_known else "–"
        if predicted != expected:
            return expected, predicted
    return None
