"""The micro-batches of each step for one rank, prepared while the step before is computed.

Global batch k holds a fixed number of sequences, cut into micro-batches of fixed size; micro-batch
j belongs to data rank j mod `layout.data`. Every data rank gets the same number of micro-batches,
if need be empty ones that weigh nothing. tp and pp peers prepare the same; cp peers take their part
of each sequence, two chunks a rank so that causal attention is as much work for each (zigzag).
Nothing here draws a random number."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional as F

from rekindle.data.manifest import Shards
from rekindle.data.order import Batch, SampleOrder
from rekindle.tasks.base import Task, TokenTask
from rekindle.train.mesh import Mesh

Tensors = dict[str, torch.Tensor]
TRAIN, VALIDATION = "train", "validation"


@dataclasses.dataclass(frozen=True)
class Work:
    """One step. `micro`: this rank's micro-batches, on the CPU; `rows`: the examples in them.

    Of the whole global batch: `examples`, `targets`, `tokens` without padding, and `squares`, the
    sum of the squared lengths of the documents."""

    micro: tuple[Tensors, ...]
    rows: tuple[int, ...]
    examples: int
    targets: int
    tokens: int
    squares: int


class Batches:
    """Work by step, one step ahead in a thread; `waited` is the time spent waiting for it."""

    def __init__(
        self, task: Task, shards: Shards, split: str, order: SampleOrder, mesh: Mesh, seed: int
    ) -> None:  # fmt: skip
        self.task, self.shards, self.split, self.order = task, shards, split, order
        self.mesh, self.seed = mesh, seed
        self.settings = shards.manifest.settings
        self.targets = shards.targets(split)
        self.lengths = shards.lengths(split)
        self.waited = 0.0
        self._ahead: tuple[int, Future[Work]] | None = None
        # one OpenMP thread: a second pool slows every parallel section of training (seen: steps of
        # 107 to 128 ms instead of 97)
        self._pool = ThreadPoolExecutor(1, "batches", torch.set_num_threads, (1,))

    def work(self, step: int, last: int) -> Work:
        """The work of `step`; starts on the one after it unless that is `last`."""
        began = time.perf_counter()
        if self._ahead is not None and self._ahead[0] == step:
            found = self._ahead[1].result()
        else:
            found = self.make(step)
        self._ahead = None
        if step + 1 < last:
            self._ahead = step + 1, self._pool.submit(self.make, step + 1)
        self.waited += time.perf_counter() - began
        return found

    def ids(self, work: Work) -> list[str]:
        """Names of the examples that this rank works on."""
        rows = self.shards.take(self.split, np.array(work.rows, np.int64))
        names: list[str] = rows.column("id").to_pylist()
        return names

    def arranged(self, rows: np.ndarray, slots: np.ndarray) -> Tensors:
        """A micro-batch of one's own choice: `rows` (negative: none) in `slots`."""
        length = self._longest(rows, slots)
        return self._micro(rows, slots, length, torch.zeros(1, dtype=torch.int64))

    def make(self, step: int) -> Work:
        """The work of `step`, from nothing."""
        layout = self.mesh.layout
        batch = self.order.batch(step)
        size = layout.micro_batch_size
        parts = self.order.global_batch_size // size
        rounds = -(-parts // layout.data)
        mine = [turn * layout.data + self.mesh.data_rank for turn in range(rounds)]
        picks = [self._pick(batch, j, size) for j in mine]
        longest = [self._longest(rows, slots) for rows, slots in picks]
        if layout.pp > 1:  # a pipeline moves one shape
            longest = [max(longest)] * len(longest)
        micro = [
            self._micro(rows, slots, length, self._key(step, j))
            for j, (rows, slots), length in zip(mine, picks, longest, strict=True)
        ]
        if layout.pp > 1 and self.task.objective == "classes":
            micro = _padded(micro, int(self.settings.get("pad_token_id", 0)))
        real = batch.rows[batch.rows >= 0]
        lengths, targets = self.lengths[real], max(1, int(self.targets[real].sum()))
        count = torch.tensor([targets], dtype=torch.float64)
        return Work(
            micro=tuple({**tensors, "count": count} for tensors in micro),
            rows=tuple(int(row) for rows, _ in picks for row in rows if row >= 0),
            examples=len(real),
            targets=targets,
            tokens=int(lengths.sum()),
            squares=int((lengths**2).sum()),
        )

    def _pick(self, batch: Batch, j: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and slots (from 0) of micro-batch j; beyond the batch, `size` empty slots."""
        inside = (batch.slots >= j * size) & (batch.slots < (j + 1) * size)
        if not inside.any():
            return np.full(size, -1), np.arange(size)
        return batch.rows[inside], batch.slots[inside] - j * size

    def _key(self, step: int, micro: int) -> torch.Tensor:
        cp = self.mesh.place("cp")
        words = np.random.SeedSequence([self.seed, step, micro, *([cp] if cp else [])])
        return torch.tensor([int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))])

    def _longest(self, rows: np.ndarray, slots: np.ndarray) -> int:
        """Tokens of the longest sequence, rounded up to what the layout can divide."""
        layout = self.mesh.layout
        lengths = np.where(rows >= 0, self.lengths[np.maximum(rows, 0)], 0)
        longest = self.order.pack_length or int(np.bincount(slots, weights=lengths).max(initial=1))
        unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        return -(-max(longest, 1) // unit) * unit

    def _micro(
        self, rows: np.ndarray, slots: np.ndarray, length: int, key: torch.Tensor
    ) -> Tensors:
        table = self.shards.take(self.split, np.maximum(rows, 0))
        if isinstance(self.task, TokenTask):
            return {**self._tokens(self.task, table, rows, slots, length), "key": key}
        labels_B = table.column("label").to_numpy().astype(np.int64)
        return {
            **self.task.collate(table, self.settings),
            "labels": torch.from_numpy(labels_B),
            "weights": torch.from_numpy((rows >= 0).astype(np.float64)),
            "key": key,
        }

    def _tokens(
        self, task: TokenTask, table: pa.Table, rows: np.ndarray, slots: np.ndarray, length: int
    ) -> Tensors:
        layout = self.mesh.layout
        found = task.collate(table, self.settings, slots=slots, rows=rows, length=length)
        documents_BT = found.pop("documents")
        if layout.cp > 1:
            return _cut(found, documents_BT, layout.cp, self.mesh.place("cp"))
        if self.order.pack_length is not None:
            found["attention_mask"] = _sequence(documents_BT, torch.arange(length))
        return found


def _sequence(documents_BT: torch.Tensor, order_T: torch.Tensor) -> torch.Tensor:
    """int64 [B, 1, 2, T]: see train/attention.py."""
    positions_BT = order_T.expand_as(documents_BT)
    return torch.stack([documents_BT[:, order_T], positions_BT], dim=1)[:, None]


def _cut(found: Tensors, documents_BT: torch.Tensor, cp: int, cp_rank: int) -> Tensors:
    """This rank's tokens: chunks r and 2 cp - 1 - r of 2 cp."""
    chunks = torch.arange(documents_BT.shape[1]).chunk(2 * cp)
    held = [torch.cat([chunks[r], chunks[2 * cp - 1 - r]]) for r in range(cp)]
    mine = {name: tensor[:, held[cp_rank]] for name, tensor in found.items()}
    return {**mine, "attention_mask": _sequence(documents_BT, torch.cat(held))}


def _padded(micro: list[Tensors], pad_token_id: int) -> list[Tensors]:
    """Texts of the same length in all micro-batches of a pipeline."""
    longest = max((t["input_ids"].shape[1] for t in micro if "input_ids" in t), default=0)

    def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name not in ("input_ids", "attention_mask"):
            return tensor
        value = pad_token_id if name == "input_ids" else 0
        return F.pad(tensor, (0, longest - tensor.shape[1]), value=value)

    return [{name: one(name, tensor) for name, tensor in tensors.items()} for tensors in micro]
