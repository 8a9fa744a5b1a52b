"""Micro-batches on their way from the loader to the device, and the rows that they are made of.

Shapes: B rows or sequences, T tokens of this rank, N targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import torch

from rekindle.train.documents import Documents

Tensors = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Micro:
    """One micro-batch: what the network takes, and what its loss is made of.

    `inputs` are the network's own, first dimension B. Of classes: `labels` int64 [B] and `weights`
    float64 [B], 0 for rows that are none; of joined texts B is 1 in `inputs`, and `targets` int64
    [texts] says where each text begins. Of tokens: `targets` int64 [N], which of the flattened
    [B * T] tokens are followed by a token to predict, and `labels` [N], that token. Of tags:
    `targets` [N], which of these tokens are a word's first, and `labels` [N], its tag. `documents`
    where several share a sequence. `count` float64 [1] is the number of targets in the global
    batch; `key` seeds dropout, and stays on the host."""

    inputs: Tensors
    labels: torch.Tensor
    count: torch.Tensor
    key: int
    weights: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    documents: Documents | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors of it, in an order that `with_tensors` knows."""
        yield from self.inputs.values()
        yield from (t for t in (self.labels, self.count, self.weights, self.targets)
                    if t is not None)  # fmt: skip
        if self.documents is not None:
            yield from self.documents.tensors()

    def with_tensors(self, moved: Iterator[torch.Tensor]) -> Micro:
        """The same with `tensors` replaced, in their order."""
        return Micro(
            inputs={name: next(moved) for name in self.inputs},
            labels=next(moved),
            count=next(moved),
            key=self.key,
            weights=None if self.weights is None else next(moved),
            targets=None if self.targets is None else next(moved),
            documents=None if self.documents is None else self.documents.with_tensors(moved),
        )


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Rows of the shards that become one micro-batch: their number (negative: none), which sequence
    each is in, and how long the longest may be."""

    table: pa.Table
    rows: np.ndarray
    slots: np.ndarray
    length: int
