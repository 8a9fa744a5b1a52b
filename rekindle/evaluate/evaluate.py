"""From what candidate and champion scored on the same examples to the evidence: why the candidate
may or may not be promoted.

A pure function of the files that the step `score` left (records.Scores says what is in them): no
model is loaded here. Models with different tokenizers are compared in bits per byte of text, which
does not depend on how the text is cut. Shapes: N examples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rekindle import records
from rekindle.evaluate.gate import judge, refused
from rekindle.evaluate.scores import SCORES, Scores
from rekindle.records import ClassResult, Evidence, Slice
from rekindle.spec.model import EvaluateSpec

TABLE, RECORD = "scores.parquet", "scores.json"


def evaluate(spec: EvaluateSpec, slice_columns: Sequence[str], scores: Path) -> Evidence:
    """The evidence on the candidate whose scores lie in the folder `scores`."""
    record, rows = records.Scores.read(scores / RECORD), pq.read_table(scores / TABLE)
    kind = SCORES[record.objective]
    ours = kind.of(rows, "candidate", record.candidate)
    theirs = kind.of(rows, "champion", record.champion) if record.champion else None
    # what the contenders are compared in, and what on slices
    metric, slice_metric = spec.gate.metric or kind.METRIC, kind.SLICE_METRIC
    if not record.same_targets:
        metric = slice_metric = "bits_per_byte"
    slices = _slices(rows, slice_columns, ours, theirs)
    if record.champion_version and not record.champion and not record.incomparable:
        detail = f"the champion, version {record.champion_version}, was not scored"
        verdict = refused("champion_scored", f"{detail}; run the step `score` again")
    elif record.incomparable:
        verdict = refused(*record.incomparable)
    else:
        verdict = judge(spec, metric, ours, theirs, slices, slice_metric)
    told = ("champion_version", "champion_digest", "samples", "smoke", "rows", "excluded",
            "examples")  # fmt: skip
    return Evidence(
        run_key=record.candidate.run_key, model_digest=record.candidate.digest,
        metrics=dict(ours.metrics), champion_metrics=dict(theirs.metrics) if theirs else {},
        labels=record.candidate.labels, confusion=ours.confusion(), classes=_classes(ours, theirs),
        calibration=ours.calibration(), slices=tuple(slices), **vars(verdict),
        **{name: getattr(record, name) for name in told},
    )  # fmt: skip


def candidate_scores(scores: Path) -> tuple[Scores, Any]:
    """What the candidate scored, of the folder `scores`, and what was right: the classes and the
    label of each example, or into how many targets each text was cut."""
    record, rows = records.Scores.read(scores / RECORD), pq.read_table(scores / TABLE)
    ours = SCORES[record.objective].of(rows, "candidate", record.candidate)
    if record.objective == "tokens":
        return ours, rows.column("candidate").combine_chunks().field("targets").to_pylist()
    return ours, (record.candidate.labels, rows.column("label").to_pylist())


def _classes(ours: Scores, theirs: Scores | None) -> tuple[ClassResult, ...]:
    """The candidate's results with the champion's beside them."""
    known = {part.label: part.f1 for part in theirs.classes()} if theirs else {}
    found = ((part, {"champion_f1": known.get(part.label)}) for part in ours.classes())
    return tuple(part.model_copy(update=update) for part, update in found)


def _slices(
    rows: pa.Table, columns: Sequence[str], ours: Scores, theirs: Scores | None
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
                    candidate=ours.picked(pick).metrics,
                    champion=theirs.picked(pick).metrics if theirs else {},
                )
            )  # fmt: skip
    return result
