"""The loss and the scores of predicting the next token: several documents may share a
sequence, and each supervised token is a target.

Shapes: B sequences, T tokens of this rank, N supervised tokens, H hidden, V
vocabulary."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

from rekindle.objectives import loss as base
from rekindle.objectives.columns import flattened
from rekindle.objectives.loss import (
    Alone,
    BatchContext,
    Columns,
    Loss,
    Place,
    ScoredModel,
    Scoring,
    Settings,
    Texts,
    TokenStage,
)
from rekindle.objectives.micro import Chosen, Documents, Micro, Tensors
from rekindle.objectives.tokens.cross_entropy import (
    Lesson,
    judge_logits,
    judge_targets,
    linear_cross_entropy,
)

IGNORED = -100
"""The label of tokens after which nothing is to be predicted, as transformers has it."""


class Tokens(Loss, Scoring):
    """The cross-entropy of each supervised token."""

    def pack_length(self, settings: Settings) -> int | None:
        return int(settings["max_length"]) if settings.get("packing") else None

    def micro(self, batches: BatchContext, chosen: Chosen, key: int, count: Tensor) -> Micro:
        tensors = batches.task.collate(
            chosen.table,
            batches.settings,
            slots=chosen.slots,
            rows=chosen.rows,
            length=chosen.length,
        )  # type: ignore[call-arg]
        cp = batches.mesh.layout.cp
        return micro_of_tokens(tensors, cp, batches.mesh.place("cp"), batches.packs, key, count)

    def loss(self, stage: TokenStage, batch: Tensors, micro: Micro) -> Tensor:
        lesson = _lesson(stage, batch, micro)
        hidden_BTH = stage.states(stage.network, batch)
        if not stage.last:
            return base.sendable(hidden_BTH)
        head: Any = stage.network.get_output_embeddings()  # type: ignore[operator]
        if stage.watches:
            stage.watch(base.of_targets(hidden_BTH, micro))
        loss, right = linear_cross_entropy(
            # without a name here, so that its memory is free once it has been cast
            base.of_targets(hidden_BTH, micro),
            head.weight,
            micro.labels,
            1 / micro.count[0],
            stage.tp_group,
            add_up=not stage.sequence_parallel,
            lesson=lesson,
            smoothing=stage.goal.label_smoothing if stage.training else 0.0,
        )
        return base.row(loss, right, torch.full_like(loss, len(micro.labels)))

    def own_loss(self, stage: TokenStage, batch: Tensors, micro: Micro) -> Tensor:
        """As `loss`, by the logits of the architecture's own forward. Each sequence has
        to be one document without padding, since that forward is told of neither."""
        logits_NV = base.of_targets(stage.network(input_ids=batch["input_ids"]).logits, micro)
        losses_N = F.cross_entropy(base.exact(logits_NV), micro.labels, reduction="none")
        loss = losses_N.double().sum() / micro.count[0]
        return base.row(loss, torch.zeros_like(loss), torch.full_like(loss, len(losses_N)))

    def score(self, stage: TokenStage, batch: Tensors, micro: Micro) -> Tensor:
        """The loss in nats and the most probable token of each target, [N, 2]."""
        # a network of the user's own may have no output layer apart
        if not hasattr(stage.network, "get_output_embeddings"):
            logits_NV = base.of_targets(stage.logits(batch), micro)
            return judge_logits(base.exact(logits_NV), micro.labels, 0, None)
        hidden_BTH = stage.states(stage.network, batch)
        if not stage.last:
            return base.sendable(hidden_BTH)
        head: Any = stage.network.get_output_embeddings()  # type: ignore[operator]
        states_NH = base.of_targets(hidden_BTH, micro)
        return judge_targets(states_NH, head.weight, micro.labels, stage.tp_group)

    def alone(
        self, model: ScoredModel, table: pa.Table, mesh: Place, asked: int | None = None
    ) -> Alone:
        """The texts of the table as a micro-batch, with the place (the row) of each target.

        With `asked`, the number of a token, the only target is the token that follows it."""
        task: Any = model.task
        layout = mesh.layout
        # tp divides the length by its ranks, cp into two chunks a rank
        unit = layout.tp
        if layout.cp > 1:
            unit *= 2 * layout.cp
        length = -(-int(flattened(table, "input_ids")[1].max()) // unit) * unit
        tensors = task.collate(table, model.settings, length=length)
        if asked is not None:
            tensors["labels"][0, asked] = 0
        micro = micro_of_tokens(
            tensors, layout.cp, mesh.place("cp"), is_packed=False, key=0, count=torch.ones(1)
        )
        assert micro.targets is not None
        return micro, micro.targets // (length // layout.cp)

    def sums(self, result: Tensor, micro: Micro) -> Tensor:
        """Of each target [N, 3]: its nats, whether it was predicted, and 1 to count it."""
        right_N = (result[:, 1] == micro.labels).double()
        return torch.stack([result[:, 0], right_N, torch.ones_like(right_N)], 1)

    def width(self, labels: Sequence[str]) -> int:
        """The columns of `sums`."""
        return 3

    def columns(self, encoded: pa.Table, sums: np.ndarray, settings: Settings) -> Columns:
        """What the targets of each text cost, and which tokens they are.

        Another tokenizer makes other targets of the same text. `cut` and `full` show
        whether two models were asked for the same ones: the hash of all tokens with their
        marks, and whether the text is as long as it may be, so that its end may be
        missing."""
        longest = settings.get("max_length", sys.maxsize)
        target_ids = []
        cut = []
        full = []
        for text in encoded.select(["input_ids", "supervised"]).to_pylist():
            tokens = np.array(text["input_ids"] or [], np.int32)
            marks = np.array(text["supervised"] if len(tokens) else [], np.uint8)
            target_ids.append(tokens[1:][marks[1:] > 0])
            full.append(len(tokens) >= longest)
            cut.append(hashlib.sha256(tokens.tobytes() + marks.tobytes()).digest()[:16])
        return {
            "nats": pa.array(sums[:, 0]),
            "right": pa.array(sums[:, 1].astype(np.int32)),
            "targets": pa.array(sums[:, 2].astype(np.int32)),
            "target_bytes": encoded.column("target_bytes"),
            "target_ids": pa.array(target_ids, pa.list_(pa.int32())),
            "cut": pa.array(cut, pa.binary(16)),
            "full": pa.array(full, pa.bool_()),
        }

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """Marks that make every token a target."""
        marks = [np.ones(len(text), np.uint8).tolist() for text in texts]
        return {"supervised": pa.array(marks, pa.list_(pa.uint8()))}

    def rows_at_once(self, most: int) -> int | None:
        """None: texts differ in length, so tokens are limited and not rows."""
        return None


def _lesson(stage: TokenStage, batch: Tensors, micro: Micro) -> Lesson | None:
    """The teacher's states and output layer, to learn from; None without a teacher.

    The teacher runs before the student's forward pass: the activations of both are then
    never in memory at once."""
    if not (stage.teachers and stage.training):
        return None
    (teacher,) = stage.teachers
    goal = stage.goal
    with torch.no_grad():
        states_NH = base.of_targets(stage.states(teacher, batch), micro)
    head: Any = teacher.get_output_embeddings()  # type: ignore[operator]
    return Lesson(head, states_NH, goal.temperature, goal.teacher_weight)


def micro_of_tokens(
    tensors: Tensors, cp: int, cp_rank: int, is_packed: bool, key: int, count: Tensor
) -> Micro:
    """The micro-batch of this context-parallel rank: its share of what `collate` gave."""
    numbers_BS = tensors.pop("documents").numpy()
    documents = None
    if cp > 1:
        # A token attends to those before it, so chunks cost more towards the end: one
        # chunk from the front and one from the back give each rank the same work.
        chunks = torch.arange(numbers_BS.shape[1]).chunk(2 * cp)
        places = torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
        tensors = {name: tensor[:, places] for name, tensor in tensors.items()}
        documents = Documents.of(numbers_BS, cp, cp_rank)
    elif is_packed:
        documents = Documents.of(numbers_BS)
    labels_F = tensors.pop("labels").flatten()
    targets_N = (labels_F != IGNORED).nonzero()[:, 0]
    return Micro(
        inputs=tensors,
        labels=labels_F[targets_N],
        targets=targets_N,
        documents=documents,
        key=key,
        count=count,
    )


LOSS = Tokens()
