"""The micro-batches of each step for one rank, prepared while the step before is computed.

Global batch k holds a fixed number of sequences, cut into micro-batches of fixed size; micro-batch
j belongs to data rank j mod `layout.data`. Every data rank gets the same number of micro-batches,
if need be an empty one that weighs nothing; a batch that is not full has as many as it fills. tp
and pp peers prepare the same; cp peers take their part of each sequence, two chunks a rank so that
causal attention is as much work for each (zigzag). What a device would have to be asked for is
found here, on the host: where documents begin, and which tokens are targets. Nothing here draws a
random number.

Shapes: B rows or sequences, T tokens of this rank, N targets."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import torch
from torch.nn import functional as F

from rekindle.data.manifest import Shards
from rekindle.data.order import Batch, SampleOrder
from rekindle.tasks.base import Task, TokenTask
from rekindle.train.documents import Documents
from rekindle.train.mesh import Mesh

Tensors = dict[str, torch.Tensor]
TRAIN, VALIDATION = "train", "validation"
IGNORED = -100
SHAPES = 8  # lengths of the sequences of a pipeline, which keeps a schedule for each


@dataclasses.dataclass(frozen=True)
class Micro:
    """One micro-batch: what the network takes, and what its loss is made of.

    `inputs` are the network's own, first dimension B. Of classes: `labels` int64 [B] and `weights`
    float64 [B], 0 for rows that are none; of joined texts B is 1 in `inputs`, and `targets` int64
    [texts] says where each text begins. Of tokens: `targets` int64 [N], which of the flattened
    [B * T] tokens are followed by a token to predict, and `labels` [N], that token. `documents`
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
class Work:
    """One step. `micro`: this rank's micro-batches, on the host; `rows`: the examples in them.

    Of the whole global batch: `examples`, `targets`, `tokens` without padding, and `squares`, the
    sum of the squared lengths of the documents."""

    micro: tuple[Micro, ...]
    rows: tuple[int, ...]
    examples: int
    targets: int
    tokens: int
    squares: int


