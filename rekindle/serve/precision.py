"""A lower precision than that of training, where the model's own test split allows it.

The model answers the test split in both, in this process. What is lost of the share of
right labels (of words, where each has a tag) may not be more than is allowed; of a
language model it is the share by which the mean loss of a token grows. The rows that a
server proves itself by are then those of the evidence, with their answers in that
precision."""

import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn import functional as F

from rekindle.data.examples import open_examples
from rekindle.errors import RequestError
from rekindle.modalities import load_modality
from rekindle.records import Check, Evidence, Smoke, SmokeRow
from rekindle.serve.inputs import Inputs
from rekindle.serve.load import model_for
from rekindle.serve.messages import ServedModel
from rekindle.serve.smoke import instance_of
from rekindle.serve.work import Answer, Model, RefusedError, WritingOptions
from rekindle.serve.writer import Writer
from rekindle.train.modelfolder import ModelFolder, open_model
from rekindle.train.pieces import HALF, SURE_CHARACTERS, TEST

log = logging.getLogger(__name__)


def lowered(
    model: ServedModel, precision: str, examples: Path | None, most_loss: float, folder: Path
) -> ServedModel:
    """The version in `precision` (bf16, int8), with evidence in `folder` that says what
    it loses on the test split in the folder `examples`; measured once. Raises
    RequestError where that is more than `most_loss`, or cannot be measured."""
    file = folder / f"{model.digest[:16]}-{precision}.json"
    if not file.is_file():
        evidence = Evidence.read(model.evidence) if model.evidence else None
        if evidence is None or examples is None or not examples.is_dir():
            message = f"the test split that judged version {model.version} is not on this machine"
            fix = "train it here again, or serve it in the precision that it was judged in"
            raise RequestError(message, where="deploy.precision", fix=fix)
        folder.mkdir(parents=True, exist_ok=True)
        _measure(model, precision, examples, evidence).write(file)
    check = Evidence.read(file).checks[-1]
    log.info("%s", check.detail)
    if check.value is None or check.value > most_loss:  # None: the loss is not finite
        message = f"{check.detail}; {most_loss:.2%} may be lost"
        fix = "leave deploy.precision out, or raise deploy.max_precision_loss"
        raise RequestError(message, where="deploy.precision", fix=fix)
    return dataclasses.replace(model, precision=precision, evidence=str(file))


@dataclasses.dataclass(frozen=True)
class _Loss:
    """What a precision loses: `count` labels or tokens were compared, `loss` is the share
    that is lost, `detail` says so in words; seconds before and in the precision."""

    count: int
    detail: str
    loss: float
    seconds_before: float
    seconds: float


def _measure(model: ServedModel, precision: str, examples: Path, evidence: Evidence) -> Evidence:
    opened = open_model(Path(model.path), model.code)
    # both on the CPU, where int8 computes: else the times could not be compared
    cpu = torch.device("cpu")
    before = model_for(opened, cpu, "")
    lower = model_for(opened, cpu, precision)
    if isinstance(before, Writer) and isinstance(lower, Writer):
        loss = _loss_of_tokens(opened, before, lower, precision, examples)
    else:
        loss = _loss_of_labels(opened, before, lower, precision, examples)
    check = Check(
        name=f"precision_{precision}",
        passed=loss.count > 0,
        detail=f"{loss.detail}, in {loss.seconds / max(loss.seconds_before, 1e-9):.2f} of the time",
        value=loss.loss if math.isfinite(loss.loss) else None,
    )
    # the rows that prove it hold the answers of the precision, too
    smoke = evidence.smoke and _proof(model, opened, lower, evidence.smoke)
    return evidence.model_copy(update={"checks": (*evidence.checks, check), "smoke": smoke})


def _loss_of_labels(
    opened: ModelFolder, before: Model, lower: Model, precision: str, examples: Path
) -> _Loss:
    """What is lost of the share of right labels."""
    labels = list[str]()
    labels_before = list[str | None]()
    labels_now = list[str | None]()
    seconds_before = 0.0
    seconds = 0.0
    for contents, labels_of in _batches(opened, examples):
        began = time.perf_counter()
        answers_before = before.answers(contents, WritingOptions())
        answered = time.perf_counter()
        answers = lower.answers(contents, WritingOptions())
        seconds_before += answered - began
        seconds += time.perf_counter() - answered
        for row_labels, answer_before, answer in zip(
            labels_of, answers_before, answers, strict=True
        ):
            labels += row_labels
            labels_before += _labels_in(answer_before, len(row_labels))
            labels_now += _labels_in(answer, len(row_labels))
    rows = len(labels)
    right_before = _agreement(labels_before, labels)
    right_now = _agreement(labels_now, labels)
    same = _agreement(labels_before, labels_now)
    trials = max(rows, 1)
    detail = f"{precision} answers {right_now / trials:.2%} of {rows:,} held-out labels rightly, "
    detail += f"before it was {right_before / trials:.2%}; {same / trials:.2%} are the same"
    loss = (right_before - right_now) / trials
    return _Loss(rows, detail, loss, seconds_before, seconds)


