"""The step `score` on one node: have the ranks score candidate and champion, in the
layout of the training, and hand over what they scored on the examples that decide.

Each encodes the raw examples with its own tokenizer. Rows that either was trained on, and
texts that hold no target for one, are left out for both and counted. Scores are kept
(pieces.py): an interrupted scoring goes on, and no champion is scored twice. Nothing here
imports torch."""

import contextlib
import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.data.examples import open_examples, read_summary
from rekindle.data.signals import firsts, reference_of
from rekindle.errors import DataError, StepError
from rekindle.launch.events import emit
from rekindle.launch.process import die_with_parent, gpus_have_bf16, has_gpu, owned
from rekindle.launch.rendezvous import Rendezvous
from rekindle.launch.staging import shared_secret
from rekindle.launch.torchrun import torchrun
from rekindle.records import Contender, Evidence, Sample, Scores
from rekindle.spec.model import MustPass, TrainSpec
from rekindle.train import pieces
from rekindle.train.job import attempt_in, folder_of, root_of, working_of
from rekindle.train.modelfolder import digest_of, open_model
from rekindle.train.pieces import TEST, ScoreJob, ScoringTurn, Who, piece_count, smoke_of

TABLE = "scores.parquet"
RECORD = "scores.json"
MUST_PASS = "must_pass.parquet"  # noqa: S105 - the name of a file
_EVIDENCE = "evidence.json"  # as registry/signature.py puts it beside the files of a model
_LEFT_OUT = ("hash", "scored", "target_ids", "cut", "full")


def score(job: ScoreJob, output: Path) -> Scores | None:
    """Score the contenders until `output` holds their scores; goes on where it was
    interrupted.

    Only the first of several nodes gets the record. Raises PreemptedError after a request
    to stop, StepError when the ranks failed."""
    die_with_parent()
    rendezvous = Rendezvous.current()
    if rendezvous.node_rank:
        _run(job, rendezvous)
        return None
    waiting = "another run scores the same model; waiting for it"
    with contextlib.ExitStack() as locks:
        for root in sorted({turn.kept for turn in job.turns}):
            locks.enter_context(owned(working_of(root), lambda: emit("notice", text=waiting)))
        # other nodes wait for this one's ranks, whatever is there already
        if rendezvous.nodes > 1 or not (_is_scored(job) and _has_samples(job)):
            _run(job, rendezvous)
        else:
            emit("notice", text="all was scored before")
        return hand_over(job, output)


def job_of(
    candidate: Path,
    champion: Path | None,
    champion_version: str,
    champion_digest: str,
    examples: Path,
    train: TrainSpec,
    artifact_root: str,
    code: str = "",
    must_pass: MustPass | None = None,
    compared: Mapping[str, int] = MappingProxyType({}),
) -> ScoreJob:
    """What is to be scored: the models in `candidate` and, if it can be compared,
    `champion`, whose files have `champion_digest`, on the test split of `examples`, and
    the candidate on the rows of `must_pass`; `code` as for `open_model`, `compared` as in
    records.Scores."""
    train = settings_of(train, open_model(candidate, code).precision, gpu=has_gpu())
    refusal = _incomparable(candidate, champion, code) if champion is not None else None
    judgement = _judgement_of(champion)

    def turn_of(who: Who, folder: Path, digest: str) -> ScoringTurn:
        key = pieces.scores_key(digest, examples, train, has_gpu())
        return ScoringTurn(who, str(folder), digest, folder_of(artifact_root, "scores", key))

    turns = []
    judged = []
    if champion is not None:
        judged.append(str(champion))
        if refusal is None:
            turns.append(turn_of("champion", champion, champion_digest))
    judged.append(str(candidate))
    turns.append(turn_of("candidate", candidate, digest_of(candidate)))
    return ScoreJob(
        turns=tuple(turns),
        judged=tuple(judged),
        examples=str(examples),
        status=str(attempt_in(working_of(turns[-1].kept))),
        train=train,
        champion_version=champion_version,
        champion_digest=champion_digest,
        incomparable=refusal,
        code=code,
        must_pass=must_pass,
        compared=dict(compared),
        champion_judged=judgement.metrics,
        champion_judged_rows=judgement.rows,
    )


@dataclasses.dataclass(frozen=True)
class _Judgement:
    """What a model reached on the rows that it was judged on."""

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rows: int = 0


