"""What a model scores on the test split, as files: in pieces, so that an interrupted
scoring goes on, and under a key of all that they follow from, so that none is scored
twice on the same examples.

A model's key is a hash of its files, the examples, the precision, rekindle's own code and
the libraries that compute. Under `<artifact_root>/scores/<key>` lies `piece-N.parquet`
for each piece of the test split, `must_pass-X.parquet` for golden rows: a row an example,
`hash` and `scored`, and

    classes    logits         list of float
    numbers    value          float, in the target's unit
    tags       logits         the same, of a word after those of the word before
    tokens     nats, right, targets   of the targets together; target_bytes
               target_ids     the targets themselves, for how frequent each is
               cut            hash of the tokens and of which of them are targets
               full           whether the text may go on behind them

Those examples decide that neither contender was trained on and both can score. A few of
them, with what the candidate made of them, are the smoke test of a server: rows in order,
where the answer's probability is above the next one's by more than rounding can change.
Nothing here imports torch."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from rekindle.data.examples import ExamplesFile, open_examples
from rekindle.errors import DataError, RequestError
from rekindle.modalities import load_modality
from rekindle.modalities.turns import prompt_of
from rekindle.objectives import answers_of
from rekindle.records import Sample, Smoke, SmokeRow, canonical_json
from rekindle.spec.identity import TRAINING, digest, source_hash
from rekindle.spec.model import MustPass, TrainSpec
from rekindle.storage import ExistsError, Storage, about, storage_of
from rekindle.train.job import StoredAsJson
from rekindle.train.modelfolder import ModelFolder, hash_prefixes, open_model, trained_on

TEST = "test"
BATCHES = 4  # of examples in a piece: up to 8,000 rows or 16 MB
LIBRARIES = ("torch", "transformers", "tokenizers")
SAMPLES = 3
"""How many texts a language model goes on with."""
SAMPLE_CHARACTERS = 500
SAMPLE_TOKENS = 32
_OPENING_WORDS = 6
MOST_SMOKE_ROWS = 8
MOST_SMOKE_CHARACTERS = 256 << 10
HALF = 0.05
"""Of a probability: what half precision may change; TF32 of GPUs counts as fp32."""
_EXACT = 0.002
SURE_CHARACTERS = 8
"""Of a text that was written in half precision: later ones may differ."""

Who = Literal["candidate", "champion"]
Name = int | str
"""Of a piece: its number, or what golden rows are called."""
Opening = tuple[list[tuple[str, str]], str]
"""The turns (role, text) up to where a model goes on, and how the text really goes on."""


def piece_count(examples: ExamplesFile) -> int:
    """How many pieces the test split has."""
    return -(-len(examples) // BATCHES)


def read_piece(examples: ExamplesFile, number: int) -> pa.Table:
    """The examples of a piece, counted from 0."""
    first = number * BATCHES
    end = min(len(examples), first + BATCHES)
    return pa.Table.from_batches([examples[batch] for batch in range(first, end)])


def scores_key(model: str, examples: Path, train: TrainSpec, gpu: bool) -> str:
    """Names the scores of a model on the test split of `examples`, in the precision of
    `train`.

    `model` is the digest of its files. On a GPU fp32 is TF32 unless
    `train.deterministic`."""
    rows = open_examples(examples, TEST, "id", "hash")
    hash_of_rows = hashlib.sha256()
    for batch in rows:
        for row in batch.to_pylist():
            hash_of_rows.update(row["hash"] + row["id"].encode() + b"\0")
    versions = {name: metadata.version(name) for name in LIBRARIES}
    numbers = [train.precision, train.weights, gpu, gpu and train.deterministic]
    return digest([model, hash_of_rows.hexdigest(), numbers, source_hash(TRAINING), versions])


@dataclasses.dataclass(frozen=True)
class ScoringTurn:
    """One contender, whose turn it is to be scored."""

    who: Who
    folder: str
    """Of its model."""
    digest: str
    """Of the files in it."""
    kept: str
    """Folder or URI of its scores."""

    def missing(self, names: Iterable[Name]) -> list[Name]:
        """Those of the pieces that are not scored yet."""
        storage = self._storage()
        return [name for name in names if storage.size(_file(name)) is None]

    def put(self, name: Name, piece: pa.Table) -> None:
        """Commit a piece; another attempt may have been faster."""
        sink = pa.BufferOutputStream()
        pq.write_table(piece, sink, compression="zstd")
        self._put(_file(name), sink.getvalue().to_pybytes())

    def read(self, count: int, *columns: str) -> Iterator[pa.Table]:
        """The pieces, in order; of the named columns only, if any."""
        return (self.piece(number, *columns) for number in range(count))

    def piece(self, name: Name, *columns: str) -> pa.Table:
        """One of them; DataError where it cannot be read."""
        path = _file(name)
        try:
            with self._storage().reader(path) as file:
                return pq.read_table(pa.BufferReader(file.read()), columns=list(columns) or None)
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            message = f"the scores in {path} cannot be read: {error}"
            fix = f"delete {self.kept} and run the step `score` again"
            raise DataError(message, where=f"{self.kept}/{path}", fix=fix) from None

    def samples(self, name: str) -> tuple[Sample, ...] | None:
        """What the model wrote behind the openings of that name; None: nothing yet."""
        content = self._storage().read(f"samples-{name}.json")
        return None if content is None else _Samples.validate_json(content)

    def put_samples(self, name: str, samples: tuple[Sample, ...]) -> None:
        """Commit what the model wrote."""
        rows = [sample.model_dump() for sample in samples]
        self._put(f"samples-{name}.json", canonical_json(rows).encode())

    def _put(self, path: str, content: bytes) -> None:
        with contextlib.suppress(ExistsError):  # another attempt committed the same
            self._storage().put_new(path, content)

    def _storage(self) -> Storage:
        return storage_of(self.kept, about("the scores"))


_Samples: TypeAdapter[tuple[Sample, ...]] = TypeAdapter(tuple[Sample, ...])


def seen(model: ModelFolder, hashes: list[bytes]) -> np.ndarray:
    """bool [rows]: whether the model was trained on the example with each hash."""
    trained_on_M = trained_on(model.path)
    prefixes_N = hash_prefixes(hashes)
    if not len(trained_on_M):
        return np.zeros(len(prefixes_N), bool)
    places_N = np.minimum(np.searchsorted(trained_on_M, prefixes_N), len(trained_on_M) - 1)
    return trained_on_M[places_N] == prefixes_N  # type: ignore[no-any-return]


def _file(name: Name) -> str:
    return f"piece-{name:05}.parquet" if isinstance(name, int) else f"{name}.parquet"


@dataclasses.dataclass(frozen=True)
class ScoreJob(StoredAsJson):
    """What is to be scored, as rank 0's node writes it for all ranks."""

    turns: tuple[ScoringTurn, ...]
    """The candidate last."""
    judged: tuple[str, ...]
    """The folders of all contenders, an `incomparable` one's too."""
    examples: str
    """What `ingest` wrote; the test split is scored."""
    status: str
    """Folder of this attempt."""
    train: TrainSpec
    """Layout, precision and patience."""
    champion_version: str = ""
    champion_digest: str = ""
    incomparable: tuple[str, str] | None = None
    """Why there is no comparison: the name of a check, and a sentence."""
    code: str = ""
    """As for `modelfolder.open_model`."""
    must_pass: MustPass | None = None
    """Golden rows, which the candidate scores, too."""
    compared: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """As in records.Scores."""
    champion_judged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    champion_judged_rows: int = 0

    @property
    def candidate(self) -> ScoringTurn:
        """The contender that was trained last."""
        return self.turns[-1]

    def model(self) -> ModelFolder:
        """The candidate's."""
        return open_model(Path(self.candidate.folder), self.code)