@torch.inference_mode()
def _loss_of_tokens(
    opened: ModelFolder, before: Writer, lower: Writer, precision: str, examples: Path
) -> _Loss:
    """The share by which the mean loss of the tokens that texts go on with grows."""
    seconds = [0.0, 0.0]
    nats = [0.0, 0.0]
    count = 0
    for batch in open_examples(examples, TEST, opened.task.modality):
        rows = pa.table(opened.task.encode(batch, opened.settings, opened.path))
        rows = rows.filter(pc.is_valid(rows.column("input_ids")))
        for i in range(len(rows)):  # one at a time, as scores of a large vocabulary take memory
            inputs = opened.task.collate(rows.slice(i, 1), opened.settings)
            labels_BT = inputs.pop("labels")
            for place, writer in enumerate((before, lower)):
                began = time.perf_counter()
                logits_BTV = opened.task.logits(writer.network, inputs)
                seconds[place] += time.perf_counter() - began
                nats[place] += float(F.cross_entropy(logits_BTV.mT, labels_BT, reduction="sum"))
            count += int((labels_BT >= 0).sum())  # others are padding and prompts
    mean_before = nats[0] / max(count, 1)
    mean_now = nats[1] / max(count, 1)
    loss = mean_now / max(mean_before, 1e-9) - 1
    detail = f"{precision} has a loss of {mean_now:.4f} on {count:,} held-out tokens, before it "
    detail += f"was {mean_before:.4f} ({loss:+.2%})"
    return _Loss(count, detail, loss, *seconds)


def _batches(opened: ModelFolder, examples: Path) -> Iterator[tuple[list[Any], list[list[str]]]]:
    """Contents, and the labels of each: one, or one a word."""
    modality = load_modality(opened.task.modality)
    name = modality.field.name
    shape = opened.settings.get("image_shape")
    for batch in open_examples(examples, TEST, "label", name):
        contents = [modality.content(stored, shape) for stored in batch.column(name).to_pylist()]
        labels = batch.column("label").to_pylist()
        labels_of_rows = []
        for label in labels:
            labels_of_rows.append(label if isinstance(label, list) else [label])
        yield contents, labels_of_rows


def _labels_in(answer: Answer, count: int) -> list[str | None]:
    """The labels in an answer; None for each of `count` where it was refused."""
    if isinstance(answer, RefusedError):
        return [None] * count
    if "tags" in answer:
        return list(answer["tags"])
    return [answer["label"]]


def _agreement(labels: Sequence[str | None], others: Sequence[str | None]) -> int:
    """How many labels are the same in both."""
    pairs = zip(labels, others, strict=True)
    return sum(1 for label, other in pairs if label == other)


def _proof(model: ServedModel, opened: ModelFolder, lower: Model, proof: Smoke) -> Smoke:
    """The rows with what the model answers now, where that is clear;
    the beginnings of texts."""
    inputs = Inputs.of(model, opened)
    tolerance = max(proof.tolerance, HALF)
    contents = [inputs.content(instance_of(row, inputs), row.id) for row in proof.rows]
    options = WritingOptions(max_new_tokens=proof.tokens) if proof.tokens else WritingOptions()
    rows = list[SmokeRow]()
    clear_rows = list[SmokeRow]()
    for row, answer in zip(proof.rows, lower.answers(contents, options), strict=True):
        if isinstance(answer, RefusedError):
            raise answer
        if "text" in row.answer:
            sure = row.answer["text"][:SURE_CHARACTERS]
            if answer["text"].startswith(sure):
                rows.append(row.model_copy(update={"answer": {"text": sure}}))
            continue
        decisions = {"label", "tags"} & answer.keys()
        if any(answer[name] != row.answer[name] for name in decisions):
            continue
        answer_now = {name: answer[name] for name in row.answer}
        row_now = row.model_copy(update={"answer": answer_now})
        rows.append(row_now)
        tops = answer.get("probabilities") or [answer.get("probability")]
        if all(top and top > 0.5 + tolerance for top in tops):
            clear_rows.append(row_now)
    rows = clear_rows or rows  # other processors round otherwise
    if not rows:
        message = f"none of the rows that prove version {model.version} is answered alike"
        raise RequestError(message, where="deploy.precision", fix="leave it out")
    return proof.model_copy(update={"tolerance": tolerance, "rows": tuple(rows)})