def _judgement_of(champion: Path | None) -> _Judgement:
    """By the evidence that lies beside the files of a registered model; empty without."""
    if champion is None:
        return _Judgement()
    try:
        evidence = Evidence.read(champion.parent / _EVIDENCE)
    except (OSError, ValueError):  # registered before evidence was kept
        return _Judgement()
    return _Judgement(dict(evidence.metrics), evidence.rows)


def settings_of(train: TrainSpec, trained: str, *, gpu: bool) -> TrainSpec:
    """How both models are scored: as the candidate was `trained`.

    On a CPU in fp32; instead of fp8 in bf16. `auto` is decided here, because scores are
    kept under their precision."""
    changes: dict[str, object] = {
        "compile": False,
        "activation_checkpointing": "none",
        "entrypoint": None,
    }
    if not gpu:
        changes |= {"precision": "fp32", "weights": "fp32"}
    elif train.precision == "fp8":
        changes["precision"] = "bf16"
    elif train.precision == "auto":
        precision = trained or "bf16"
        if precision == "bf16" and not gpus_have_bf16():
            precision = "fp32"
        changes["precision"] = precision
    return train.model_copy(update=changes)


def _run(job: ScoreJob, rendezvous: Rendezvous) -> None:
    """The ranks' part on this node. Once all is scored, a failure costs samples at most."""
    path = Path(job.status) / "job.json"
    job.write(path)
    command = ["-m", "rekindle.train.score_rank", str(path)]
    try:
        with shared_secret(rendezvous, root_of(job.turns[-1].kept)) as place:
            torchrun(command, job.train, status=Path(job.status), rendezvous=place)
    except StepError as failure:
        if not _is_scored(job):
            raise
        writes = job.model().task.kind.writes
        event = "no samples were written" if writes else "a rank failed after all rows were scored"
        emit("notice", text=f"{event}: {failure.problems[0].what}")


def _is_scored(job: ScoreJob) -> bool:
    """Whether all pieces of all contenders are there."""
    count = piece_count(open_examples(Path(job.examples), TEST))
    return not any(turn.missing(pieces.names_of(job, turn, count)) for turn in job.turns)


def _has_samples(job: ScoreJob) -> bool:
    """Whether the candidate wrote what it is to write: a classifier writes nothing."""
    return not job.model().task.kind.writes or _samples(job) is not None


def _samples(job: ScoreJob) -> tuple[Sample, ...] | None:
    """What the candidate wrote, if it has; nothing where there are no texts to go on with."""
    name, openings = pieces.openings_of(job)
    return job.candidate.samples(name) if openings else ()


def _incomparable(ours: Path, theirs: Path, code: str) -> tuple[str, str] | None:
    """Why candidate and champion cannot be compared: the name of a check, and a sentence."""
    candidate = open_model(ours, code)
    champion = open_model(theirs, code)
    if candidate.task.kind.writes and not champion.task.kind.writes:
        return "same_task", "the champion is not a language model"
    if candidate.task.modality != champion.task.modality:
        return "same_task", f"the champion takes {champion.task.modality} examples"
    our_form = candidate.settings.get("form")
    their_form = champion.settings.get("form")
    if our_form != their_form:
        return "same_task", f"the champion was trained on the form {their_form}, not {our_form}"
    our_shape = candidate.settings.get("image_shape")
    their_shape = champion.settings.get("image_shape")
    if our_shape != their_shape:  # pixels as many would be read in another order
        return (
            "same_task",
            f"the champion reads images of {their_shape}, the candidate {our_shape}",
        )
    if champion.labels != candidate.labels:
        classes = f"{list(champion.labels)}, the candidate {list(candidate.labels)}"
        return (
            "same_classes",
            f"the champion knows the classes {classes}: they cannot be compared",
        )
    return None


