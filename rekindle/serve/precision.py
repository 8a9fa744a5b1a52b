"""A lower precision than that of training, where the model's own test split allows it.

The model answers the test split in both, in this process. What is lost of the share of right labels
(of words, where each has a tag) may not be more than is allowed; of a language model it is the
share by which the mean loss of a token grows. The rows that a server proves itself by are then
those of the evidence, with their answers in that precision."""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn import functional as F

from rekindle.data.examples import open_examples
from rekindle.errors import RequestError
from rekindle.records import Check, Evidence, Smoke, SmokeRow
from rekindle.serve.inputs import Inputs
from rekindle.serve.load import answering
from rekindle.serve.messages import ServedModel
from rekindle.serve.smoke import instance_of
from rekindle.serve.work import Model, Options, RefusedError
from rekindle.serve.writer import Writer
from rekindle.train.modelfolder import ModelFolder, open_model
from rekindle.train.pieces import HALF, SURE_CHARACTERS, TEST

log = logging.getLogger(__name__)


def lowered(
    model: ServedModel, precision: str, examples: Path | None, most_loss: float, folder: Path
) -> ServedModel:
    """The version in `precision` (bf16, int8), with evidence in `folder` that says what it loses on
    the test split in the folder `examples`; measured once. Raises RequestError where that is more
    than `most_loss`, or cannot be measured."""
    file = folder / f"{model.digest[:16]}-{precision}.json"
    if not file.is_file():
        evidence = Evidence.read(model.evidence) if model.evidence else None
        if evidence is None or examples is None or not examples.is_dir():
            what = f"the test split that judged version {model.version} is not on this machine"
            fix = "train it here again, or serve it in the precision that it was judged in"
            raise RequestError(what, where="deploy.precision", fix=fix)
        folder.mkdir(parents=True, exist_ok=True)
        _measured(model, precision, examples, evidence).write(file)
    check = Evidence.read(file).checks[-1]
    log.info("%s", check.detail)
    if not (check.value is not None and check.value <= most_loss):
        what = f"{check.detail}; {most_loss:.2%} may be lost"
        fix = "leave deploy.precision out, or raise deploy.max_precision_loss"
        raise RequestError(what, where="deploy.precision", fix=fix)
    return dataclasses.replace(model, precision=precision, evidence=str(file))


def _measured(model: ServedModel, precision: str, examples: Path, evidence: Evidence) -> Evidence:
    opened, cpu = open_model(Path(model.path), model.code), torch.device("cpu")
    both = [answering(opened, cpu, one) for one in ("", precision)]
    measure = _of_tokens if isinstance(both[0], Writer) else _of_labels
    count, detail, loss, seconds = measure(opened, both, precision, examples)
    detail = f"{detail}, in {seconds[1] / max(seconds[0], 1e-9):.2f} of the time"
    value = loss if math.isfinite(loss) else None
    check = Check(name=f"precision_{precision}", passed=count > 0, detail=detail, value=value)
    smoke = evidence.smoke and _proof(model, opened, both[1], evidence.smoke)
    return evidence.model_copy(update={"checks": (*evidence.checks, check), "smoke": smoke})


def _of_labels(
    opened: ModelFolder, both: Sequence[Any], precision: str, examples: Path
) -> tuple[int, str, float, list[float]]:
    """How many labels were answered, how well in words, the share of right ones that is lost, and
    the seconds before and after."""
    seconds, right, rows, same = [0.0, 0.0], [0, 0], 0, 0
    for contents, labels in _batches(opened, examples):
        decisions = []
        for i, network in enumerate(both):
            began = time.perf_counter()
            answers = network.answers(contents, Options())
            seconds[i] += time.perf_counter() - began
            decided = map(_decided, answers, labels)
            decisions.append([decision for found in decided for decision in found])
        wanted = [label for each in labels for label in each]
        right = [n + _agreeing(found, wanted) for n, found in zip(right, decisions, strict=True)]
        rows, same = rows + len(wanted), same + _agreeing(*decisions)
    before, now, kept = (count / max(rows, 1) for count in (*right, same))
    detail = f"{precision} answers {now:.2%} of {rows:,} held-out labels rightly, before it was "
    detail += f"{before:.2%}; {kept:.2%} are the same"
    return rows, detail, (right[0] - right[1]) / max(rows, 1), seconds


