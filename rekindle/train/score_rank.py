"""One rank that scores: `torchrun -m rekindle.train.score_rank JOB.json`. At CPU size:
two on gloo.

Contenders follow one another, so that no device ever holds two; the candidate comes last,
and a language model then writes its samples. Rank 0 commits a piece when all ranks have
done their share.

A model is scored in the layout of its training, by the same stages, shards and groups of
ranks; one that the layout cannot hold (a champion of another architecture) is sharded
over all ranks. Every text counts once, alone in its sequence; texts of like length share
a micro-batch, padded on the right. Micro-batch i belongs to data rank i mod
`layout.data`.

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
from rekindle.objectives import scoring_of
from rekindle.objectives.loss import Goal
from rekindle.objectives.micro import Feed, Ints, Micro
from rekindle.records import Sample
from rekindle.spec.layout import resolve
from rekindle.spec.model import LayoutSpec, ModelSpec, TrainSpec
from rekindle.tasks.base import TokenTask
from rekindle.train import modules, pieces, weights
from rekindle.train.loop import Beat, StopFlag
from rekindle.train.mesh import Mesh, of_all, of_first
from rekindle.train.modelfolder import DESCRIPTION, ModelFolder, open_model
from rekindle.train.parallel import build, prepare_network
from rekindle.train.parts import Parts, autocast
from rekindle.train.pieces import ScoreJob, ScoringTurn
from rekindle.train.proof import prove_scores
from rekindle.train.rank import (
    arrange,
    connect,
    free,
    import_for,
    keep_positions,
    run_rank,
    with_precision,
)
from rekindle.train.vitals import Vitals

OWN_FACTOR = 3
"""Of train.hang_seconds, for a user's own way to write samples."""
BEAT_SECONDS = 1.0
MOST_ROWS_AT_ONCE = 64
MOST_TOKENS_AT_ONCE = 1 << 14


def preload(job: str) -> None:
    """Import what ranks of the job in this file will, before they are forked."""
    about = Path(ScoreJob.read(Path(job)).candidate.folder, DESCRIPTION)
    import_for(json.loads(about.read_text())["task"])


def main() -> None:
    run_rank(ScoreJob, _score)


def _score(job: ScoreJob, rank: int, stop: StopFlag, vitals: Vitals) -> dict[str, object]:
    """Score what is missing; how it ended, for the supervisor."""
    device = connect()
    _refuse_other_precisions(job.train)
    arrange(with_precision(job.train, device, began=None), device)
    scoring = Scoring(job, device, stop, vitals.beat)
    is_complete = all(scoring.score_contender(turn) for turn in job.turns)
    return {"status": "done" if is_complete else "preempted"}


def _refuse_other_precisions(train: TrainSpec) -> None:
    """Each node decides `auto` by its own GPUs: UnsupportedError where they decide differently."""
    numbers_of_ranks = of_all((train.precision, train.weights))
    if len(set(numbers_of_ranks)) > 1:
        precisions = " and ".join(sorted({precision for precision, _ in numbers_of_ranks}))
        message = f"the nodes that score differ: they would compute in {precisions}"
        fix = "give all nodes the same GPUs, or set train.precision to fp32, which trains again"
        raise UnsupportedError(message, where="train.precision", fix=fix)