class Batches:
    """Work by step, one step ahead in a thread; `waited` is the time spent waiting for it. Texts
    with a class are `joined` in one sequence where the network can take that."""

    def __init__(
        self, task: Task, shards: Shards, split: str, order: SampleOrder, mesh: Mesh, seed: int,
        joined: bool = False,
    ) -> None:  # fmt: skip
        self.task, self.shards, self.split, self.order = task, shards, split, order
        self.mesh, self.seed = mesh, seed
        self.settings = shards.manifest.settings
        self.targets = shards.targets(split)
        self.lengths = shards.lengths(split)
        self.joined = joined
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

    def arranged(self, rows: np.ndarray, slots: np.ndarray) -> Micro:
        """A micro-batch of chosen `rows` (negative: none) in `slots`."""
        length = self._longest(rows, slots)
        return self._pinned(self._micro(rows, slots, length, 0, torch.ones(1)))

    def make(self, step: int) -> Work:
        """The work of `step`, from nothing."""
        layout = self.mesh.layout
        batch = self.order.batch(step)
        size = layout.micro_batch_size
        full = self.order.global_batch_size
        if layout.pp == 1:  # a pipeline's schedule has one number of them
            full = int(batch.slots[batch.rows >= 0].max(initial=0)) + 1
        rounds = -(-full // (size * layout.data))
        mine = [turn * layout.data + self.mesh.data_rank for turn in range(rounds)]
        picks = [self._pick(batch, j, size) for j in mine]
        longest = [self._longest(rows, slots) for rows, slots in picks]
        if layout.pp > 1:  # a pipeline moves one shape
            longest = [max(longest)] * len(longest)
        real = batch.rows[batch.rows >= 0]
        lengths, targets = self.lengths[real], max(1, int(self.targets[real].sum()))
        count = torch.tensor([targets], dtype=torch.float64)
        micro = [
            self._micro(rows, slots, length, self._key(step, j), count)
            for j, (rows, slots), length in zip(mine, picks, longest, strict=True)
        ]
        if layout.pp > 1 and self.task.objective == "classes":
            micro = self._padded(micro)
        return Work(
            micro=tuple(map(self._pinned, micro)),
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

    def _key(self, step: int, micro: int) -> int:
        cp = self.mesh.place("cp")
        words = np.random.SeedSequence([self.seed, step, micro, *([cp] if cp else [])])
        return int(words.generate_state(1, np.uint64)[0] >> np.uint64(1))

    def _pinned(self, micro: Micro) -> Micro:
        """In memory from which a GPU copies while both go on."""
        if self.mesh.device.type != "cuda":
            return micro
        return micro.with_tensors(tensor.pin_memory() for tensor in micro.tensors())

    def _longest(self, rows: np.ndarray, slots: np.ndarray) -> int:
        """Tokens of the longest sequence, rounded up to what the layout can divide."""
        layout = self.mesh.layout
        lengths = np.where(rows >= 0, self.lengths[np.maximum(rows, 0)], 0)
        longest = self.order.pack_length or int(np.bincount(slots, weights=lengths).max(initial=1))
        unit = layout.tp * (2 * layout.cp if layout.cp > 1 else 1)
        if layout.pp > 1 and self.order.pack_length is None:
            longest = self._rounded(longest)
        return -(-max(longest, 1) // unit) * unit

    def _rounded(self, length: int) -> int:
        """Up to one of `SHAPES` lengths, because a pipeline keeps a schedule for each it has seen,
        with room for what it receives."""
        most = int(self.lengths.max(initial=1))
        grain = -(-most // SHAPES)
        return min(-(-length // grain) * grain, max(most, length))

    def _micro(
        self, rows: np.ndarray, slots: np.ndarray, length: int, key: int, count: torch.Tensor
    ) -> Micro:
        table = self.shards.take(self.split, np.maximum(rows, 0))
        if isinstance(self.task, TokenTask):
            return self._tokens(self.task, table, rows, slots, length, key, count)
        if self.joined:  # shorter ones first: those of like length are one group
            by_length = np.argsort(table.column("input_ids").combine_chunks().value_lengths())
            table, rows = table.take(by_length), rows[by_length]
        labels_B = table.column("label").to_numpy().astype(np.int64)
        weights_B = (rows >= 0).astype(np.float64)
        micro = Micro(
            inputs={} if self.joined else self.task.collate(table, self.settings),
            labels=torch.from_numpy(labels_B),
            weights=torch.from_numpy(weights_B),
            key=key,
            count=count,
        )
        return self._joined(micro, table) if self.joined else micro

    def _joined(self, micro: Micro, table: pa.Table) -> Micro:
        """The texts of the micro-batch one after the other, in one sequence."""
        column = table.column("input_ids").combine_chunks()
        lengths_B = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        ids_F = column.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
        starts_B = np.cumsum(lengths_B) - lengths_B
        positions_F = np.arange(len(ids_F)) - np.repeat(starts_B, lengths_B)
        return dataclasses.replace(
            micro,
            inputs={
                "input_ids": torch.from_numpy(ids_F)[None],
                "position_ids": torch.from_numpy(positions_F)[None],
            },
            targets=torch.from_numpy(starts_B),
            documents=Documents.of_texts(lengths_B.tolist()),
        )

    def _tokens(
        self, task: TokenTask, table: pa.Table, rows: np.ndarray, slots: np.ndarray, length: int,
        key: int, count: torch.Tensor,
    ) -> Micro:  # fmt: skip
        layout = self.mesh.layout
        found = task.collate(table, self.settings, slots=slots, rows=rows, length=length)
        packed = self.order.pack_length is not None
        return micro_of_tokens(found, layout.cp, self.mesh.place("cp"), packed, key, count)

    def _padded(self, micro: list[Micro]) -> list[Micro]:
        """Texts of the same length in all micro-batches of a pipeline."""
        pad = int(self.settings.get("pad_token_id", 0))
        found = [m.inputs["input_ids"].shape[1] for m in micro if "input_ids" in m.inputs]
        if self.joined:
            size = micro[0].labels.numel()
            longest = size * self._rounded(-(-max(found) // size))
            return [self._filled(m, longest, pad) for m in micro]
        longest = self._rounded(max(found, default=1))

        def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if name not in ("input_ids", "attention_mask"):
                return tensor
            value = pad if name == "input_ids" else 0
            return F.pad(tensor, (0, longest - tensor.shape[1]), value=value)

        return [
            dataclasses.replace(m, inputs={name: one(name, t) for name, t in m.inputs.items()})
            for m in micro
        ]

    def _filled(self, micro: Micro, length: int, pad: int) -> Micro:
        """Joined texts, and behind them one more whose result is dropped."""
        assert micro.documents is not None
        room = length - micro.inputs["input_ids"].shape[1]
        if not room:
            return micro
        inputs = {
            name: F.pad(tensor, (0, room), value=pad if name == "input_ids" else 0)
            for name, tensor in micro.inputs.items()
        }
        # in pieces no longer than a text may be: attention costs their square
        most = max(micro.documents.queries)
        rest = [most] * (room // most) + ([room % most] if room % most else [])
        documents = Documents.of_texts([*micro.documents.queries, *rest])
        return dataclasses.replace(micro, inputs=inputs, documents=documents)


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
