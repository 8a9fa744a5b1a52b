"""Cross-entropy of classes, with label smoothing and a teacher: one class for each
example, images or texts.

Texts share a sequence where the network's family says how each gets a summary of its own.
Shapes: B rows, T tokens of this rank, F tokens of all texts joined, N targets, C classes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional as F

from rekindle.objectives import loss as base
from rekindle.objectives.loss import (
    Alone,
    BatchContext,
    Columns,
    Loss,
    Place,
    ScoredModel,
    Scoring,
    Settings,
    Stage,
    Texts,
)
from rekindle.objectives.micro import Chosen, Documents, Micro, Tensors


class Classes(Loss, Scoring):
    """The cross-entropy of one class for each example."""

    def prepare(self, stage: Stage) -> bool:
        return stage.summarise_each()

    def micro(self, batches: BatchContext, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        if batches.joined:
            table, rows = base.by_length(chosen)
            inputs, starts_B, documents = base.joined(table)
            targets = torch.from_numpy(starts_B)
        else:
            table = chosen.table
            rows = chosen.rows
            inputs = batches.task.collate(table, batches.settings)
            documents = None
            targets = None
        return Micro(
            inputs=inputs,
            labels=self.labels(table, batches.settings),
            weights=torch.from_numpy((rows >= 0).astype(np.float64)),
            targets=targets,
            documents=documents,
            key=key,
            count=count,
        )

    def labels(self, table: pa.Table, settings: Settings) -> torch.Tensor:
        """What each row has to be answered with, [B]."""
        return torch.from_numpy(table.column("label").to_numpy().astype(np.int64))

    def alike(self, batches: BatchContext, micro: list[Micro]) -> list[Micro]:
        """Texts of the same length in all micro-batches of a pipeline."""
        pad = int(batches.settings.get("pad_token_id", 0))
        lengths = []
        for micro_batch in micro:
            if "input_ids" in micro_batch.inputs:
                lengths.append(micro_batch.inputs["input_ids"].shape[1])
        if batches.joined:
            texts = micro[0].labels.numel()
            length_of_a_text = -(-max(lengths) // texts)
            longest = texts * batches.rounded(length_of_a_text)
            return [_filled(micro_batch, longest, pad) for micro_batch in micro]
        longest = batches.rounded(max(lengths, default=1))
        padded_batches = []
        for micro_batch in micro:
            inputs = _padded(micro_batch.inputs, longest, pad)
            padded_batches.append(dataclasses.replace(micro_batch, inputs=inputs))
        return padded_batches

    def loss(self, stage: Stage, batch: Tensors, micro: Micro) -> torch.Tensor:
        if not stage.last:
            return stage.hidden(batch)
        # before the student's forward pass makes its activations
        theirs_BC = stage.teacher_logits(batch)
        logits_BC = base.exact(stage.logits(batch))
        return self.loss_of(stage, logits_BC, theirs_BC, micro)

    def loss_of(
        self, stage: Stage, logits: torch.Tensor, theirs: torch.Tensor | None, micro: Micro
    ) -> torch.Tensor:
        """[1, 3]: the loss of logits, [B, C], of which `theirs` are the teacher's."""
        assert micro.weights is not None
        return loss_of(stage, logits, theirs, micro.labels, micro.weights, micro.count[0])

    def score(self, stage: Stage, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[B, C]: the logits."""
        return base.exact(stage.logits(batch)) if stage.last else stage.hidden(batch)

    def alone(
        self, model: ScoredModel, table: pa.Table, mesh: Place, asked: int | None = None
    ) -> Alone:
        rows = torch.arange(len(table))
        inputs = model.task.collate(table, model.settings)
        return Micro(inputs, labels=rows, count=torch.ones(1), key=0), rows

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        return {"label": pa.array(random.integers(0, classes, len(texts)), pa.int32())}


def _padded(inputs: Tensors, length: int, pad: int) -> Tensors:
    """With sequences of this length; what has none, such as pixels, stays as it is."""
    values = {"input_ids": pad, "attention_mask": 0, "position_ids": 0}
    padded = dict(inputs)
    for name, value in values.items():
        if name in padded:
            missing = length - padded[name].shape[1]
            padded[name] = F.pad(padded[name], (0, missing), value=value)
    return padded


def _filled(micro: Micro, length: int, pad: int) -> Micro:
    """Joined texts, and behind them one more whose result is dropped."""
    assert micro.documents is not None
    room = length - micro.inputs["input_ids"].shape[1]
    if not room:
        return micro
    # in pieces no longer than a text may be: attention costs their square
    longest = max(micro.documents.queries)
    fillings = [longest] * (room // longest)
    if room % longest:
        fillings.append(room % longest)
    documents = Documents.of_texts([*micro.documents.queries, *fillings])
    inputs = _padded(micro.inputs, length, pad)
    return dataclasses.replace(micro, inputs=inputs, documents=documents)


def loss_of(
    stage: Stage,
    logits_NC: torch.Tensor,
    theirs_NC: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """[1, 3]: a share of the mean loss over `count` targets, right predictions, targets."""
    class_weights_C = None
    smoothing = 0.0
    if stage.training:  # a validation loss is the plain one
        smoothing = stage.goal.label_smoothing
        if stage.goal.class_weights is not None:
            class_weights_C = stage.goal.class_weights.to(logits_NC.dtype)
    losses_N = F.cross_entropy(
        logits_NC,
        labels_N,
        reduction="none",
        weight=class_weights_C,
        label_smoothing=smoothing,
    )
    weights_N = weights_N.to(logits_NC.dtype)
    loss = (losses_N * weights_N).sum() / count
    if theirs_NC is not None:
        temperature = stage.goal.temperature
        share = stage.goal.teacher_weight
        divergence_N = F.kl_div(
            F.log_softmax(logits_NC / temperature, -1),
            F.log_softmax(theirs_NC.to(logits_NC.dtype) / temperature, -1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        divergence = (divergence_N * weights_N).sum() / count
        loss = (1 - share) * loss + share * temperature**2 * divergence
    right = ((logits_NC.argmax(-1) == labels_N) * weights_N).sum()
    return base.row(loss, right.to(loss.dtype), weights_N.sum())


LOSS = Classes()
