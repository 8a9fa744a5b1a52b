"""A trained model in the layout of its training, and what it makes of examples.

`Scorer` stands where training has `Part`: it returns what each target scores instead of one sum,
so that the same stages, shards and groups of ranks serve. A model that the layout cannot hold (a
champion of another architecture) is sharded over all ranks instead. Every text counts once, alone
in its sequence; texts of like length share a micro-batch, padded on the right, which a causal model
never looks at. Micro-batch i belongs to data rank i mod `layout.data`.

Shapes: N examples, B of them in a micro-batch, T tokens, H hidden, V vocabulary, F targets, C
classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rekindle.data.manifest import row_tokens
from rekindle.errors import DataError, RequestError, UnsupportedError
from rekindle.launch.events import emit
from rekindle.spec.layout import resolve
from rekindle.spec.model import LayoutSpec, ModelSpec, TrainSpec
from rekindle.train import modules, weights
from rekindle.train.mesh import Mesh
from rekindle.train.micro import Feed, Ints, Micro, Tensors
from rekindle.train.modelfolder import ModelFolder
from rekindle.train.objectives import objective_of
from rekindle.train.parallel import Parts, autocast, build, prepared
from rekindle.train.part import Goal, Part
from rekindle.train.weights import Source

ROWS_AT_ONCE = 64
TOKENS_AT_ONCE = 1 << 14


class Scorer(Part):
    """One stage of a network that is scored: on the last one float [F, 2], the loss in nats and the
    most probable token of each target, or the logits [B, C]; hidden states on the others."""

    def made(self, batch: Tensors, micro: Micro) -> torch.Tensor:
        return self.objective.score(self, batch, micro)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch on the host, and the place that each result of the model is added to (see
    `Objective.places`). One that does not count keeps the ranks in step."""

    micro: Micro
    places: torch.Tensor
    counts: bool


class Loaded:
    """A model on the ranks; all of them have to call each method alike."""

    def __init__(self, opened: ModelFolder, train: TrainSpec, parts: Parts) -> None:
        self.opened, self.train, self.parts, self.mesh = opened, train, parts, parts.mesh
        self.objective = objective_of(opened.task)
        exact = torch.float64 if train.precision == "fp64" else torch.float32
        self.feed = Feed(self.mesh.device, exact)
        self.pipeline = None
        if self.mesh.layout.pp > 1:
            from rekindle.train.pipeline import Pipeline

            self.pipeline = Pipeline(parts)
        for stage in parts.stages:
            stage.part.eval()

    @classmethod
    def of(cls, opened: ModelFolder, train: TrainSpec, device: torch.device) -> Loaded:
        """The model in the layout that `train` asks for, or sharded over all ranks."""
        try:
            return cls(opened, train, _parts(opened, train, device))
        except (RequestError, UnsupportedError) as refusal:
            world = dist.get_world_size()
            if train.layout == "auto" or train.layout == LayoutSpec(shard=world):
                raise
            text = f"scored with its weights sharded over {world} ranks: {refusal.problems[0].what}"
            if dist.get_rank() == 0:
                emit("notice", text=text)
            train = train.model_copy(update={"layout": LayoutSpec(shard=world)})
            return cls(opened, train, _parts(opened, train, device))

    @torch.no_grad()
    def score(self, encoded: pa.Table, on_turn: Callable[[int], bool]) -> torch.Tensor | None:
        """float64 [places, `Objective.width`], what the objective adds up; the same on all
        ranks. Rows whose `input_ids` are null score nothing. `on_turn` is called before each
        micro-batch with the number of rows done; where it says so the work ends with None."""
        width, places = self.objective.width(self.opened.labels), self.objective.places(encoded)
        sums = torch.zeros(int(places[-1]), width, dtype=torch.float64)
        done = 0
        for batch, rows in self._batches(encoded, places):
            if on_turn(done):
                return None
            result = self._forward(batch)
            if self._speaks(batch):
                values = self.objective.sums(result.cpu().double(), batch.micro)
                sums.index_add_(0, batch.places, values)
            done += rows
        dist.all_reduce(sums)
        return sums

    @torch.no_grad()
    def next_token(self, ids: list[int]) -> int:
        """The most probable token behind `ids`; the same on all ranks."""
        table = pa.table({
            "input_ids": pa.array([ids], pa.list_(pa.int32())),
            "supervised": pa.array([[0] * len(ids)], pa.list_(pa.uint8())),
        })  # fmt: skip
        leads = self.mesh.data_rank == 0
        row = np.zeros(1, np.int64)
        batch = self._batch(table, np.arange(2), row, leads, asked=len(ids) - 1)
        token_11 = torch.zeros(1, 1, dtype=torch.float64)
        result = self._forward(batch)
        if self._speaks(batch):
            token_11[: len(result)] += result[:, 1:].cpu()
        dist.all_reduce(token_11)
        return int(token_11)

    def _speaks(self, batch: Batch) -> bool:
        """Whether this rank's result counts: tp peers have the same, and so have cp peers unless
        they divide the targets; only the last stage has any."""
        place, last = self.mesh.place, any(stage.part.last for stage in self.parts.stages)
        divided = self.objective.divided_by_cp
        return batch.counts and last and not place("tp") and (divided or not place("cp"))

    def _forward(self, batch: Batch) -> torch.Tensor:
        """What the last stage makes of a micro-batch; nothing on ranks without it."""
        (micro,) = self.feed([batch.micro])
        for stage in self.parts.stages:
            stage.part.results.clear()
        with autocast(self.train.precision, self.mesh.device):
            if self.pipeline is not None:
                self.pipeline.forward([micro])
            else:
                self.parts.stages[0].part(micro=micro)
        found = [result for stage in self.parts.stages for result in stage.part.results]
        return found[0] if found else torch.zeros(0, 2)

    def _batches(self, encoded: pa.Table, places: Ints) -> Iterator[tuple[Batch, int]]:
        """This rank's micro-batches, as many as every data rank has, and how many rows all data
        ranks together have in this turn."""
        rows_N = np.arange(len(encoded))
        if "input_ids" in encoded.column_names:
            rows_N = rows_N[np.asarray(encoded.column("input_ids").is_valid(), bool)]
        lengths_N = row_tokens(encoded.take(pa.array(rows_N)))
        by_length_N = np.argsort(lengths_N, kind="stable")
        rows_N, lengths_N = rows_N[by_length_N], lengths_N[by_length_N]
        # without gradients, four times as many as in training surely fit
        rows = min(ROWS_AT_ONCE, 4 * self.mesh.layout.micro_batch_size)
        cuts = list(_cuts(lengths_N, self.objective.rows_at_once(rows)))
        data = self.mesh.layout.data
        for turn in range(0, len(cuts), data):
            now, mine = cuts[turn : turn + data], turn + self.mesh.data_rank
            start, stop = cuts[mine] if mine < len(cuts) else (0, 1)
            batch = self._batch(encoded, places, rows_N[start:stop], mine < len(cuts))
            yield batch, sum(stop - start for start, stop in now)

    def _batch(
        self, encoded: pa.Table, places: Ints, rows: np.ndarray, counts: bool, **asked: int
    ) -> Batch:
        """A micro-batch of `rows`; `asked` as the objective's `alone` has it."""
        micro, owners = self.objective.alone(
            self.opened.task, encoded.take(pa.array(rows)), self.opened.settings, self.mesh.layout,
            self.mesh.place("cp"), **asked,
        )  # fmt: skip
        theirs = np.concatenate([np.arange(places[row], places[row + 1]) for row in rows])
        return Batch(micro, torch.from_numpy(theirs)[owners], counts)


