"""Score the candidate, and the champion on the same rows, and write down why it may or may not be
promoted.

Both read the raw examples, because each encodes them with its own tokenizer. Rows that either
contender was trained on are left out for both, and counted. Shapes: N examples, C classes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rekindle.data.examples import open_examples
from rekindle.errors import DataError
from rekindle.evaluate import metrics
from rekindle.evaluate.gate import Scored, Verdict, judge
from rekindle.evaluate.metrics import Floats, Ints
from rekindle.launch.events import emit
from rekindle.records import Check, Evidence, Slice
from rekindle.spec.model import EvaluateSpec
from rekindle.train.modelfolder import ModelFolder, hash_prefixes, open_model

BATCH = 64
TEST = "test"


def evaluate(
    spec: EvaluateSpec,
    slice_columns: Sequence[str],
    candidate_folder: Path,
    examples_folder: Path,
    champion_folder: Path | None,
    champion_version: str,
) -> Evidence:
    """The evidence on the model in `candidate_folder`, judged on the test split of the examples."""
    candidate = open_model(candidate_folder)
    champion = open_model(champion_folder) if champion_folder else None
    everything = pa.Table.from_batches(list(open_examples(examples_folder, TEST)))
    rows = _unseen(everything, [model for model in (candidate, champion) if model])
    labels_N = _class_indices(rows, candidate.labels)
    ours = _scored(candidate, rows, labels_N, "candidate")
    theirs, refusal = None, None
    if champion is not None and champion.labels != candidate.labels:
        refusal = _incomparable(champion, candidate)
    elif champion is not None:
        theirs = _scored(champion, rows, labels_N, "champion")
    slices = _slices(rows, slice_columns, labels_N, ours, theirs)
    verdict = refusal or judge(spec, labels_N, ours, theirs, slices)
    counts = metrics.confusion(ours.probabilities_NC, labels_N)
    return Evidence(
        run_key=candidate.run_key,
        promote=verdict.promote,
        reason=verdict.reason,
        checks=verdict.checks,
        metrics=dict(ours.metrics),
        champion_version=champion_version,
        champion_metrics=dict(theirs.metrics) if theirs else {},
        comparison=verdict.comparison,
        labels=candidate.labels,
        confusion=tuple(tuple(int(n) for n in row) for row in counts),
        calibration=metrics.calibration_bins(ours.probabilities_NC, labels_N),
        slices=tuple(slices),
        rows=len(rows),
        excluded=len(everything) - len(rows),
        examples=hashlib.sha256(b"".join(rows.column("hash").to_pylist())).hexdigest(),
    )


@torch.inference_mode()
def predict(model: ModelFolder, rows: pa.Table, who: str) -> Floats:
    """[N, C] probabilities for examples; batched by length so that little is spent on padding."""
    network = model.network()
    encoded = pa.table(model.task.encode(_one_batch(rows), model.settings, model.path))
    order_N = np.arange(len(rows))
    if "input_ids" in encoded.column_names:
        order_N = np.argsort(
            pc.list_value_length(encoded.column("input_ids")).to_numpy(), kind="stable"
        )
    result_NC = np.zeros((len(rows), len(model.labels)), np.float64)
    for start in range(0, len(rows), BATCH):
        part = order_N[start : start + BATCH]
        inputs = model.task.collate(encoded.take(pa.array(part)), model.settings)
        result_NC[part] = torch.softmax(model.task.logits(network, inputs).double(), -1).numpy()
        emit("progress", step=start + len(part), steps=len(rows), unit=f"{who}: example")
    return result_NC


def _one_batch(rows: pa.Table) -> pa.RecordBatch:
    batches = rows.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)


def _scored(model: ModelFolder, rows: pa.Table, labels_N: Ints, who: str) -> Scored:
    if len(rows) == 0:
        return Scored(np.zeros((0, len(model.labels))), {})
    probabilities_NC = predict(model, rows, who)
    return Scored(probabilities_NC, metrics.score(probabilities_NC, labels_N))


def _unseen(rows: pa.Table, models: Sequence[ModelFolder]) -> pa.Table:
    """The rows that none of `models` was trained on."""
    prefixes_N = hash_prefixes(rows.column("hash").to_pylist())
    seen_N = np.zeros(len(rows), bool)
    for model in models:
        seen_N |= np.isin(prefixes_N, model.trained_on())
    return rows.filter(pa.array(~seen_N))


def _class_indices(rows: pa.Table, labels: tuple[str, ...]) -> Ints:
    index = pc.index_in(rows.column("label").combine_chunks(), pa.array(labels, pa.string()))
    if index.null_count:
        unknown = sorted(set(rows.column("label").to_pylist()) - set(labels))
        raise DataError(
            f"the test split holds labels that the model does not know: {unknown[:5]}",
            where="data", fix="list all classes in data.labels, or use more training data",
        )  # fmt: skip
    return np.asarray(index.to_numpy(zero_copy_only=False), np.int64)


def _incomparable(champion: ModelFolder, candidate: ModelFolder) -> Verdict:
    detail = (
        f"the champion knows the classes {list(champion.labels)}, the candidate "
        f"{list(candidate.labels)}: they cannot be compared"
    )
    return Verdict(False, detail, (Check(name="same_classes", passed=False, detail=detail),), None)


def _slices(
    rows: pa.Table, columns: Sequence[str], labels_N: Ints, ours: Scored, theirs: Scored | None
) -> list[Slice]:
    """Metrics for each value of each slice column, in order of column and value."""
    result = []
    for column in columns:
        values_N = np.array(["" if v is None else str(v) for v in rows.column(column).to_pylist()])
        for value in sorted(set(values_N)):
            pick = values_N == value
            champion = (
                metrics.score(theirs.probabilities_NC[pick], labels_N[pick]) if theirs else {}
            )
            result.append(
                Slice(
                    column=column, value=value, rows=int(pick.sum()),
                    candidate=metrics.score(ours.probabilities_NC[pick], labels_N[pick]),
                    champion=champion,
                )
            )  # fmt: skip
    return result
