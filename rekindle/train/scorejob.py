"""What the ranks of one scoring are asked to do, as a JSON file that each of them reads, and which
examples decide in the end: those that neither contender was trained on and both can score.

Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from pydantic import TypeAdapter

from rekindle.data.examples import open_examples
from rekindle.records import write_atomically
from rekindle.spec.model import TrainSpec
from rekindle.train.modelfolder import open_model
from rekindle.train.pieces import TEST, Pieces, piece_count, seen

SAMPLES, SAMPLE_CHARACTERS = 3, 500
_OPENING_WORDS = 6

Who = Literal["candidate", "champion"]
Opening = tuple[list[tuple[str, str]], str]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One contender: its model's `folder` with the `digest` of all its files, and where its scores
    are `kept`, a folder or a URI."""

    who: Who
    folder: str
    digest: str
    kept: str

    @property
    def pieces(self) -> Pieces:
        """Its scores."""
        return Pieces(self.kept)


@dataclasses.dataclass(frozen=True)
class ScoreJob:
    """`turns` in order, the candidate last; `judged` are the folders of all contenders, also of a
    champion that is `incomparable` (see records.Scores). `status` belongs to one attempt; `code`
    is as for modelfolder.open_model."""

    turns: tuple[Turn, ...]
    judged: tuple[str, ...]
    examples: str
    status: str
    train: TrainSpec
    champion_version: str = ""
    champion_digest: str = ""
    incomparable: tuple[str, str] | None = None
    code: str = ""

    @property
    def candidate(self) -> Turn:
        """The model that may be promoted."""
        return self.turns[-1]

    def write(self, path: Path) -> None:
        """Store it for `read`."""
        fields = TypeAdapter(ScoreJob).dump_python(self, mode="json")
        write_atomically(path, json.dumps(fields, indent=2))

    @classmethod
    def read(cls, path: Path) -> Self:
        """The job that `write` stored."""
        return TypeAdapter(cls).validate_python(json.loads(path.read_text()))


def judged_rows(job: ScoreJob) -> np.ndarray:
    """bool [rows of the test split]: which decide; all pieces must be there."""
    examples = open_examples(Path(job.examples), TEST, "hash")
    hashes = [row for batch in examples for row in batch.column("hash").to_pylist()]
    keep_N = np.ones(len(hashes), bool)
    for folder in job.judged:
        keep_N &= ~seen(open_model(Path(folder), job.code), hashes)
    for turn in job.turns:
        parts = turn.pieces.read(piece_count(examples), "scored")
        keep_N &= np.concatenate([np.zeros(0, bool), *(np.asarray(p.column(0)) for p in parts)])
    return keep_N & _seen_alike(job, piece_count(examples))


def _seen_alike(job: ScoreJob, pieces: int) -> np.ndarray | bool:
    """bool [rows]: texts of which no language model sees more than the other, as one does that cuts
    them later: what comes late in a text is easier to guess."""
    if (
        not pieces
        or len(job.turns) < 2
        or open_model(Path(job.candidate.folder), job.code).task.objective != "tokens"
    ):
        return True
    tables = [pa.concat_tables(turn.pieces.read(pieces, "cut", "full")) for turn in job.turns]
    cuts = [table.column("cut").to_pylist() for table in tables]
    same_N = np.array([a == b for a, b in zip(*cuts, strict=True)], bool)
    full_N = np.any([np.asarray(table.column("full")) for table in tables], axis=0)
    return same_N | ~full_N  # type: ignore[no-any-return]


def openings_of(job: ScoreJob) -> tuple[str, list[Opening]]:
    """The beginnings of a few texts that decide, for the candidate to go on with, how these really
    go on, and a name for them."""
    rows = np.flatnonzero(judged_rows(job))[:SAMPLES]
    documents = list(_documents(job, rows))
    name = hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:16]
    turns = [[(role, content) for role, content in json.loads(d)] for d in documents]
    return name, [_opening(each) for each in turns]


def _documents(job: ScoreJob, rows: np.ndarray) -> Iterator[str]:
    start = 0
    for batch in open_examples(Path(job.examples), TEST, "document"):
        inside = rows[(rows >= start) & (rows < start + len(batch))] - start
        yield from (batch.column("document")[int(i)].as_py() for i in inside)
        start += len(batch)
        if not len(rows) or start > rows[-1]:
            return


def _opening(turns: list[tuple[str, str]]) -> Opening:
    """A document up to where the model goes on, and what follows there."""
    role, content = turns[0]
    if role == "text":
        words = content.split(" ")
        cut = min(_OPENING_WORDS, max(1, len(words) // 2))
        return [(role, " ".join(words[:cut]))], " ".join(words[cut:])[:SAMPLE_CHARACTERS]
    last = max(i for i, (role, _) in enumerate(turns) if role in ("assistant", "completion"))
    return turns[:last], turns[last][1][:SAMPLE_CHARACTERS]
