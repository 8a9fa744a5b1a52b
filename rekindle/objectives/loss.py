"""What an objective minimises, and how examples are scored: `Loss` and `Scoring`, which the
class LOSS of each `objectives/KIND/loss.py` is.

A loss makes micro-batches on the host and their loss on a device; where a model is judged
it scores single examples. It knows what it is given alone: a `Stage` of the network, the
`BatchContext` that micro-batches are made in. Shapes: B rows or sequences, T tokens of this
rank, F tokens of all texts joined, N targets, H hidden, C classes.

Tried on paper with two kinds that are not here. *Similarity* (two texts a row): `micro` joins
both texts of each row, and `targets` are the places of both summaries; `loss` takes them two
by two. *Preference* (a prompt with a better and a worse answer, and a frozen reference): `micro`
gives both answers a sequence, `loss` sums the log-probabilities of each and asks the reference,
which lies where a teacher does, for the same; its loss is of pairs, so `count` counts pairs. Both
fit: a micro-batch holds what `micro` puts in, and nothing here counts one sequence a row but
`Scoring.places`, which each kind says for itself."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from rekindle.objectives.columns import flattened
from rekindle.objectives.micro import Chosen, Documents, Ints, Micro, Tensors

if TYPE_CHECKING:
    import torch.distributed as dist

Columns = dict[str, pa.Array]
Settings = Mapping[str, Any]
Texts = list[list[int]]
Alone = tuple[Micro, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Goal:
    """What is minimised."""

    label_smoothing: float = 0.0
    """The share of each target that is spread evenly over all classes."""
    teacher: nn.Module | None = None
    """A frozen network, whose answers count beside the labels."""
    temperature: float = 1.0
    """By which the scores of both are divided before they are compared."""
    teacher_weight: float = 0.0
    """The teacher's share of the loss."""
    class_weights: torch.Tensor | None = None
    """[C], on the rank's device."""


class Stage(Protocol):
    """A stage of the network, as a loss sees it."""

    last: bool
    """Whether the loss is computed here; other stages hand hidden states on."""
    training: bool
    goal: Goal

    def logits(self, batch: Tensors) -> torch.Tensor:
        """What the task's network scores, on the last stage."""

    def teacher_logits(self, batch: Tensors) -> torch.Tensor | None:
        """The teacher's, where there is one and the network learns."""

    def hidden(self, batch: Tensors) -> torch.Tensor:
        """What the next stage receives."""

    def summarise_each(self) -> bool:
        """Have the network summarise each of the texts that share a sequence, and return
        whether it can: its family has to say how."""

    def keeps_texts_apart(self) -> bool:
        """Whether attention keeps texts apart that share a sequence."""


class TokenStage(Stage, Protocol):
    """What the loss of tokens asks beside: the output layer is its own work."""

    network: nn.Module
    teachers: list[nn.Module]
    tp_group: dist.ProcessGroup | None
    """Over which the rows of the output layer are divided."""
    sequence_parallel: bool
    watches: bool
    """Whether a proof wants the states that targets are predicted from."""

    def states(self, network: nn.Module, batch: Tensors) -> torch.Tensor:
        """[B, T, H] behind the last block."""

    def watch(self, states: torch.Tensor) -> None:
        """Keep these states for the proof."""


class Collates(Protocol):
    """A task, as a loss sees it."""

    def collate(self, table: pa.Table, settings: Settings) -> Tensors:
        """Tensors of a batch of shard rows; see `rekindle.tasks.Task.collate`."""


class Degrees(Protocol):
    """The degrees that divide a sequence."""

    @property
    def tp(self) -> int: ...

    @property
    def cp(self) -> int: ...


class Place(Protocol):
    """Where this rank is among its peers."""

    @property
    def layout(self) -> Degrees: ...

    def place(self, axis: str) -> int:
        """Its number on an axis of the layout."""


class BatchContext(Protocol):
    """What micro-batches are made in."""

    @property
    def task(self) -> Collates: ...

    @property
    def mesh(self) -> Place: ...

    settings: Settings
    """Of the shards."""
    joined: bool
    """Whether texts that are not packed share a sequence."""

    @property
    def packs(self) -> bool:
        """Whether texts are packed."""

    def rounded(self, length: int) -> int:
        """Up to one of the few lengths that sequences of a pipeline have."""


class ScoredModel(Protocol):
    """A model's folder, as scoring sees it."""

    @property
    def task(self) -> Collates: ...

    @property
    def settings(self) -> Settings: ...


class Loss(abc.ABC):
    """Has no state: what belongs to a network lies in its `Stage`."""

    def prepare(self, stage: Stage) -> bool:
        """Hook into the stage's network; whether texts that are not packed share a sequence."""
        return False

    def pack_length(self, settings: Settings) -> int | None:
        """Tokens of the sequences into which texts are packed; None: they are not."""
        return None

    @abc.abstractmethod
    def micro(self, batches: BatchContext, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        """A micro-batch of the chosen rows."""

    def alike(self, batches: BatchContext, micro: list[Micro]) -> list[Micro]:
        """The micro-batches of a step, in the one shape that a pipeline moves."""
        return micro

    @abc.abstractmethod
    def loss(self, stage: Any, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[1, 3] on the last stage: the loss, a share of the mean over the global batch;
        right predictions; targets. What the next stage receives on others."""

    def own_loss(self, stage: Any, batch: Tensors, micro: Micro) -> torch.Tensor:
        """As `loss`, by the architecture's own forward."""
        return self.loss(stage, batch, micro)

    @abc.abstractmethod
    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """The columns of shards that say what is to be learnt, of texts of random tokens."""


class Scoring(abc.ABC):
    """How single examples are scored: results of the network, added up in places, of which
    a row has one or more."""

    @abc.abstractmethod
    def score(self, stage: Any, batch: Tensors, micro: Micro) -> torch.Tensor:
        """On the last stage what each result is, [N, K]; what the next stage receives on others."""

    @abc.abstractmethod
    def alone(
        self, model: ScoredModel, table: pa.Table, mesh: Place, asked: int | None = None
    ) -> Alone:
        """A micro-batch to score, each example alone, and the place of each result, int64 [N].
        With `asked`, the only target is what follows that token."""

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
    ids = torch.from_numpy(ids_F.astype(np.int64))
    positions = torch.from_numpy(positions_F)
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
