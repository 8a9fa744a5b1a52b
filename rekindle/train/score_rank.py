"""One rank that scores: `torchrun -m rekindle.train.score_rank JOB.json`. At CPU size: two on gloo.

Contenders follow one another, so that no device ever holds two; the candidate comes last, and a
language model then writes its samples. Rank 0 commits a piece when all ranks have done their share.

A model is scored in the layout of its training, by the same stages, shards and groups of ranks; one
that the layout cannot hold (a champion of another architecture) is sharded over all ranks. Every
text counts once, alone in its sequence; texts of like length share a micro-batch, padded on the
right. Micro-batch i belongs to data rank i mod `layout.data`.

Shapes: N examples, T tokens."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rekindle.data.examples import open_examples
from rekindle.data.manifest import row_tokens
from rekindle.errors import RequestError, StepError, UnsupportedError
from rekindle.launch.events import emit
from rekindle.records import Sample
from rekindle.spec.layout import resolve
from rekindle.spec.model import LayoutSpec, ModelSpec, TrainSpec
from rekindle.tasks.base import TokenTask
from rekindle.train import modules, pieces, weights
from rekindle.train.loop import Beat, StopFlag
from rekindle.train.mesh import Mesh, of_all, of_first
from rekindle.train.micro import Feed, Ints, Micro
from rekindle.train.modelfolder import DESCRIPTION, ModelFolder, open_model
from rekindle.train.objectives import objective_of
from rekindle.train.parallel import Parts, autocast, build, prepared
from rekindle.train.part import Goal
from rekindle.train.pieces import ScoreJob, Turn
from rekindle.train.proof import prove_scores
from rekindle.train.rank import arrange, connect, decided, free, import_for, keep_positions, live
from rekindle.train.vitals import Vitals

OWN_FACTOR = 3  # of train.hang_seconds, for a user's own way to write samples
BEAT_SECONDS = 1.0


def preload(job: str) -> None:
    """Import what ranks of the job in this file will, before they are forked."""
    about = Path(ScoreJob.read(Path(job)).candidate.folder, DESCRIPTION)
    import_for(json.loads(about.read_text())["task"])


def main() -> None:
    live(ScoreJob, _score)


def _score(job: ScoreJob, rank: int, stop: StopFlag, vitals: Vitals) -> dict[str, object]:
    device = connect()
    # each node decides `auto` by its GPUs
    everyone: list[tuple[str, str]] = of_all((job.train.precision, job.train.weights))
    if len(set(everyone)) > 1:
        found = " and ".join(sorted({precision for precision, _ in everyone}))
        what = f"the nodes that score differ: they would compute in {found}"
        fix = "give all nodes the same GPUs, or set train.precision to fp32, which trains again"
        raise UnsupportedError(what, where="train.precision", fix=fix)
    arrange(decided(job.train, device, began=None), device)
    work = Work(job, device, stop, vitals.beat)
    complete = all(work.work_on(turn) for turn in job.turns)
    return {"status": "done" if complete else "preempted"}


class Work:
    def __init__(self, job: ScoreJob, device: torch.device, stop: StopFlag, beat: Beat) -> None:
        self.job, self.device, self.stop, self.beat = job, device, stop, beat
        self.examples = open_examples(Path(job.examples), pieces.TEST)
        self.count = pieces.piece_count(self.examples)
        self.leads = dist.get_rank() == 0

    def work_on(self, turn: Turn) -> bool:
        """Score what is missing of one contender; False after a request to stop."""
        names = pieces.names_of(self.job, turn, self.count)
        missing = of_first(turn.missing(names) if self.leads else [])
        opened = open_model(Path(turn.folder), self.job.code)
        writes = turn == self.job.candidate and isinstance(opened.task, TokenTask)
        if not missing and not (writes and self._unwritten(turn)):
            return True
        self.beat(0, "start")
        loaded = Loaded.of(opened, self.job.train, self.device)
        if self.device.type == "cuda":
            keep_positions(loaded.parts)
        if self.leads:
            layout, left = loaded.mesh.layout, f"{len(missing)} of {len(names)} pieces are left"
            where = "" if layout.only_replicates else f", {layout}"
            where += "" if len(missing) == len(names) else f", {left}"
            how = f"on {dist.get_world_size()} ranks in {loaded.train.precision}"
            emit("notice", text=f"scoring the {turn.who} {how}{where}")
        for name in missing:
            if not self._score_piece(turn, loaded, name):
                return False
        if writes:
            self._write_samples(turn, loaded)
        if turn != self.job.candidate:
            del loaded
            free(self.device)
        return True

    def _score_piece(self, turn: Turn, loaded: "Loaded", name: pieces.Name) -> bool:
        number = name if isinstance(name, int) else self.count - 1
        golden = pieces.golden_of(self.job) if isinstance(name, str) else None
        rows = golden[1] if golden else pieces.read_piece(self.examples, number)
        encoded = encode(loaded.opened, rows)

        def on_turn(done: int) -> bool:
            self.beat(number + 1, "score")
            if self.leads:
                share = number + done / len(rows)
                emit("progress", step=round(share, 2), steps=self.count, unit=f"{turn.who}: piece")
            raised = torch.tensor([float(self.stop.raised)])
            dist.all_reduce(raised)  # whether any rank was asked to stop
            return bool(raised > 0)

        sums = loaded.score(encoded, on_turn)
        if sums is None:
            return False
        if self.leads:
            columns = loaded.objective.columns(encoded, sums.numpy(), loaded.opened.settings)
            scored_N = np.ones(len(rows), bool)
            if "input_ids" in encoded.column_names:
                scored_N = np.asarray(encoded.column("input_ids").is_valid(), bool)
            facts = {"hash": rows.column("hash"), "scored": pa.array(scored_N)}
            turn.put(name, pa.table({**facts, **columns}))
        return True

    def _unwritten(self, turn: Turn) -> tuple[str, list[pieces.Opening]] | None:
        """The texts that the candidate has not gone on with yet, and their name."""
        found = pieces.openings_of(self.job) if self.leads else None
        if found is not None and (not found[1] or turn.samples(found[0]) is not None):
            found = None
        return of_first(found)  # type: ignore[no-any-return]

    def _write_samples(self, turn: Turn, loaded: "Loaded") -> None:
        found = self._unwritten(turn)
        if found is None:
            return
        name, openings = found
        opened, task = loaded.opened, loaded.opened.task
        assert isinstance(task, TokenTask)
        prompts = [turns for turns, _ in openings]
        given = prompts, opened.settings, opened.path, pieces.SAMPLE_TOKENS
        if opened.own_task:
            texts = self._waited_for(lambda: task.generate(opened.network(), *given))
        else:
            writer: Any = Writer(loaded, lambda: self.beat(self.count, "score"))
            texts = task.generate(writer, *given)
        if self.leads:
            # a dialogue may begin with its answer
            shown = (p[-1][1][-pieces.SAMPLE_CHARACTERS :] if p else "" for p in prompts)
            rows = zip(shown, texts, (expected for _, expected in openings), strict=True)
            samples = (Sample(prompt=p, generated=text, expected=e) for p, text, e in rows)
            turn.put_samples(name, tuple(samples))

    def _waited_for(self, write: Callable[[], list[str]]) -> list[str]:
        """What a user's task writes, in a thread, while all beat; StepError beyond a limit."""
        limit = OWN_FACTOR * self.job.train.hang_seconds
        deadline = time.monotonic() + limit
        done = ThreadPoolExecutor(1).submit(write) if self.leads else None
        while of_first(done is not None and not wait([done], BEAT_SECONDS).done):
            self.beat(self.count, "score")
            if done is not None and time.monotonic() > deadline:
                what = f"the task's own `generate` has not ended within {limit:g} s"
                raise StepError(what, fix="make it faster on a CPU, or raise train.hang_seconds")
        return done.result() if done is not None else []


