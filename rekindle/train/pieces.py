"""What a model scores on the test split, as files: in pieces, so that an interrupted scoring goes
on, and under a key of all that they follow from, so that none is scored twice on the same examples.

A model's key is a hash of its files, the examples, the precision, rekindle's own code and the
libraries that compute. Under `<artifact_root>/scores/<key>` lies `piece-N.parquet` for each piece
of the test split, `must_pass-X.parquet` for golden rows: a row an example, `hash` and `scored`, and

    classes    logits         list of float
    numbers    value          float, in the target's unit
    tags       logits         the same, of a word after those of the word before
    tokens     nats, right, targets   of the targets together; target_bytes
               target_ids     the targets themselves, for how frequent each is
               cut            hash of the tokens and of which of them are targets
               full           whether the text may go on behind them

Those examples decide that neither contender was trained on and both can score. A few of them, with
what the candidate made of them, are the smoke test of a server: rows in order, where the answer's
probability is above the next one's by more than rounding can change. Nothing here imports torch."""

import base64
import dataclasses
import hashlib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from rekindle.data.examples import ExamplesFile, open_examples
from rekindle.data.signals import prompt_of
from rekindle.errors import CheckpointError, DataError, RequestError
from rekindle.records import Sample, Smoke, SmokeRow, canonical_json
from rekindle.spec.identity import TRAINING, digest, source_hash
from rekindle.spec.model import MustPass, TrainSpec
from rekindle.tasks.base import SCALE
from rekindle.train.job import Stored
from rekindle.train.modelfolder import ModelFolder, hash_prefixes, open_model, trained_on
from rekindle.train.storage import storage_of

TEST = "test"
BATCHES = 4  # of examples in a piece: up to 8,000 rows or 16 MB
LIBRARIES = ("torch", "transformers", "tokenizers")
SAMPLES, SAMPLE_CHARACTERS, SAMPLE_TOKENS = 3, 500, 32
_OPENING_WORDS = 6

Who = Literal["candidate", "champion"]
Name = int | str  # of a piece: its number, or what golden rows are called
Rows = Iterator[SmokeRow]
Opening = tuple[list[tuple[str, str]], str]