class Scoring:
    """One rank's work for all contenders of a job; all ranks call each method alike."""

    def __init__(self, job: ScoreJob, device: torch.device, stop: StopFlag, beat: Beat) -> None:
        self.job = job
        self.device = device
        self.stop = stop
        self.beat = beat
        self.examples = open_examples(Path(job.examples), pieces.TEST)
        self.count = pieces.piece_count(self.examples)
        self.leads = dist.get_rank() == 0

    def score_contender(self, turn: ScoringTurn) -> bool:
        """Score what is missing of one contender; False after a request to stop."""
        names = pieces.names_of(self.job, turn, self.count)
        missing = of_first(turn.missing(names) if self.leads else [])
        opened = open_model(Path(turn.folder), self.job.code)
        writes = turn == self.job.candidate and isinstance(opened.task, TokenTask)
        if not missing and not (writes and self._unwritten(turn)):
            return True
        self.beat(0, "start")
        model = LoadedModel.of(opened, self.job.train, self.device)
        if self.device.type == "cuda":
            keep_positions(model.parts)
        if self.leads:
            self._announce(turn, model, len(missing), len(names))
        for name in missing:
            if not self._score_piece(turn, model, name):
                return False
        if writes:
            self._write_samples(turn, model)
        if turn != self.job.candidate:
            del model
            free(self.device)
        return True

    def _announce(self, turn: ScoringTurn, model: "LoadedModel", missing: int, count: int) -> None:
        layout = model.mesh.layout
        text = f"scoring the {turn.who} on {dist.get_world_size()} ranks in {model.train.precision}"
        if not layout.only_replicates:
            text += f", {layout}"
        if missing < count:
            text += f", {missing} of {count} pieces are left"
        emit("notice", text=text)

    def _score_piece(self, turn: ScoringTurn, model: "LoadedModel", name: pieces.Name) -> bool:
        """Score and commit one piece; False after a request to stop."""
        # golden rows have a name; they follow the last piece
        number = name if isinstance(name, int) else self.count - 1
        golden = pieces.golden_of(self.job) if isinstance(name, str) else None
        rows = golden[1] if golden else pieces.read_piece(self.examples, number)
        encoded = encode(model.opened, rows)

        def is_stopping(rows_done: int) -> bool:
            self.beat(number + 1, "score")
            if self.leads:
                share = number + rows_done / len(rows)
                emit("progress", step=round(share, 2), steps=self.count, unit=f"{turn.who}: piece")
            raised = torch.tensor([float(self.stop.raised)])
            dist.all_reduce(raised)  # whether any rank was asked to stop
            return bool(raised > 0)

        sums = model.score(encoded, is_stopping)
        if sums is None:
            return False
        if self.leads:
            scored_N = np.ones(len(rows), bool)
            if "input_ids" in encoded.column_names:
                scored_N = np.asarray(encoded.column("input_ids").is_valid(), bool)
            columns = {
                "hash": rows.column("hash"),
                "scored": pa.array(scored_N),
                **model.scoring.columns(encoded, sums.numpy(), model.opened.settings),
            }
            turn.put(name, pa.table(columns))
        return True

    def _unwritten(self, turn: ScoringTurn) -> tuple[str, list[pieces.Opening]] | None:
        """The texts that the candidate has not gone on with yet, and their name."""
        unwritten: tuple[str, list[pieces.Opening]] | None = None
        if self.leads:
            name, openings = pieces.openings_of(self.job)
            if openings and turn.samples(name) is None:
                unwritten = name, openings
        return of_first(unwritten)

    def _write_samples(self, turn: ScoringTurn, model: "LoadedModel") -> None:
        """Have the candidate go on with a few texts, and keep what it writes."""
        unwritten = self._unwritten(turn)
        if unwritten is None:
            return
        name, openings = unwritten
        opened = model.opened
        task = opened.task
        assert isinstance(task, TokenTask)
        prompts = [prompt for prompt, _ in openings]
        arguments = prompts, opened.settings, opened.path, pieces.SAMPLE_TOKENS
        if opened.own_task:
            texts = self._wait_for(lambda: task.generate(opened.network(), *arguments))
        else:
            writer: Any = TokenWriter(model, lambda: self.beat(self.count, "score"))
            texts = task.generate(writer, *arguments)
        if self.leads:
            samples = []
            for (prompt, expected), text in zip(openings, texts, strict=True):
                # a dialogue may begin with its answer: then there is nothing before it
                shown = prompt[-1][1][-pieces.SAMPLE_CHARACTERS :] if prompt else ""
                samples.append(Sample(prompt=shown, generated=text, expected=expected))
            turn.put_samples(name, tuple(samples))

    def _wait_for(self, write: Callable[[], list[str]]) -> list[str]:
        """What a user's task writes, in a thread, while all beat; StepError beyond a limit."""
        limit_seconds = OWN_FACTOR * self.job.train.hang_seconds
        deadline = time.monotonic() + limit_seconds
        writing = ThreadPoolExecutor(1).submit(write) if self.leads else None
        while of_first(writing is not None and not wait([writing], BEAT_SECONDS).done):
            self.beat(self.count, "score")
            if writing is not None and time.monotonic() > deadline:
                message = f"the task's own `generate` has not ended within {limit_seconds:g} s"
                raise StepError(message, fix="make it faster on a CPU, or raise train.hang_seconds")
        return writing.result() if writing is not None else []


