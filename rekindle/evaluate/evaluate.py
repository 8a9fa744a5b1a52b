"""From what candidate and champion scored on the same examples to the evidence: why the candidate
may or may not be promoted.

A pure function of the files that the step `score` left (records.Scores says what is in them): no
model is loaded here. Models with different tokenizers are compared in bits per byte of text, which
does not depend on how the text is cut. Shapes: N examples, C classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rekindle import records
from rekindle.errors import DataError
from rekindle.evaluate import metrics
from rekindle.evaluate.gate import Verdict, judge
from rekindle.evaluate.metrics import Floats, Ints
from rekindle.evaluate.scores import ClassScores, TokenScores
from rekindle.records import Check, Contender, Evidence, Slice
from rekindle.spec.model import EvaluateSpec

TABLE, RECORD = "scores.parquet", "scores.json"


def evaluate(spec: EvaluateSpec, slice_columns: Sequence[str], scores: Path) -> Evidence:
    """The evidence on the candidate whose scores lie in the folder `scores`."""
    record, rows = records.Scores.read(scores / RECORD), pq.read_table(scores / TABLE)
    read = _of_tokens if record.objective == "tokens" else _of_classes
    ours = read(rows, "candidate", record.candidate)
    theirs = read(rows, "champion", record.champion) if record.champion else None
    metric, slice_metric = _metrics(spec, record)
    slices = _slices(rows, slice_columns, ours, theirs)
    refusal = _refusal(record)
    verdict = (
        _refused(*refusal) if refusal else judge(spec, metric, ours, theirs, slices, slice_metric)
    )
    classes = ours if isinstance(ours, ClassScores) else None
    return Evidence(
        run_key=record.candidate.run_key,
        model_digest=record.candidate.digest,
        promote=verdict.promote,
        reason=verdict.reason,
        checks=verdict.checks,
        metrics=dict(ours.metrics) if len(ours) else {},
        champion_version=record.champion_version,
        champion_digest=record.champion_digest,
        champion_metrics=dict(theirs.metrics) if theirs and len(theirs) else {},
        comparison=verdict.comparison,
        labels=record.candidate.labels,
        confusion=_confusion(classes) if classes else (),
        calibration=metrics.calibration_bins(classes.probabilities_NC, classes.labels_N)
        if classes
        else (),
        slices=tuple(slices),
        samples=record.samples,
        rows=record.rows,
        excluded=record.excluded,
        examples=record.examples,
    )


def _metrics(spec: EvaluateSpec, record: records.Scores) -> tuple[str, str]:
    """What the contenders are compared in, and what on slices."""
    if record.objective == "classes":
        return spec.gate.metric or "accuracy", "accuracy"
    if record.same_targets:
        return spec.gate.metric or "log_loss", "log_loss"
    return "bits_per_byte", "bits_per_byte"


def _of_classes(rows: pa.Table, who: str, contender: Contender) -> ClassScores:
    labels_N = _class_indices(rows, contender.labels)
    if not len(rows):
        return ClassScores(np.zeros((0, len(contender.labels))), labels_N)
    logits = rows.column(who).combine_chunks().field("logits").flatten()
    return ClassScores(_softmax(np.asarray(logits, np.float64).reshape(len(rows), -1)), labels_N)


def _of_tokens(rows: pa.Table, who: str, contender: Contender) -> TokenScores:
    assert contender.unigram_nats is not None

    def sums(name: str) -> Floats:
        if not len(rows):
            return np.zeros(0)
        return np.asarray(rows.column(who).combine_chunks().field(name), np.float64)

    return TokenScores(
        sums("nats"), sums("right"), sums("targets"), sums("target_bytes"), contender.unigram_nats
    )


def _softmax(logits_NC: Floats) -> Floats:
    powers_NC: Floats = np.exp(logits_NC - logits_NC.max(1, keepdims=True))
    shares_NC: Floats = powers_NC / powers_NC.sum(1, keepdims=True)
    return shares_NC


def _class_indices(rows: pa.Table, labels: tuple[str, ...]) -> Ints:
    index = pc.index_in(rows.column("label").combine_chunks(), pa.array(labels, pa.string()))
    if index.null_count:
        unknown = sorted(set(rows.column("label").to_pylist()) - set(labels))
        raise DataError(
            f"the test split holds labels that the model does not know: {unknown[:5]}",
            where="data", fix="list all classes in data.labels, or use more training data",
        )  # fmt: skip
    return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)


def _refusal(record: records.Scores) -> tuple[str, str] | None:
    """Why the candidate cannot be judged: the name of a check, and a sentence."""
    if record.champion_version and not record.champion and not record.incomparable:
        detail = f"the champion, version {record.champion_version}, was not scored"
        return "champion_scored", f"{detail}; run the step `score` again"
    return record.incomparable


def _refused(name: str, detail: str) -> Verdict:
    return Verdict(False, detail, (Check(name=name, passed=False, detail=detail),), None)


def _confusion(scores: ClassScores) -> tuple[tuple[int, ...], ...]:
    counts = metrics.confusion(scores.probabilities_NC, scores.labels_N)
    return tuple(tuple(int(n) for n in row) for row in counts)


def _slices(
    rows: pa.Table,
    columns: Sequence[str],
    ours: ClassScores | TokenScores,
    theirs: ClassScores | TokenScores | None,
) -> list[Slice]:
    """Metrics for each value of each slice column, in order of column and value."""
    result = []
    for column in columns:
        found: list[Any] = rows.column("slices").combine_chunks().field(column).to_pylist()
        values_N = np.array(["" if value is None else str(value) for value in found])
        for value in sorted(set(values_N)):
            pick = values_N == value
            result.append(
                Slice(
                    column=column, value=value, rows=int(pick.sum()),
                    candidate=ours.of(pick).metrics,
                    champion=theirs.of(pick).metrics if theirs else {},
                )
            )  # fmt: skip
    return result
