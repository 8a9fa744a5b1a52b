"""What a task minimises and what its examples score: `Objective`, one of which each task
names.

An objective has three sides: it makes micro-batches on the host, their loss on a device,
and, where a model is judged, the scores of single examples. Shapes: B rows or sequences,
T tokens of this rank, F tokens of all texts joined, N targets, H hidden, C classes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
import torch

from rekindle.tasks.base import flattened
from rekindle.train.micro import Chosen, Documents, Ints, Micro, Tensors

if TYPE_CHECKING:
    from rekindle.tasks.base import Settings
    from rekindle.train.batches import Batches
    from rekindle.train.mesh import Mesh
    from rekindle.train.modelfolder import ModelFolder
    from rekindle.train.part import Part


Columns = dict[str, pa.Array]
Texts = list[list[int]]
Alone = tuple[Micro, torch.Tensor]


class Objective(abc.ABC):
    """Has no state: what belongs to a network lies in its `Part`."""

    # whether context-parallel peers have targets of their own
    divided_by_cp: ClassVar[bool] = False
    # whether a prediction is right or wrong, and nothing between
    counts_right: ClassVar[bool] = True

    def prepared(self, part: Part) -> bool:
        """Hook into the part's network; whether texts that are not packed share a sequence."""
        return False

    def pack_length(self, settings: Settings) -> int | None:
        """Tokens of the sequences into which texts are packed; None: they are not."""
        return None

    @abc.abstractmethod
    def micro(self, batches: Batches, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        """A micro-batch of the chosen rows."""

    def alike(self, batches: Batches, micro: list[Micro]) -> list[Micro]:
        """The micro-batches of a step, in the one shape that a pipeline moves."""
        return micro

    @abc.abstractmethod
    def loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[1, 3] on the last stage: the loss, a share of the mean over the global batch;
        right predictions; targets. What the next stage receives on others."""

    def own_loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """As `loss`, by the architecture's own forward."""
        return self.loss(part, batch, micro)

    @abc.abstractmethod
    def score(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """On the last stage what each result is, [N, K]; what the next stage receives on others."""

    @abc.abstractmethod
    def alone(self, model: ModelFolder, table: pa.Table, mesh: Mesh) -> Alone:
        """A micro-batch to score, each example alone, and the place of each result, int64 [N]."""

    def places(self, encoded: pa.Table) -> Ints:
        """Where the places of each row begin, and the last end, [rows + 1]; one a row here."""
        return np.arange(len(encoded) + 1)

    def sums(self, result: torch.Tensor, micro: Micro) -> torch.Tensor:
        """What is added up in the place of each result, float64 [N, `width`]."""
        return result

    def width(self, labels: Sequence[str]) -> int:
        """How many numbers a place scores; by default a logit for each class."""
        return len(labels)

    def columns(self, encoded: pa.Table, sums: np.ndarray, settings: Settings) -> Columns:
        """What is kept of each row's scores (train/pieces.py lists it); `sums` are those
        of the places, [places, `width`]. By default `logits`, place by place."""
        starts = (self.places(encoded) * sums.shape[1]).astype(np.int32)
        logits = pa.array(sums.astype(np.float32).ravel())
        return {"logits": pa.ListArray.from_arrays(pa.array(starts), logits)}

    @abc.abstractmethod
    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """The columns of shards that say what is to be learnt, of texts of random tokens."""

    def rows_at_once(self, most: int) -> int | None:
        """How many examples are scored at once; None: as many as `MOST_TOKENS_AT_ONCE` allow."""
        return most


def by_length(chosen: Chosen) -> tuple[pa.Table, np.ndarray]:
    """Rows and their numbers, shorter texts first: those of like length are one group."""
    order_B = np.argsort(chosen.table.column("input_ids").combine_chunks().value_lengths())
    return chosen.table.take(order_B), chosen.rows[order_B]


def joined(table: pa.Table) -> tuple[Tensors, Ints, Documents]:
    """The texts of a table one after the other, in one sequence [1, F]; where each begins."""
    ids_F, lengths_B = flattened(table, "input_ids")
    starts_B = np.cumsum(lengths_B) - lengths_B
    positions_F = np.arange(len(ids_F)) - np.repeat(starts_B, lengths_B)
    ids, positions = torch.from_numpy(ids_F.astype(np.int64)), torch.from_numpy(positions_F)
    inputs = {"input_ids": ids[None], "position_ids": positions[None]}
    return inputs, starts_B, Documents.of_texts(lengths_B.tolist())


def sendable(hidden: torch.Tensor) -> torch.Tensor:
    """No view, which a pipeline would send whole, and zero bubble cannot detach in place."""
    return hidden.clone() if hidden._is_view() else hidden.contiguous()


def of_targets(values_BTH: torch.Tensor, micro: Micro) -> torch.Tensor:
    """The tokens that are to be predicted from, one after the other: [N, H]."""
    assert micro.targets is not None
    return values_BTH.flatten(0, 1).index_select(0, micro.targets)


def row(*values: torch.Tensor) -> torch.Tensor:
    """[1, N], and no view: FSDP warns of those."""
    return torch.stack([value[None] for value in values], dim=1)


def exact(logits: torch.Tensor) -> torch.Tensor:
    """In single precision at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