@torch.inference_mode()
def _of_tokens(
    opened: ModelFolder, both: Sequence[Any], precision: str, examples: Path
) -> tuple[int, str, float, list[float]]:
    """The same of the tokens that texts go on with: what is lost is the share by which their mean
    loss grows."""
    seconds, nats, count = [0.0, 0.0], [0.0, 0.0], 0
    for batch in open_examples(examples, TEST, "document"):
        rows = pa.table(opened.task.encode(batch, opened.settings, opened.path))
        rows = rows.filter(pc.is_valid(rows.column("input_ids")))
        for i in range(len(rows)):  # one at a time, as scores of a large vocabulary take memory
            inputs = opened.task.collate(rows.slice(i, 1), opened.settings)
            labels_BT = inputs.pop("labels")
            for at, writer in enumerate(both):
                began = time.perf_counter()
                logits_BTV = opened.task.logits(writer.network, inputs)
                seconds[at] += time.perf_counter() - began
                nats[at] += float(F.cross_entropy(logits_BTV.mT, labels_BT, reduction="sum"))
            count += int((labels_BT >= 0).sum())
    before, after = (total / max(count, 1) for total in nats)
    loss = after / max(before, 1e-9) - 1
    detail = f"{precision} has a loss of {after:.4f} on {count:,} held-out tokens, before it was "
    return count, f"{detail}{before:.4f} ({loss:+.2%})", loss, seconds


def _batches(opened: ModelFolder, examples: Path) -> Iterator[tuple[list[Any], list[list[str]]]]:
    """Contents, and the labels of each: one, or one a word."""
    modality, shape = opened.task.modality, opened.settings.get("image_shape")
    for batch in open_examples(examples, TEST, "label", modality):
        contents, labels = (batch.column(name).to_pylist() for name in (modality, "label"))
        if modality == "image":
            contents = [np.frombuffer(one, np.uint8).reshape(shape) for one in contents]
        if modality == "words":
            yield [json.loads(one) if isinstance(one, str) else one for one in contents], labels
        else:
            yield contents, [[label] for label in labels]


def _decided(answer: Any, labels: list[str]) -> list[str | None]:
    if isinstance(answer, RefusedError):
        return [None] * len(labels)
    return list(answer["tags"]) if "tags" in answer else [answer["label"]]


def _agreeing(found: list[str | None], wanted: Sequence[str | None]) -> int:
    return sum(x == y for x, y in zip(found, wanted, strict=True))


def _proof(model: ServedModel, opened: ModelFolder, network: Model, kept: Smoke) -> Smoke:
    """The rows with what the model answers now, where that is clear; texts as far as it is."""
    inputs, tolerance = Inputs.of(model, opened), max(kept.tolerance, HALF)
    contents = [inputs.content(instance_of(row, inputs), row.id) for row in kept.rows]
    rows, clear = list[SmokeRow](), list[SmokeRow]()
    options = Options(max_new_tokens=kept.tokens) if kept.tokens else Options()
    for row, answer in zip(kept.rows, network.answers(contents, options), strict=True):
        if "text" in row.answer:
            sure = row.answer["text"][:SURE_CHARACTERS]
            now = row.model_copy(update={"answer": {"text": sure}})
            rows += [now] * answer["text"].startswith(sure)
            continue
        tops = answer.get("probabilities") or [answer.get("probability")]
        now = row.model_copy(update={"answer": {name: answer[name] for name in row.answer}})
        same = all(answer[name] == row.answer[name] for name in {"label", "tags"} & answer.keys())
        rows += [now] * same
        clear += [now] * (same and all(top and top > 0.5 + tolerance for top in tops))
    rows = clear or rows  # other processors round otherwise
    if not rows:
        what = f"none of the rows that prove version {model.version} is answered alike"
        raise RequestError(what, where="deploy.precision", fix="leave it out")
    return kept.model_copy(update={"tolerance": tolerance, "rows": tuple(rows)})