def judged_rows(job: ScoreJob) -> np.ndarray:
    """bool [rows of the test split]: which decide; all pieces must be there."""
    examples = open_examples(Path(job.examples), TEST, "hash")
    hashes = [row for batch in examples for row in batch.column("hash").to_pylist()]
    keep_N = np.ones(len(hashes), bool)
    for folder in job.judged:
        keep_N &= ~seen(open_model(Path(folder), job.code), hashes)
    for turn in job.turns:
        scored = [np.zeros(0, bool)]  # there may be no piece
        for piece in turn.read(piece_count(examples), "scored"):
            scored.append(np.asarray(piece.column(0)))
        keep_N &= np.concatenate(scored)
    return keep_N & _seen_alike(job, piece_count(examples))


def _seen_alike(job: ScoreJob, pieces: int) -> np.ndarray | bool:
    """bool [rows]: texts of which no language model sees more than the other."""
    if not pieces or len(job.turns) < 2 or not job.model().task.kind.writes:
        return True
    tables = [pa.concat_tables(turn.read(pieces, "cut", "full")) for turn in job.turns]
    cuts = [table.column("cut").to_pylist() for table in tables]
    same_N = np.array([a == b for a, b in zip(*cuts, strict=True)], bool)
    full_N = np.any([np.asarray(table.column("full")) for table in tables], axis=0)
    return same_N | ~full_N  # type: ignore[no-any-return]


def golden_of(job: ScoreJob) -> tuple[str, pa.Table] | None:
    """The golden rows as examples, under a name that follows from them; None: there are
    none.

    RequestError for a model without classes, DataError for rows that are unfit."""
    if job.must_pass is None:
        return None
    from rekindle.data.golden import examples_of
    from rekindle.rows.findings import Findings

    model = job.model()
    if not model.labels:
        raise RequestError(
            "the model has no classes to predict",
            where="evaluate.must_pass",
            fix="remove it; see evaluate.floor",
        )
    findings = Findings()
    shape = model.settings.get("image_shape")
    image_shape = tuple(shape) if shape else shape
    rows = examples_of(job.must_pass, model.task.modality, findings, image_shape)
    findings.raise_if_any()
    name = hashlib.sha256(b"".join(rows.column("hash").to_pylist())).hexdigest()[:16]
    return f"must_pass-{name}", rows