def hand_over(job: ScoreJob, output: Path) -> Scores:
    """Write the scores on the examples that decide, and the record beside them."""
    keep_N = pieces.judged_rows(job)
    rows = _facts(Path(job.examples)).filter(pa.array(keep_N))
    hashes = rows.column("hash").to_pylist()
    contenders: dict[Who, Contender] = {}
    cuts = []
    for turn in job.turns:
        scored = _scores_of(job, turn, keep_N, hashes)
        if "cut" in scored.column_names:
            cuts.append(scored.column("cut").combine_chunks())
        if len(scored.column_names) > 1:
            rows = rows.append_column(turn.who, _struct(scored))
        contenders[turn.who] = _contender(job, turn, scored)
    is_language_model = bool(cuts)
    samples: tuple[Sample, ...] = ()
    if is_language_model:
        samples = _samples(job) or ()
    candidate = job.model()
    distinct_N = keep_N.copy()
    distinct_N[keep_N] = firsts(hashes)
    record = Scores(
        objective=candidate.task.objective,
        candidate=contenders["candidate"],
        champion=contenders.get("champion"),
        champion_version=job.champion_version,
        champion_digest=job.champion_digest,
        incomparable=job.incomparable,
        same_targets=all(cut.equals(cuts[0]) for cut in cuts),
        rows=len(rows),
        excluded=len(keep_N) - len(rows),
        examples=hashlib.sha256(b"".join(hashes)).hexdigest(),
        samples=samples,
        smoke=smoke_of(job, keep_N, samples),
        reference=reference_of(
            Path(job.examples),
            candidate.task.modality,
            candidate.settings.get("image_shape"),
            distinct_N,
        ),
        bad_rows=read_summary(Path(job.examples)).bad_rows,
        must_pass=job.must_pass.rows.content if job.must_pass else "",
        compared=job.compared,
        champion_judged=job.champion_judged,
        champion_judged_rows=job.champion_judged_rows,
    )
    output.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, output / TABLE, compression="zstd")
    golden = pieces.golden_of(job)
    if golden is not None:
        name, golden_rows = golden
        logits = job.candidate.piece(name).column("logits")
        table = pa.table({"label": golden_rows.column("label"), "logits": logits})
        pq.write_table(table, output / MUST_PASS)
    record.write(output / RECORD)
    return record


def _scores_of(
    job: ScoreJob, turn: ScoringTurn, keep_N: np.ndarray, hashes: list[bytes]
) -> pa.Table:
    """A contender's scores of the rows that decide; DataError where they are of other rows."""
    count = piece_count(open_examples(Path(job.examples), TEST))
    # of no examples, no more than their hashes
    tables = list(turn.read(count)) or [pa.table({"hash": pa.array([], pa.binary(16))})]
    scored = pa.concat_tables(tables).filter(pa.array(keep_N))
    if scored.column("hash").to_pylist() != hashes:
        fix = f"delete {turn.kept} and run the step `score` again"
        raise DataError("the scores are those of other examples", where=turn.kept, fix=fix)
    return scored


def _contender(job: ScoreJob, turn: ScoringTurn, scored: pa.Table) -> Contender:
    model = open_model(Path(turn.folder), job.code)
    nats = None
    if "target_ids" in scored.column_names:
        nats = _unigram_nats(scored.column("target_ids").combine_chunks().flatten())
    return Contender(
        run_key=model.run_key,
        digest=turn.digest,
        scores=turn.kept.rpartition("/")[2],
        precision=job.train.precision,
        labels=model.labels,
        unigram_nats=nats,
        bytes=sum(file.stat().st_size for file in model.path.rglob("*") if file.is_file()),
    )


def _unigram_nats(target_ids: pa.Array) -> float:
    """What the best guess needs for a target that knows only how frequent each is."""
    counts_V = np.bincount(np.asarray(target_ids, np.int64))
    shares = counts_V[counts_V > 0] / max(1, counts_V.sum())
    return float(-(shares * np.log(shares)).sum())


def _facts(examples: Path) -> pa.Table:
    """Of each row of the test split `id`, `hash`, `label` if any, and slices as one struct."""
    slices = read_summary(examples).slices
    columns = open_examples(examples, TEST).schema.names
    names = [name for name in ("id", "hash", "label") if name in columns]
    batches = open_examples(examples, TEST, *names, *slices)
    table = pa.Table.from_batches(list(batches), batches.schema)
    facts = table.select(names)
    if slices:
        facts = facts.append_column("slices", _struct(table.select(slices)))
    return facts


def _struct(table: pa.Table) -> pa.StructArray:
    """What a table holds, as one column; without what only `hand_over` needs."""
    names = [name for name in table.column_names if name not in _LEFT_OUT]
    arrays = [table.column(name).combine_chunks() for name in names]
    return pa.StructArray.from_arrays(arrays, names)
