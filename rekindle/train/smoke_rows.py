"""A few examples of the test split with what the candidate made of them, small enough to be kept
with the evidence: a server of the model has to answer them alike before it is ready.

Rows are taken in order, where the answer is clear: its probability is above the next one's by more
than rounding can change. Nothing here imports torch."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.examples import open_examples
from rekindle.records import Sample, Smoke, SmokeRow
from rekindle.train import pieces
from rekindle.train.modelfolder import ModelFolder, open_model
from rekindle.train.pieces import SAMPLE_TOKENS, TEST, ScoreJob

MOST_ROWS, MOST_CHARACTERS = 8, 256 << 10
_EXACT, HALF = 0.002, 0.05  # of a probability; TF32 of GPUs counts as fp32
_SURE_CHARACTERS = 8  # of a text that was written in half precision: later ones may differ


def smoke_of(job: ScoreJob, keep_N: np.ndarray, samples: tuple[Sample, ...]) -> Smoke | None:
    """The rows of the first piece that are fit among those that `keep_N` says decide; None if there
    are none. Of a language model the beginnings that it went on with, see `openings_of`."""
    tolerance = _EXACT if job.train.precision in ("fp32", "fp64") else HALF
    model = open_model(Path(job.candidate.folder), job.code)
    tokens = 0
    rows: Iterator[SmokeRow]
    if model.task.objective == "tokens":
        openings, tokens = pieces.openings_of(job)[1] if samples else [], SAMPLE_TOKENS
        sure = None if tolerance == _EXACT else _SURE_CHARACTERS
        rows = (
            SmokeRow(id=str(i), content=json.dumps(turns), answer={"text": sample.generated[:sure]})
            for i, ((turns, _), sample) in enumerate(zip(openings, samples, strict=True))
            if turns and turns[-1][0] != "assistant" and turns[-1][1].strip() and sample.generated
        )
    else:
        rows = _classified(job, model, keep_N, 2 * tolerance)
    chosen: list[SmokeRow] = []
    room = MOST_CHARACTERS
    for row in rows:
        if len(row.content) <= room:
            chosen.append(row)
            room -= len(row.content)
        if len(chosen) == MOST_ROWS:
            break
    return Smoke(tolerance=tolerance, tokens=tokens, rows=tuple(chosen)) if chosen else None


def _classified(
    job: ScoreJob, model: ModelFolder, keep_N: np.ndarray, margin: float
) -> Iterator[SmokeRow]:
    examples = open_examples(Path(job.examples), TEST)
    shape = model.settings.get("image_shape")
    if not len(examples) or (model.task.modality == "image" and shape is None):
        return
    rows, scored = pieces.read_piece(examples, 0), next(job.candidate.pieces.read(1, "logits"))
    for row in np.flatnonzero(keep_N[: len(rows)]).tolist():
        logits = np.asarray(scored.column(0)[row].values, np.float64)
        answer = _answer(logits.reshape(-1, len(model.labels)), model, margin)
        if answer is not None:
            content = rows.column(model.task.modality)[row]
            yield SmokeRow(id=rows.column("id")[row].as_py(), content=_text(content, shape),
                           answer=answer)  # fmt: skip


def _answer(logits_WC: np.ndarray, model: ModelFolder, margin: float) -> dict[str, Any] | None:
    """What the model says of one class, or of each word; None where it is not clear enough, a word
    was cut off, or a score is not a number."""
    odds_WC = np.exp(logits_WC - logits_WC.max(1, keepdims=True))
    odds_WC /= odds_WC.sum(1, keepdims=True)
    ordered_WC = np.sort(odds_WC)
    if not (ordered_WC[:, -1] - ordered_WC[:, -2] > margin).all():
        return None
    labels = [model.labels[i] for i in odds_WC.argmax(1)]
    tops = odds_WC.max(1).tolist()
    if model.task.objective == "tags":
        return {"tags": labels, "probabilities": tops}
    return {"label": labels[0], "probability": tops[0]}


def _text(content: pa.Scalar, shape: Any) -> str:
    """Texts and JSON as they are, pixels as base64 of a PNG."""
    value = content.as_py()
    if isinstance(value, str):
        return value
    from PIL import Image

    pixels = np.frombuffer(value, np.uint8).reshape(shape)
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