def names_of(job: ScoreJob, turn: ScoringTurn, count: int) -> list[Name]:
    """All that a contender scores: `count` pieces of the test split, and golden rows."""
    names: list[Name] = list(range(count))
    golden = golden_of(job) if turn == job.candidate else None
    if golden is not None:
        names.append(golden[0])
    return names


def openings_of(job: ScoreJob) -> tuple[str, list[Opening]]:
    """A name, and the beginnings of a few texts that decide, with how these really go on."""
    rows = np.flatnonzero(judged_rows(job))[:SAMPLES]
    documents: list[str] = []
    start = 0
    for batch in open_examples(Path(job.examples), TEST, "document"):
        if not len(rows) or start > rows[-1]:
            break
        inside = rows[(rows >= start) & (rows < start + len(batch))] - start
        documents += [batch.column("document")[int(row)].as_py() for row in inside]
        start += len(batch)
    name = hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:16]
    openings = []
    for document in documents:
        turns = [(role, content) for role, content in json.loads(document)]
        openings.append(_opening(turns))
    return name, openings


def _opening(turns: list[tuple[str, str]]) -> Opening:
    """A document up to where the model goes on, and what follows there."""
    role, content = turns[0]
    if role == "text":
        words = content.split(" ")
        cut = min(_OPENING_WORDS, max(1, len(words) // 2))
        return [(role, " ".join(words[:cut]))], " ".join(words[cut:])[:SAMPLE_CHARACTERS]
    prompt = prompt_of(turns)
    answer = turns[len(prompt)][1]
    return prompt, answer[:SAMPLE_CHARACTERS]


def smoke_of(job: ScoreJob, keep_N: np.ndarray, samples: tuple[Sample, ...]) -> Smoke | None:
    """The smoke test of a server: rows of the first piece, and what the candidate makes
    of them.

    They are taken among those that `keep_N` says decide; None if none is fit. Of a
    language model the beginnings that it went on with, see `openings_of`."""
    model = job.model()
    tolerance = _EXACT if job.train.precision in ("fp32", "fp64") else HALF
    tokens = 0
    rows: Iterator[SmokeRow]
    if model.task.kind.writes:
        tokens = SAMPLE_TOKENS
        rows = _written(job, samples, None if tolerance == _EXACT else SURE_CHARACTERS)
    else:
        rows = _predicted(job, model, keep_N, margin=2 * tolerance)
    chosen: list[SmokeRow] = []
    room = MOST_SMOKE_CHARACTERS
    for row in rows:
        if len(row.content) <= room:
            chosen.append(row)
            room -= len(row.content)
        if len(chosen) == MOST_SMOKE_ROWS:
            break
    if not chosen:
        return None
    if not tokens:
        tolerance = answers_of(model.task.objective).tolerance(tolerance, model.settings)
    return Smoke(tolerance=tolerance, tokens=tokens, rows=tuple(chosen))


def _written(
    job: ScoreJob, samples: tuple[Sample, ...], characters: int | None
) -> Iterator[SmokeRow]:
    """The openings that a client could send, and the first `characters` of what followed."""
    if not samples:
        return
    _, openings = openings_of(job)
    for number, ((turns, _), sample) in enumerate(zip(openings, samples, strict=True)):
        can_be_sent = turns and turns[-1][0] != "assistant" and turns[-1][1].strip()
        if can_be_sent and sample.generated:
            answer = {"text": sample.generated[:characters]}
            yield SmokeRow(id=str(number), content=json.dumps(turns), answer=answer)


def _predicted(
    job: ScoreJob, model: ModelFolder, keep_N: np.ndarray, margin: float
) -> Iterator[SmokeRow]:
    """Examples of the first piece whose answer is a number, or clear by `margin`."""
    examples = open_examples(Path(job.examples), TEST)
    modality = load_modality(model.task.modality)
    shape = model.settings.get("image_shape")
    has_pixels = pa.types.is_binary(modality.field.type)
    if not len(examples) or (has_pixels and shape is None):
        return
    rows = read_piece(examples, 0)
    answers = answers_of(model.task.objective)
    name = answers.score_column
    scores = next(job.candidate.read(1, name)).column(name)
    for row in np.flatnonzero(keep_N[: len(rows)]).tolist():
        answer = answers.of_scores(scores[row], model.labels, margin)
        if answer is not None:
            stored = rows.column(modality.field.name)[row].as_py()
            yield SmokeRow(
                id=rows.column("id")[row].as_py(),
                content=modality.evidence(modality.content(stored, shape)),
                answer=answer,
            )
