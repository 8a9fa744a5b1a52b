"""Score the candidate, and the champion on the same rows, and write down why it may or may not be
promoted.

Both read the raw examples, because each encodes them with its own tokenizer. Rows that either
contender was trained on are left out for both, and texts that hold no target for one of them; they
are counted. Models with different tokenizers are compared in bits per byte of text, which does not
depend on how the text is cut. Shapes: N examples, C classes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rekindle.data.examples import open_examples
from rekindle.errors import DataError
from rekindle.evaluate import metrics, tokens
from rekindle.evaluate.gate import Verdict, judge
from rekindle.evaluate.metrics import Floats, Ints
from rekindle.evaluate.scores import ClassScores, TokenScores
from rekindle.launch.events import emit
from rekindle.records import Check, Evidence, Slice
from rekindle.spec.model import EvaluateSpec
from rekindle.train.modelfolder import ModelFolder, hash_prefixes, open_model

BATCH = 64
TEST = "test"


@dataclasses.dataclass(frozen=True)
class Contest:
    """The contenders' scores on the same `rows`; `metric` compares them, `slice_metric` on slices.
    `theirs` is None where there is no champion, or where `refusal` says why there is no contest."""

    rows: pa.Table
    ours: ClassScores | TokenScores
    theirs: ClassScores | TokenScores | None
    metric: str
    slice_metric: str
    refusal: Verdict | None = None


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
    unseen = _unseen(everything, [model for model in (candidate, champion) if model])
    of_tokens = candidate.task.objective == "tokens"
    contest = (_of_tokens if of_tokens else _of_classes)(spec, candidate, champion, unseen)
    rows, ours, theirs = contest.rows, contest.ours, contest.theirs
    slices = _slices(rows, slice_columns, ours, theirs)
    verdict = contest.refusal or judge(
        spec, contest.metric, ours, theirs, slices, contest.slice_metric
    )
    classes = ours if isinstance(ours, ClassScores) else None
    return Evidence(
        run_key=candidate.run_key,
        promote=verdict.promote,
        reason=verdict.reason,
        checks=verdict.checks,
        metrics=dict(ours.metrics) if len(ours) else {},
        champion_version=champion_version,
        champion_metrics=dict(theirs.metrics) if theirs and len(theirs) else {},
        comparison=verdict.comparison,
        labels=candidate.labels,
        confusion=_confusion(classes) if classes else (),
        calibration=metrics.calibration_bins(classes.probabilities_NC, classes.labels_N)
        if classes
        else (),
        slices=tuple(slices),
        samples=tokens.samples(candidate, rows) if of_tokens else (),
        rows=len(rows),
        excluded=len(everything) - len(rows),
        examples=hashlib.sha256(b"".join(rows.column("hash").to_pylist())).hexdigest(),
    )


def _of_classes(
    spec: EvaluateSpec, candidate: ModelFolder, champion: ModelFolder | None, rows: pa.Table
) -> Contest:
    labels_N = _class_indices(rows, candidate.labels)
    metric = spec.gate.metric or "accuracy"
    ours = ClassScores(predict(candidate, rows, "candidate"), labels_N)
    if champion is None:
        return Contest(rows, ours, None, metric, "accuracy")
    if champion.labels != candidate.labels:
        refusal = _incomparable(
            "same_classes",
            f"the champion knows the classes {list(champion.labels)}, the candidate "
            f"{list(candidate.labels)}: they cannot be compared",
        )
        return Contest(rows, ours, None, metric, "accuracy", refusal)
    theirs = ClassScores(predict(champion, rows, "champion"), labels_N)
    return Contest(rows, ours, theirs, metric, "accuracy")


def _of_tokens(
    spec: EvaluateSpec, candidate: ModelFolder, champion: ModelFolder | None, rows: pa.Table
) -> Contest:
    refusal = None
    if champion is not None and champion.task.objective != "tokens":
        refusal = _incomparable("same_task", "the champion is no language model")
        champion = None
    cut = [tokens.encode(model, rows) for model in (candidate, champion) if model]
    keep = np.ones(len(rows), bool)
    for table in cut:
        keep &= np.asarray(table.column("input_ids").is_valid(), bool)
    rows, cut = rows.filter(pa.array(keep)), [table.filter(pa.array(keep)) for table in cut]
    same = all(_same_targets(table, cut[0]) for table in cut)
    metric = (spec.gate.metric or "log_loss") if same else "bits_per_byte"
    slice_metric = "log_loss" if same else "bits_per_byte"
    ours = tokens.score(candidate, cut[0], "candidate")
    theirs = tokens.score(champion, cut[1], "champion") if champion is not None else None
    return Contest(rows, ours, theirs, metric, slice_metric, refusal)


def _same_targets(one: pa.Table, other: pa.Table) -> bool:
    """Whether both have the same tokens, and the same of them to predict."""
    names = ["input_ids", "supervised"]
    return bool(one.select(names).combine_chunks().equals(other.select(names).combine_chunks()))


@torch.inference_mode()
def predict(model: ModelFolder, rows: pa.Table, who: str) -> Floats:
    """[N, C] probabilities for examples; batched by length so that little is spent on padding."""
    if not len(rows):
        return np.zeros((0, len(model.labels)))
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


def _incomparable(name: str, detail: str) -> Verdict:
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
        values_N = np.array(["" if v is None else str(v) for v in rows.column(column).to_pylist()])
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
