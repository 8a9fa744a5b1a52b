"""What a task minimises and what its examples score: `Objective`, one of which each task names.

An objective has three sides: it makes micro-batches on the host, their loss on a device, and, where
a model is judged, the scores of single examples. Shapes: B rows or sequences, T tokens of this
rank, N targets, H hidden, C classes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rekindle.train.micro import Chosen, Micro, Tensors

if TYPE_CHECKING:
    import pyarrow as pa

    from rekindle.spec.layout import Layout
    from rekindle.tasks.base import Settings
    from rekindle.train.batches import Batches
    from rekindle.train.part import Part


class Objective(abc.ABC):
    """Has no state: what belongs to a network lies in its `Part`."""

    # whether context-parallel peers have targets of their own
    divided_by_cp: ClassVar[bool] = False

    def prepared(self, part: Part) -> bool:
        """Hook into the part's network; whether texts share a sequence that have not been packed
        into it before."""
        return False

    @abc.abstractmethod
    def micro(self, batches: Batches, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        """A micro-batch of the chosen rows."""

    def alike(self, batches: Batches, micro: list[Micro]) -> list[Micro]:
        """The micro-batches of a step, in the one shape that a pipeline moves."""
        return micro

    @abc.abstractmethod
    def loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[1, 3] on the last stage: the loss, a share of the mean over the global batch; right
        predictions; targets. What the next stage receives on others."""

    @abc.abstractmethod
    def score(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """On the last stage what each result is, [N, K]; what the next stage receives on others."""

    @abc.abstractmethod
    def alone(
        self, task: Any, table: pa.Table, settings: Settings, layout: Layout, cp_rank: int
    ) -> tuple[Micro, torch.Tensor]:
        """A micro-batch to score, each example by itself; and of each result the row of `table`
        that it belongs to, int64 [N]."""

    @abc.abstractmethod
    def sums(self, result: torch.Tensor, micro: Micro) -> torch.Tensor:
        """What is added up for the row of each result, float64 [N, `width`]."""

    @abc.abstractmethod
    def width(self, labels: Sequence[str]) -> int:
        """How many numbers an example scores."""

    def rows_at_once(self, most: int) -> int | None:
        """How many examples are scored at once; None: as many as `TOKENS_AT_ONCE` allow."""
        return most


def sendable(hidden: torch.Tensor) -> torch.Tensor:
    """A pipeline sends it as it lies in memory, and zero bubble detaches it in place, which no view
    allows: GPT-2 ends in one."""
    return hidden.clone() if hidden._is_view() else hidden.contiguous()


def of_targets(values_BTH: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """The tokens that are to be predicted from, one after the other: [N, H]."""
    return values_BTH.flatten(0, 1).index_select(0, targets_N)


def row(*values: torch.Tensor) -> torch.Tensor:
    """[1, N], and no view: FSDP warns of those."""
    return torch.stack([value[None] for value in values], dim=1)
