"""A tag for each word, predicted at the word's first token. Texts share a sequence where attention
can keep them apart.

Shapes: B texts, T tokens, F tokens of all texts joined, N words with a place, W words, C tags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from rekindle.train import modules
from rekindle.train.documents import Ints
from rekindle.train.linear_loss import exact
from rekindle.train.micro import Chosen, Micro, Tensors
from rekindle.train.objectives import base
from rekindle.train.objectives.base import Columns, Objective, Texts, joined, of_targets
from rekindle.train.objectives.cross_entropy import logits_of, loss_of, taught

if TYPE_CHECKING:
    from rekindle.spec.layout import Layout
    from rekindle.tasks.base import Settings
    from rekindle.train.batches import Batches
    from rekindle.train.part import Part


class Tags(Objective):
    """Cross-entropy of the tags."""

    def prepared(self, part: Part) -> bool:
        return all(modules.known(one) is not None for one in (part.network, *part.teachers))

    def micro(self, batches: Batches, chosen: Chosen, key: int, count: torch.Tensor) -> Micro:
        table, rows = base.by_length(chosen) if batches.joined else (chosen.table, chosen.rows)
        real_W = np.repeat(rows >= 0, _lengths(table, "places"))
        if batches.joined:
            inputs, starts_B, documents = joined(table)
        else:
            inputs, documents = batches.task.collate(table, batches.settings), None
            starts_B = np.arange(len(table)) * inputs["input_ids"].shape[1]
        words_N, targets_N = _targets(table, starts_B, real_W)
        labels_W = table.column("label").combine_chunks().flatten().to_numpy()
        return Micro(
            inputs=inputs, labels=torch.from_numpy(labels_W[words_N].astype(np.int64)),
            targets=torch.from_numpy(targets_N), documents=documents, key=key, count=count,
        )  # fmt: skip

    def loss(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        assert micro.targets is not None
        if micro.documents is not None:
            batch["documents"] = micro.documents  # type: ignore[assignment]
        theirs_BTC = taught(part, batch)
        theirs_NC = None if theirs_BTC is None else of_targets(theirs_BTC, micro.targets)
        logits_NC = exact(of_targets(logits_of(part, batch), micro.targets))
        weights_N = torch.ones_like(micro.labels)
        return loss_of(part, logits_NC, theirs_NC, micro.labels, weights_N, micro.count[0])

    def score(self, part: Part, batch: Tensors, micro: Micro) -> torch.Tensor:
        """[N, C]: the logits."""
        assert micro.targets is not None
        return exact(of_targets(logits_of(part, batch), micro.targets))

    def alone(
        self, task: Any, table: pa.Table, settings: Settings, layout: Layout, cp_rank: int
    ) -> tuple[Micro, torch.Tensor]:
        inputs = task.collate(table, settings)
        starts_B = np.arange(len(table)) * inputs["input_ids"].shape[1]
        words_N, targets_N = _targets(table, starts_B)
        targets, words = torch.from_numpy(targets_N), torch.from_numpy(words_N)
        return Micro(inputs, labels=words, count=torch.ones(1), key=0, targets=targets), words

    def places(self, encoded: pa.Table) -> Ints:
        return np.append(np.int64(0), np.cumsum(_lengths(encoded, "places")))

    def invented(self, random: np.random.Generator, texts: Texts, classes: int) -> Columns:
        """Each token is a word."""
        tags = [random.integers(0, classes, len(text)).tolist() for text in texts]
        places = [list(range(len(text))) for text in texts]
        kind = pa.list_(pa.int32())
        return {"label": pa.array(tags, kind), "places": pa.array(places, kind)}


def _targets(
    table: pa.Table, starts_B: Ints, real_W: np.ndarray | bool = True
) -> tuple[Ints, Ints]:
    """Which words of all texts have a place, and where it is among the flattened tokens."""
    places_W = table.column("places").combine_chunks().flatten().to_numpy().astype(np.int64)
    words_N = np.flatnonzero((places_W >= 0) & real_W)
    start_W = np.repeat(starts_B, _lengths(table, "places"))
    return words_N, (start_W + places_W)[words_N]


def _lengths(table: pa.Table, column: str) -> Ints:
    lengths = table.column(column).combine_chunks().value_lengths()
    return np.asarray(lengths, np.int64)
