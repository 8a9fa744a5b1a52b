"""The next token: several documents may share a sequence, and each supervised token is a target.

Shapes: B sequences, T tokens of this rank, N supervised tokens, H hidden, V vocabulary."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from rekindle.data.manifest import row_tokens
from rekindle.train.linear_loss import Lesson, exact, judge_targets, judged, linear_cross_entropy
from rekindle.train.micro import Chosen, Documents, Micro, Tensors
from rekindle.train.objectives.base import Columns, Objective, Texts, of_targets, row, sendable

if TYPE_CHECKING:
    from rekindle.spec.layout import Layout
    from rekindle.tasks.base import Settings
    from rekindle.train.batches import Batches
    from rekindle.train.part import Part

IGNORED = -100


class Tokens(Objective):
    """Cross-entropy of the token that follows."""

    divided_by_cp: ClassVar[bool] = True

    def pack_length(self, settings: Settings) -> int | None:
        return int(settings["max_length"]) if settings.get("packing") else None

    def micro(self, batches: Batches, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        layout, task = batches.mesh.layout, batches.task
        found = task.collate(
            chosen.table, batches.settings, slots=chosen.slots, rows=chosen.rows,
            length=chosen.length,
        )  # type: ignore[call-arg]  # fmt: skip
        packed = batches.order.pack_length is not None
        return micro_of_tokens(found, layout.cp, batches.mesh.place("cp"), packed, key, count)

    def loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        lesson = _lesson(part, batch, micro)
        hidden_BTH = part.states(part.network, batch, micro)
        if not part.last:
            return sendable(hidden_BTH)
        assert micro.targets is not None
        head: Any = part.network.get_output_embeddings()  # type: ignore[operator]
        loss, right = linear_cross_entropy(
            of_targets(hidden_BTH, micro.targets), head.weight, micro.labels, 1 / micro.count[0],
            part.tp_group, not part.sequence_parallel, lesson,
        )  # fmt: skip
        return row(loss, right, torch.full_like(loss, len(micro.targets)))

    def score(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[N, 2]: the loss in nats and the most probable token."""
        assert micro.targets is not None
        if not hasattr(part.network, "get_output_embeddings"):
            logits_NV = of_targets(part.task.logits(part.network, batch), micro.targets)
            return judged(exact(logits_NV), micro.labels, 0, None)
        hidden_BTH = part.states(part.network, batch, micro)
        if not part.last:
            return sendable(hidden_BTH)
        head: Any = part.network.get_output_embeddings()  # type: ignore[operator]
        states_NH = of_targets(hidden_BTH, micro.targets)
        return judge_targets(states_NH, head.weight, micro.labels, part.tp_group)

    def alone(
        self, task: Any, table: pa.Table, settings: Settings, layout: Layout, cp_rank: int,
        asked: int | None = None,
    ) -> tuple[Micro, torch.Tensor]:  # fmt: skip
        """With `asked`, the only target is what follows that place."""
        unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        length = -(-int(row_tokens(table).max()) // unit) * unit
        tensors = task.collate(table, settings, length=length)
        if asked is not None:
            tensors["labels"][0, asked] = 0
        micro = micro_of_tokens(tensors, layout.cp, cp_rank, False, 0, torch.ones(1))
        assert micro.targets is not None
        return micro, micro.targets // (length // layout.cp)

    def sums(self, result: torch.Tensor, micro: Micro) -> torch.Tensor:
        """Nats, right predictions, targets."""
        right_N = (result[:, 1] == micro.labels).double()
        return torch.stack([result[:, 0], right_N, torch.ones_like(right_N)], 1)

    def width(self, labels: Sequence[str]) -> int:
        return 3

    def columns(self, encoded: pa.Table, sums: np.ndarray, settings: Settings) -> Columns:
        """What the targets of a text cost, and which they are: with another tokenizer they are
        others."""
        longest = settings.get("max_length", sys.maxsize)
        ids, cut, full = [], [], []
        for text in encoded.select(["input_ids", "supervised"]).to_pylist():
            tokens = np.array(text["input_ids"] or [], np.int32)
            marks = np.array(text["supervised"] if len(tokens) else [], np.uint8)
            ids.append(tokens[1:][marks[1:] > 0])
            full.append(len(tokens) >= longest)
            cut.append(hashlib.sha256(tokens.tobytes() + marks.tobytes()).digest()[:16])
        return {
            "nats": pa.array(sums[:, 0]), "right": pa.array(sums[:, 1].astype(np.int32)),
            "targets": pa.array(sums[:, 2].astype(np.int32)),
            "target_bytes": encoded.column("target_bytes"),
            "target_ids": pa.array(ids, pa.list_(pa.int32())), "cut": pa.array(cut, pa.binary(16)),
            "full": pa.array(full, pa.bool_()),
        }  # fmt: skip

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """Every token is a target."""
        marks = [np.ones(len(text), np.uint8).tolist() for text in texts]
        return {"supervised": pa.array(marks, pa.list_(pa.uint8()))}

    def rows_at_once(self, most: int) -> int | None:
        return None


def _lesson(part: Part, batch: Tensors, micro: Micro) -> Lesson | None:
    """Before the student's forward pass, whose activations are not there yet."""
    if not (part.teachers and part.training):
        return None
    assert micro.targets is not None
    (teacher,), goal = part.teachers, part.goal
    with torch.no_grad():
        states_NH = of_targets(part.states(teacher, batch, micro), micro.targets)
    head: Any = teacher.get_output_embeddings()  # type: ignore[operator]
    return Lesson(head, states_NH, goal.temperature, goal.teacher_weight)


def micro_of_tokens(
    found: Tensors, cp: int, cp_rank: int, packed: bool, key: int, count: torch.Tensor
) -> Micro:
    """What a token task's `collate` made, as this context-parallel rank's share of it."""
    numbers_BS, documents = found.pop("documents").numpy(), None
    if cp > 1:
        held = _held(numbers_BS.shape[1], cp, cp_rank)
        found = {name: tensor[:, held] for name, tensor in found.items()}
        documents = Documents.of(numbers_BS, cp, cp_rank)
    elif packed:
        documents = Documents.of(numbers_BS)
    labels_F = found.pop("labels").flatten()
    targets_N = (labels_F != IGNORED).nonzero()[:, 0]
    return Micro(
        inputs=found, labels=labels_F[targets_N], targets=targets_N, documents=documents,
        key=key, count=count,
    )  # fmt: skip


def _held(length: int, cp: int, cp_rank: int) -> torch.Tensor:
    """Which tokens of a sequence a rank holds: chunks r and 2 cp - 1 - r of 2 cp."""
    chunks = torch.arange(length).chunk(2 * cp)
    return torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])