@dataclasses.dataclass(frozen=True)
class ScoreBatch:
    """A micro-batch on the host."""

    micro: Micro
    places: torch.Tensor
    """int64 [N]: what each result is added to."""
    counts: bool
    """False: it only keeps this rank in step with those that have one more."""


class LoadedModel:
    """A model on the ranks; all of them have to call each method alike."""

    def __init__(self, opened: ModelFolder, train: TrainSpec, parts: Parts) -> None:
        self.opened = opened
        self.train = train
        self.parts = parts
        self.mesh = parts.mesh
        self.scoring = scoring_of(opened.task.objective)
        self.feed = Feed(self.mesh.device, train.precision)
        self.pipeline = None
        if self.mesh.layout.pp > 1:
            from rekindle.train.pipeline import Pipeline  # torch's part of it takes a second

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
    def score(self, encoded: pa.Table, is_stopping: Callable[[int], bool]) -> torch.Tensor | None:
        """float64 [places, `Scoring.width`], what the objective adds up; the same on
        all ranks.

        Rows whose `input_ids` are null score nothing. `is_stopping` is asked before each
        micro-batch, with the number of rows done; where it says so the work ends with
        None."""
        places = self.scoring.places(encoded)
        width = self.scoring.width(self.opened.labels)
        sums = torch.zeros(int(places[-1]), width, dtype=torch.float64)
        rows_done = 0
        for batch, rows in self._batches(encoded, places):
            if is_stopping(rows_done):
                return None
            result = self._forward(batch)
            if self._speaks(batch):
                values = self.scoring.sums(result.cpu().double(), batch.micro)
                sums.index_add_(0, batch.places, values)
            rows_done += rows
        dist.all_reduce(sums)
        return sums

    @torch.no_grad()
    def next_token(self, ids: list[int]) -> int:
        """The most probable token behind `ids`; the same on all ranks."""
        marks = pa.array([[0] * len(ids)], pa.list_(pa.uint8()))
        table = pa.table({"input_ids": pa.array([ids], pa.list_(pa.int32())), "supervised": marks})
        row = np.zeros(1, np.int64)
        leads = self.mesh.data_rank == 0
        batch = self._batch(table, np.arange(2), row, leads, asked=len(ids) - 1)
        token_11 = torch.zeros(1, 1, dtype=torch.float64)
        result = self._forward(batch)
        if self._speaks(batch):
            token_11[: len(result)] += result[:, 1:].cpu()
        dist.all_reduce(token_11)
        return int(token_11)

    def _speaks(self, batch: ScoreBatch) -> bool:
        """Whether this rank's result counts: on the last stage, of tp and cp peers once."""
        if not batch.counts or self.mesh.place("tp"):
            return False
        if self.mesh.place("cp") and not self.opened.task.kind.divided_by_cp:
            return False
        return any(stage.part.last for stage in self.parts.stages)

    def _forward(self, batch: ScoreBatch) -> torch.Tensor:
        """What the last stage makes of a micro-batch; nothing on ranks without it."""
        (micro,) = self.feed([batch.micro])
        for stage in self.parts.stages:
            stage.part.results.clear()
        with autocast(self.train.precision, self.mesh.device):
            if self.pipeline is not None:
                self.pipeline.forward([micro])
            else:
                self.parts.stages[0].part(micro=micro)
        for stage in self.parts.stages:
            if stage.part.results:
                return stage.part.results[0]
        return torch.zeros(0, 2)

    def _batches(self, encoded: pa.Table, places: Ints) -> Iterator[tuple[ScoreBatch, int]]:
        """This rank's micro-batches, as many as each data rank has, and all ranks' rows in each."""
        rows_N = np.arange(len(encoded))
        if "input_ids" in encoded.column_names:
            rows_N = rows_N[np.asarray(encoded.column("input_ids").is_valid(), bool)]
        lengths_N = row_tokens(encoded.take(pa.array(rows_N)))
        by_length_N = np.argsort(lengths_N, kind="stable")
        rows_N = rows_N[by_length_N]
        lengths_N = lengths_N[by_length_N]
        # without gradients, four times as many as in training surely fit
        most_rows = min(MOST_ROWS_AT_ONCE, 4 * self.mesh.layout.micro_batch_size)
        cuts = list(_cuts(lengths_N, self.scoring.rows_at_once(most_rows)))
        data_ranks = self.mesh.layout.data
        for first in range(0, len(cuts), data_ranks):
            rows_of_all = sum(stop - start for start, stop in cuts[first : first + data_ranks])
            mine = first + self.mesh.data_rank
            counts = mine < len(cuts)
            start, stop = cuts[mine] if counts else (0, 1)
            yield self._batch(encoded, places, rows_N[start:stop], counts), rows_of_all

    def _batch(
        self, encoded: pa.Table, places: Ints, rows: np.ndarray, counts: bool, **asked: int
    ) -> ScoreBatch:
        """A micro-batch of `rows`; `asked` as the objective's `alone` has it."""
        table = encoded.take(pa.array(rows))
        micro, owners = self.scoring.alone(self.opened, table, self.mesh, **asked)
        places_of_rows = [np.arange(places[row], places[row + 1]) for row in rows]
        return ScoreBatch(micro, torch.from_numpy(np.concatenate(places_of_rows))[owners], counts)