def piece_count(examples: ExamplesFile) -> int:
    return -(-len(examples) // BATCHES)


def read_piece(examples: ExamplesFile, number: int) -> pa.Table:
    numbers = range(number * BATCHES, min(len(examples), (number + 1) * BATCHES))
    return pa.Table.from_batches([examples[i] for i in numbers])


def scores_key(model: str, examples: Path, train: TrainSpec, gpu: bool) -> str:
    """Names the scores of the model with the digest `model` on the test split of `examples`, in the
    precision of `train`; on a GPU fp32 is TF32 unless `train.deterministic`."""
    rows = open_examples(examples, TEST, "id", "hash")
    total = hashlib.sha256()
    for batch in rows:
        for row in batch.to_pylist():
            total.update(row["hash"] + row["id"].encode() + b"\0")
    versions = {name: metadata.version(name) for name in LIBRARIES}
    numbers = [train.precision, train.weights, gpu, gpu and train.deterministic]
    return digest([model, total.hexdigest(), numbers, source_hash(TRAINING), versions])


@dataclasses.dataclass(frozen=True)
class Turn:
    """One contender: its model's `folder`, the `digest` of that, where its scores are `kept`."""

    who: Who
    folder: str
    digest: str
    kept: str

    def missing(self, names: Iterable[Name]) -> list[Name]:
        storage = storage_of(self.kept)
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
        try:
            with storage_of(self.kept).reader(_file(name)) as file:
                return pq.read_table(pa.BufferReader(file.read()), columns=list(columns) or None)
        except (FileNotFoundError, pa.ArrowInvalid) as error:
            what = f"the scores in {_file(name)} cannot be read: {error}"
            fix = f"delete {self.kept} and run the step `score` again"
            raise DataError(what, where=f"{self.kept}/{_file(name)}", fix=fix) from None

    def samples(self, name: str) -> tuple[Sample, ...] | None:
        content = storage_of(self.kept).read(f"samples-{name}.json")
        return None if content is None else _Samples.validate_json(content)

    def put_samples(self, name: str, samples: tuple[Sample, ...]) -> None:
        rows = [sample.model_dump() for sample in samples]
        self._put(f"samples-{name}.json", canonical_json(rows).encode())

    def _put(self, path: str, content: bytes) -> None:
        storage = storage_of(self.kept)
        try:
            storage.put_new(path, content)
        except CheckpointError:
            if storage.size(path) is None:
                raise


_Samples: TypeAdapter[tuple[Sample, ...]] = TypeAdapter(tuple[Sample, ...])


def seen(model: ModelFolder, hashes: list[bytes]) -> np.ndarray:
    """bool [rows]: whether the model was trained on the example with each hash."""
    known, prefixes_N = trained_on(model.path), hash_prefixes(hashes)
    if not len(known):
        return np.zeros(len(prefixes_N), bool)
    places_N = np.minimum(np.searchsorted(known, prefixes_N), len(known) - 1)
    return known[places_N] == prefixes_N  # type: ignore[no-any-return]


def _file(name: Name) -> str:
    return f"piece-{name:05}.parquet" if isinstance(name, int) else f"{name}.parquet"


@dataclasses.dataclass(frozen=True)
class ScoreJob(Stored):
    """`turns`, the candidate last; `judged`: the folders of all contenders, an `incomparable` one's
    too. `status` belongs to one attempt; `code` is as for modelfolder.open_model. The candidate
    scores the rows of `must_pass`, too."""

    turns: tuple[Turn, ...]
    judged: tuple[str, ...]
    examples: str
    status: str
    train: TrainSpec
    champion_version: str = ""
    champion_digest: str = ""
    incomparable: tuple[str, str] | None = None
    code: str = ""
    must_pass: MustPass | None = None
    compared: Mapping[str, int] = dataclasses.field(default_factory=dict)
    champion_judged: Mapping[str, float] = dataclasses.field(default_factory=dict)
    champion_judged_rows: int = 0

    @property
    def candidate(self) -> Turn:
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
        parts = turn.read(piece_count(examples), "scored")
        keep_N &= np.concatenate([np.zeros(0, bool), *(np.asarray(p.column(0)) for p in parts)])
    return keep_N & _seen_alike(job, piece_count(examples))


def _seen_alike(job: ScoreJob, pieces: int) -> np.ndarray | bool:
    """bool [rows]: texts of which no language model sees more than the other."""
    if not pieces or len(job.turns) < 2 or job.model().task.objective != "tokens":
        return True
    tables = [pa.concat_tables(turn.read(pieces, "cut", "full")) for turn in job.turns]
    cuts = [table.column("cut").to_pylist() for table in tables]
    same_N = np.array([a == b for a, b in zip(*cuts, strict=True)], bool)
    full_N = np.any([np.asarray(table.column("full")) for table in tables], axis=0)
    return same_N | ~full_N  # type: ignore[no-any-return]


def golden_of(job: ScoreJob) -> tuple[str, pa.Table] | None:
    """A name that follows from their content, and the golden rows as examples, if there are any.
    RequestError for a model without classes, DataError for rows that are unfit."""
    if job.must_pass is None:
        return None
    from rekindle.data.golden import examples_of
    from rekindle.data.validate import Findings

    model = job.model()
    if not model.labels:
        what, fix = "the model has no classes to predict", "remove it; see evaluate.floor"
        raise RequestError(what, where="evaluate.must_pass", fix=fix)
    findings, shape = Findings(), model.settings.get("image_shape")
    rows = examples_of(job.must_pass, model.task.modality, findings, shape and tuple(shape))
    findings.raise_if_any()
    name = hashlib.sha256(b"".join(rows.column("hash").to_pylist())).hexdigest()[:16]
    return f"must_pass-{name}", rows


def names_of(job: ScoreJob, turn: Turn, count: int) -> list[Name]:
    """All that a contender scores: `count` pieces of the test split, and golden rows."""
    golden = golden_of(job) if turn == job.candidate else None
    return [*range(count), *([golden[0]] if golden else [])]


def openings_of(job: ScoreJob) -> tuple[str, list[Opening]]:
    """A name, and the beginnings of a few texts that decide, with how these really go on."""
    rows = np.flatnonzero(judged_rows(job))[:SAMPLES]
    documents: list[str] = []
    start = 0
    for batch in open_examples(Path(job.examples), TEST, "document"):
        if not len(rows) or start > rows[-1]:
            break
        inside = rows[(rows >= start) & (rows < start + len(batch))] - start
        documents += [batch.column("document")[int(i)].as_py() for i in inside]
        start += len(batch)
    name = hashlib.sha256(json.dumps(documents).encode()).hexdigest()[:16]
    turns = [[(role, content) for role, content in json.loads(d)] for d in documents]
    return name, [_opening(each) for each in turns]


def _opening(turns: list[tuple[str, str]]) -> Opening:
    """A document up to where the model goes on, and what follows there."""
    role, content = turns[0]
    if role == "text":
        words = content.split(" ")
        cut = min(_OPENING_WORDS, max(1, len(words) // 2))
        return [(role, " ".join(words[:cut]))], " ".join(words[cut:])[:SAMPLE_CHARACTERS]
    given = prompt_of(turns)
    return given, turns[len(given)][1][:SAMPLE_CHARACTERS]


MOST_ROWS, MOST_CHARACTERS = 8, 256 << 10
_EXACT, HALF = 0.002, 0.05  # of a probability; TF32 of GPUs counts as fp32
SURE_CHARACTERS = 8  # of a text that was written in half precision: later ones may differ


def smoke_of(job: ScoreJob, keep_N: np.ndarray, samples: tuple[Sample, ...]) -> Smoke | None:
    """The rows of the first piece that are fit among those that `keep_N` says decide; None if there
    are none. Of a language model the beginnings that it went on with, see `openings_of`."""
    tolerance = _EXACT if job.train.precision in ("fp32", "fp64") else HALF
    model = job.model()
    unit = model.settings[SCALE[1]] if model.task.objective == "numbers" else 1.0
    tokens = 0
    rows: Rows
    if model.task.objective == "tokens":
        openings, tokens = openings_of(job)[1] if samples else [], SAMPLE_TOKENS
        sure = None if tolerance == _EXACT else SURE_CHARACTERS
        rows = (
            SmokeRow(id=str(i), content=json.dumps(turns), answer={"text": sample.generated[:sure]})
            for i, ((turns, _), sample) in enumerate(zip(openings, samples, strict=True))
            if turns and turns[-1][0] != "assistant" and turns[-1][1].strip() and sample.generated
        )
    else:
        rows = _classified(job, model, keep_N, 2 * tolerance)
    chosen: list[SmokeRow] = []
    room = MOST_CHARACTERS
    for row in rows:
        if len(row.content) <= room:
            chosen.append(row)
            room -= len(row.content)
        if len(chosen) == MOST_ROWS:
            break
    if not chosen:
        return None
    return Smoke(tolerance=tolerance * unit, tokens=tokens, rows=tuple(chosen))


def _classified(job: ScoreJob, model: ModelFolder, keep_N: np.ndarray, margin: float) -> Rows:
    examples = open_examples(Path(job.examples), TEST)
    shape = model.settings.get("image_shape")
    if not len(examples) or (model.task.modality == "image" and shape is None):
        return
    numeric = model.task.objective == "numbers"
    name = "value" if numeric else "logits"
    rows, scored = read_piece(examples, 0), next(job.candidate.read(1, name)).column(name)
    for row in np.flatnonzero(keep_N[: len(rows)]).tolist():
        if numeric:
            answer = {"value": scored[row].as_py()} if math.isfinite(scored[row].as_py()) else None
        else:
            logits = np.asarray(scored[row].values, np.float64)
            answer = _answer(logits.reshape(-1, len(model.labels)), model, margin)
        if answer is not None:
            content = rows.column(model.task.modality)[row]
            yield SmokeRow(
                id=rows.column("id")[row].as_py(), content=_text(content, shape), answer=answer
            )


def _answer(logits_WC: np.ndarray, model: ModelFolder, margin: float) -> dict[str, Any] | None:
    """Of one class, or of each word; None where it is not clear, or cut off, or not a number."""
    odds_WC = np.exp(logits_WC - logits_WC.max(1, keepdims=True))
    odds_WC /= odds_WC.sum(1, keepdims=True)
    ordered_WC = np.sort(odds_WC)
    if not (ordered_WC[:, -1] - ordered_WC[:, -2] > margin).all():
        return None
    labels = [model.labels[i] for i in odds_WC.argmax(1)]
    tops = odds_WC.max(1).tolist()
    if model.task.objective == "tags":
        return {"tags": labels, "probabilities": tops}
    return {"label": labels[0], "probability": tops[0]}


def _text(content: pa.Scalar, shape: Any) -> str:
    """Texts and JSON as they are, pixels as base64 of a PNG."""
    value = content.as_py()
    if isinstance(value, str):
        return value
    from PIL import Image

    pixels = np.frombuffer(value, np.uint8).reshape(shape)
    file = io.BytesIO()
    Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