ROWS_AT_ONCE = 64
TOKENS_AT_ONCE = 1 << 14


@dataclasses.dataclass(frozen=True)
class Batch:
    """A micro-batch on the host; `places`: what each result is added to. It may not count."""

    micro: Micro
    places: torch.Tensor
    counts: bool


class Loaded:
    """A model on the ranks; all of them have to call each method alike."""

    def __init__(self, opened: ModelFolder, train: TrainSpec, parts: Parts) -> None:
        self.opened, self.train, self.parts, self.mesh = opened, train, parts, parts.mesh
        self.objective = objective_of(opened.task)
        self.feed = Feed(self.mesh.device, train.precision)
        self.pipeline = None
        if self.mesh.layout.pp > 1:
            from rekindle.train.pipeline import Pipeline

            self.pipeline = Pipeline(parts)
        for stage in parts.stages:
            stage.part.eval()

    @classmethod
    def of(cls, opened: ModelFolder, train: TrainSpec, device: torch.device) -> Self:
        """The model in the layout that `train` asks for, or sharded over all ranks."""
        try:
            parts = _parts(opened, train, device)
        except (RequestError, UnsupportedError) as refusal:
            world = dist.get_world_size()
            if train.layout == "auto" or train.layout == LayoutSpec(shard=world):
                raise
            text = f"scored with its weights sharded over {world} ranks: {refusal.problems[0].what}"
            if dist.get_rank() == 0:
                emit("notice", text=text)
            train = train.model_copy(update={"layout": LayoutSpec(shard=world)})
            parts = _parts(opened, train, device)
        prove_scores(opened.task, opened.settings, opened.labels, parts, train)
        return cls(opened, train, parts)

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
        marks = pa.array([[0] * len(ids)], pa.list_(pa.uint8()))
        table = pa.table({"input_ids": pa.array([ids], pa.list_(pa.int32())), "supervised": marks})
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
        """Whether this rank's result counts: on the last stage, of tp and cp peers once."""
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
        """This rank's micro-batches, as many as each data rank has, and all ranks' rows in each."""
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
        table = encoded.take(pa.array(rows))
        micro, owners = self.objective.alone(self.opened, table, self.mesh, **asked)
        theirs = np.concatenate([np.arange(places[row], places[row + 1]) for row in rows])
        return Batch(micro, torch.from_numpy(theirs)[owners], counts)


