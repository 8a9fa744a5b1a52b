"""Cross-entropy of a tag for each word, predicted at the word's first token, with label
smoothing and a teacher.

Texts share a sequence where attention can keep them apart. Shapes: B rows, T tokens of this
rank, N targets (words with a place), W words, C classes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from rekindle.objectives import loss as base
from rekindle.objectives.classes.loss import loss_of
from rekindle.objectives.columns import flattened
from rekindle.objectives.loss import (
    Alone,
    BatchContext,
    Columns,
    Loss,
    Place,
    ScoredModel,
    Scoring,
    Stage,
    Texts,
)
from rekindle.objectives.micro import Chosen, Ints, Micro, Tensors


class Tags(Loss, Scoring):
    """The cross-entropy of a tag for each word."""

    def prepare(self, stage: Stage) -> bool:
        return stage.keeps_texts_apart()

    def micro(self, batches: BatchContext, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        if batches.joined:
            table, rows = base.by_length(chosen)
            inputs, starts_B, documents = base.joined(table)
        else:
            table = chosen.table
            rows = chosen.rows
            inputs = batches.task.collate(table, batches.settings)
            starts_B = np.arange(len(table)) * inputs["input_ids"].shape[1]
            documents = None
        _, words_B = flattened(table, "places")
        real_W = np.repeat(rows >= 0, words_B)
        words_N, targets_N = _targets(table, starts_B, real_W)
        labels_W, _ = flattened(table, "label")
        return Micro(
            inputs=inputs,
            labels=torch.from_numpy(labels_W[words_N].astype(np.int64)),
            targets=torch.from_numpy(targets_N),
            documents=documents,
            key=key,
            count=count,
        )

    def loss(self, stage: Stage, batch: Tensors, micro: Micro) -> torch.Tensor:
        theirs_BTC = stage.teacher_logits(batch)
        theirs_NC = None if theirs_BTC is None else base.of_targets(theirs_BTC, micro)
        logits_NC = base.exact(base.of_targets(stage.logits(batch), micro))
        weights_N = torch.ones_like(micro.labels)
        return loss_of(stage, logits_NC, theirs_NC, micro.labels, weights_N, micro.count[0])

    def score(self, stage: Stage, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[N, C]: the logits."""
        return base.exact(base.of_targets(stage.logits(batch), micro))

    def alone(
        self, model: ScoredModel, table: pa.Table, mesh: Place, asked: int | None = None
    ) -> Alone:
        inputs = model.task.collate(table, model.settings)
        starts_B = np.arange(len(table)) * inputs["input_ids"].shape[1]
        words, targets = map(torch.from_numpy, _targets(table, starts_B))
        return Micro(inputs, labels=words, count=torch.ones(1), key=0, targets=targets), words

    def places(self, encoded: pa.Table) -> Ints:
        return np.append(np.int64(0), np.cumsum(flattened(encoded, "places")[1]))

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """Each token is a word."""
        tags = [random.integers(0, classes, len(text)).tolist() for text in texts]
        places = [list(range(len(text))) for text in texts]
        numbers = pa.list_(pa.int32())
        return {"label": pa.array(tags, numbers), "places": pa.array(places, numbers)}


def _targets(
    table: pa.Table, starts_B: Ints, real_W: np.ndarray | bool = True
) -> tuple[Ints, Ints]:
    """Which words of all texts have a place, and where it is among the flattened tokens."""
    places_W, words_B = flattened(table, "places")
    words_N = np.flatnonzero((places_W >= 0) & real_W)
    return words_N, (np.repeat(starts_B, words_B) + places_W)[words_N]


LOSS = Tags()