def encode(opened: ModelFolder, rows: pa.Table) -> pa.Table:
    """The examples as the model's own tokenizer cuts them."""
    batches = rows.combine_chunks().to_batches()
    batch = batches[0] if batches else pa.RecordBatch.from_pylist([], rows.schema)
    return pa.table(opened.task.encode(batch, opened.settings, opened.path))


class TokenWriter:
    """What a task's `generate` takes for a network: the most probable token again and again."""

    def __init__(self, model: LoadedModel, on_token: Callable[[], None]) -> None:
        self.model = model
        self.on_token = on_token
        self.config: Any = model.parts.network.config

    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        eos_token_id: int | list[int],
        **_: object,
    ) -> torch.Tensor:
        """[1, T]: the tokens given and those behind them, up to one that ends the text."""
        stops = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
        ids = input_ids[0].tolist()
        while len(ids) < input_ids.shape[1] + max_new_tokens:
            self.on_token()
            # where scores are not numbers, no token is the most probable one
            ids.append(min(self.model.next_token(ids), self.config.vocab_size - 1))
            if ids[-1] in stops:
                break
        return torch.tensor([ids])


def _cuts(lengths_N: np.ndarray, rows: int | None) -> Iterator[tuple[int, int]]:
    """Where micro-batches start and end: of `rows` each, or of `MOST_TOKENS_AT_ONCE` once
    padded.

    `lengths_N` grow, so that the last row of a micro-batch is its longest."""
    start = 0
    for stop in range(1, len(lengths_N) + 1):
        if stop < len(lengths_N):
            if rows is None:
                has_room = (stop + 1 - start) * lengths_N[stop] <= MOST_TOKENS_AT_ONCE
            else:
                has_room = stop - start < rows
            if has_room:
                continue
        yield start, stop
        start = stop


def _parts(opened: ModelFolder, train: TrainSpec, device: torch.device) -> Parts:
    """The trained weights in place, each rank its share of them: no engine takes part in it."""
    train = train.model_copy(update={"engine": "rekindle"})
    task = opened.task
    folder = opened.path
    as_source = ModelSpec(source=str(folder))
    source = None
    if not opened.own_task and task.weights(as_source) is not None:
        with weights.deferred() as recorder:
            network = task.build(as_source, opened.labels, opened.settings, folder)
        source = weights.WeightSource(network, recorder, 0, folder)
    else:
        network = opened.network()
    mesh = Mesh.of(resolve(train, dist.get_world_size(), modules.shape_of(network)), device)
    origins = modules.unfused(network)
    prepare_network(network, source, origins, train)
    parts = build(task, network, origins, train, Goal(), mesh, scores=True)
    if source is not None:
        weights.fill(parts.networks, source, parts.origins)
    return parts


if __name__ == "__main__":
    main()