def encode(opened: ModelFolder, rows: pa.Table) -> pa.Table:
    """The examples as the model's own tokenizer cuts them."""
    batches = rows.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)
    return pa.table(opened.task.encode(batch, opened.settings, opened.path))


class Writer:
    """What a task's `generate` takes for a network: the most probable token again and again."""

    def __init__(self, loaded: Loaded, on_token: Callable[[], None]) -> None:
        self.loaded, self.on_token = loaded, on_token
        self.config: Any = loaded.parts.network.config

    def generate(
        self, input_ids: torch.Tensor, max_new_tokens: int, eos_token_id: int | list[int], **_: Any
    ) -> torch.Tensor:
        """[1, T]: the tokens given and those behind them, up to one that ends the text."""
        stops = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
        ids = input_ids[0].tolist()
        while len(ids) < input_ids.shape[1] + max_new_tokens:
            self.on_token()
            # where scores are not numbers, no token is the most probable one
            ids.append(min(self.loaded.next_token(ids), self.config.vocab_size - 1))
            if ids[-1] in stops:
                break
        return torch.tensor([ids])


def _cuts(lengths_N: np.ndarray, rows: int | None) -> Iterator[tuple[int, int]]:
    """Where micro-batches start and end: of `rows` each, or of `TOKENS_AT_ONCE` once padded."""
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
    """The trained weights in place, each rank its share of them: no engine takes part in it."""
    train = train.model_copy(update={"engine": "rekindle"})
    task, folder = opened.task, opened.path
    as_source = ModelSpec(source=str(folder))
    source = None
    if not opened.own_task and task.weights(as_source) is not None:
        with weights.deferred() as recorder:
            network = task.build(as_source, opened.labels, opened.settings, folder)
        source = weights.Source(network, recorder, 0, folder)
    else:
        network = opened.network()
    mesh = Mesh.of(resolve(train, dist.get_world_size(), modules.shape_of(network)), device)
    origins = modules.unfused(network)
    prepared(network, source, origins, train)
    parts = build(task, network, origins, train, Goal(), mesh, scores=True)
    if source is not None:
        weights.fill([stage.part.network for stage in parts.stages], source, parts.origins)
    return parts


if __name__ == "__main__":
    main()