def encode(opened: ModelFolder, rows: pa.Table) -> pa.Table:
    """The examples as the model's own tokenizer cuts them."""
    batches = rows.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)
    return pa.table(opened.task.encode(batch, opened.settings, opened.path))


class Writer:
    """What a task's `generate` takes for a network: the most probable token again and again, in
    any layout. Every rank has to call it."""

    def __init__(self, loaded: Loaded, on_token: Callable[[], None]) -> None:
        self.loaded, self.on_token = loaded, on_token
        self.config: Any = loaded.parts.network.config

    def generate(
        self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_id: int, **_: Any
    ) -> torch.Tensor:
        """[1, T]: the tokens given and those behind them, up to the end of the text."""
        ids = input_ids[0].tolist()
        while len(ids) < input_ids.shape[1] + max_new_tokens:
            self.on_token()
            # where scores are not numbers, no token is the most probable one
            ids.append(min(self.loaded.next_token(ids), self.config.vocab_size - 1))
            if ids[-1] == eos_token_id:
                break
        return torch.tensor([ids])


def _cuts(lengths_N: np.ndarray, rows: int | None) -> Iterator[tuple[int, int]]:
    """Where micro-batches start and end, of rows in the order of `lengths_N`: `rows` each, or as
    many as fit into `TOKENS_AT_ONCE` once padded."""
    start = 0
    while start < len(lengths_N):
        stop = start + 1
        while stop < len(lengths_N) and (
            (stop + 1 - start) * lengths_N[stop] <= TOKENS_AT_ONCE
            if rows is None
            else stop - start < rows
        ):
            stop += 1
        yield start, stop
        start = stop


def _parts(opened: ModelFolder, train: TrainSpec, device: torch.device) -> Parts:
    """The trained weights in place, each rank its share of them."""
    task, folder = opened.task, opened.path
    as_source = ModelSpec(source=str(folder))
    source = None
    if not opened.own_task and task.weights(as_source) is not None:
        with weights.deferred() as recorder:
            network = task.build(as_source, opened.labels, opened.settings, folder)
        source = Source(network, recorder, 0, folder)
    else:
        network = opened.network()
    layout = resolve(train, dist.get_world_size(), modules.shape_of(network))
    mesh = Mesh.of(layout, device)
    origins = modules.unfused(network)
    prepared(network, source, origins, train)
    parts = build(task, network, origins, train, Goal(), mesh, kind=Scorer)
    if source is not None:
        weights.fill([stage.part.network for stage in parts.stages], source, parts.origins)
        if source.fresh:
            what = f"the model lacks {', '.join(source.fresh[:5])}"
            fix = "train it again: its folder is not complete"
            raise DataError(what, where=str(folder), fix=fix)
    return parts
