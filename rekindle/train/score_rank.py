"""One rank that scores: `torchrun -m rekindle.train.score_rank JOB.json`. At CPU size: two of these
on gloo.

The contenders follow one another, so that no device ever holds two; the candidate comes last, and a
language model then writes its samples. Rank 0 decides which pieces are missing, and commits a piece
when all ranks have done their share of it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from rekindle.data.examples import open_examples
from rekindle.errors import StepError, UnsupportedError
from rekindle.launch.events import emit
from rekindle.launch.heartbeats import Phase
from rekindle.records import Sample
from rekindle.tasks.base import TokenTask
from rekindle.train import pieces
from rekindle.train.loop import StopFlag
from rekindle.train.mesh import of_all, of_first
from rekindle.train.modelfolder import open_model
from rekindle.train.pieces import ScoreJob, Turn
from rekindle.train.rank import arrange, connect, decided, keep_positions, live, say
from rekindle.train.scorer import Loaded, Writer, encode
from rekindle.train.vitals import Vitals

OWN_FACTOR = 3  # of train.hang_seconds, for a user's own way to write samples
BEAT_SECONDS = 1.0


def main() -> None:
    """Read the job, score, leave."""
    live(ScoreJob, _score)


def _score(job: ScoreJob, rank: int, stop: StopFlag, vitals: Vitals) -> None:
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
    complete = all(work.score(turn) for turn in job.turns)
    if rank == 0:
        say(Path(job.status), {"status": "done" if complete else "preempted"})


class Work:
    """One rank's share of the work."""

    def __init__(
        self, job: ScoreJob, device: torch.device, stop: StopFlag,
        beat: Callable[[int, Phase], None],
    ) -> None:  # fmt: skip
        self.job, self.device, self.stop, self.beat = job, device, stop, beat
        self.examples = open_examples(Path(job.examples), pieces.TEST)
        self.count = pieces.piece_count(self.examples)
        self.leads = dist.get_rank() == 0

    def score(self, turn: Turn) -> bool:
        """Score what is missing of one contender; False after a request to stop."""
        missing = of_first(turn.pieces.missing(self.count) if self.leads else [])
        opened = open_model(Path(turn.folder), self.job.code)
        writes = turn == self.job.candidate and isinstance(opened.task, TokenTask)
        if not missing and not (writes and self._unwritten(turn)):
            return True
        self.beat(0, "start")
        loaded = Loaded.of(opened, self.job.train, self.device)
        if self.device.type == "cuda":
            keep_positions(loaded.parts)
        if self.leads:
            layout, left = loaded.mesh.layout, f"{len(missing)} of {self.count} pieces are left"
            where = "" if layout.only_replicates else f", {layout}"
            where += "" if len(missing) == self.count else f", {left}"
            how = f"on {dist.get_world_size()} ranks in {loaded.train.precision}"
            emit("notice", text=f"scoring the {turn.who} {how}{where}")
        for number in missing:
            if not self._score_piece(turn, loaded, number):
                return False
        if writes:
            self._write_samples(turn, loaded)
        if turn != self.job.candidate:
            del loaded
            free(self.device)
        return True

    def _score_piece(self, turn: Turn, loaded: Loaded, number: int) -> bool:
        rows = pieces.read_piece(self.examples, number)
        encoded = encode(loaded.opened, rows)

        def on_turn(done: int) -> bool:
            self.beat(number + 1, "score")
            if self.leads:
                share = number + done / len(rows)
                emit("progress", step=round(share, 2), steps=self.count, unit=f"{turn.who}: piece")
            return self._is_over()

        sums = loaded.score(encoded, on_turn)
        if sums is None:
            return False
        if self.leads:
            settings = loaded.opened.settings
            columns = loaded.objective.columns(encoded, sums.numpy(), settings)
            scored_N = np.ones(len(rows), bool)
            if "input_ids" in encoded.column_names:
                scored_N = np.asarray(encoded.column("input_ids").is_valid(), bool)
            facts = {"hash": rows.column("hash"), "scored": pa.array(scored_N)}
            turn.pieces.put(number, pa.table({**facts, **columns}))
        return True

    def _is_over(self) -> bool:
        """Whether any rank was asked to stop."""
        raised = torch.tensor([float(self.stop.raised)])
        dist.all_reduce(raised)
        return bool(raised > 0)

    def _unwritten(self, turn: Turn) -> tuple[str, list[pieces.Opening]] | None:
        """The texts that the candidate has not gone on with yet, and their name."""
        found = pieces.openings_of(self.job) if self.leads else None
        if found is not None and (not found[1] or turn.pieces.samples(found[0]) is not None):
            found = None
        return of_first(found)  # type: ignore[no-any-return]

    def _write_samples(self, turn: Turn, loaded: Loaded) -> None:
        """What the model makes of the beginnings of a few texts."""
        found = self._unwritten(turn)
        if found is None:
            return
        name, openings = found
        opened, task = loaded.opened, loaded.opened.task
        assert isinstance(task, TokenTask)
        prompts = [turns for turns, _ in openings]

        def write(network: Any) -> list[str]:
            return task.generate(
                network, prompts, opened.settings, opened.path, pieces.SAMPLE_TOKENS
            )

        if opened.own_task:
            texts = self._waited_for(lambda: write(opened.network()))
        else:
            texts = write(Writer(loaded, lambda: self.beat(self.count, "score")))
        if self.leads:
            samples = [
                Sample(  # a dialogue may begin with its answer
                    prompt=p[-1][1][-pieces.SAMPLE_CHARACTERS:] if p else "", generated=text,
                    expected=expected,
                )
                for (p, expected), text in zip(openings, texts, strict=True)
            ]  # fmt: skip
            turn.pieces.put_samples(name, tuple(samples))

    def _waited_for(self, write: Callable[[], list[str]]) -> list[str]:
        """What a user's own task, which knows its network best, writes on rank 0's CPU. It does so
        in a thread, and all ranks beat meanwhile: it may be slow, but not without a bound. Raises
        StepError beyond that."""
        limit = OWN_FACTOR * self.job.train.hang_seconds
        deadline = time.monotonic() + limit
        done = ThreadPoolExecutor(1).submit(write) if self.leads else None
        while of_first(done is not None and not wait([done], BEAT_SECONDS).done):
            self.beat(self.count, "score")
            if done is not None and time.monotonic() > deadline:
                what = f"the task's own `generate` has not ended within {limit:g} s"
                raise StepError(what, fix="make it faster on a CPU, or raise train.hang_seconds")
        return done.result() if done is not None else []


def free(device: torch.device) -> None:
    """Give back what no name holds any more; shards and their hooks refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
