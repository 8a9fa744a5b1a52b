"""The step `score` on one node: have the ranks score candidate and champion, in the layout of the
training, and hand over what they scored on the examples that decide.

Each encodes the raw examples with its own tokenizer. Rows that either was trained on, and texts
that hold no target for one, are left out for both and counted. Scores are kept (pieces.py): an
interrupted scoring goes on, and no champion is scored twice. Nothing here imports torch."""

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
from rekindle.train.pieces import TEST, ScoreJob, Turn, Who, piece_count, smoke_of

TABLE, RECORD, MUST_PASS = "scores.parquet", "scores.json", "must_pass.parquet"
_EVIDENCE = "evidence.json"  # as registry/signature.py puts it beside the files of a model
_LEFT_OUT = ("hash", "scored", "target_ids", "cut", "full")


def score(job: ScoreJob, output: Path) -> Scores | None:
    """Score the contenders until `output` holds their scores; goes on where it was interrupted.
    Only the first of several nodes gets the record. Raises PreemptedError after a request to stop,
    StepError when the ranks failed."""
    die_with_parent()
    rendezvous = Rendezvous.current()
    if rendezvous.node_rank:
        _run(job, rendezvous)
        return None
    waiting = "another run scores the same model; waiting for it"
    with contextlib.ExitStack() as locks:
        for root in sorted({turn.kept for turn in job.turns}):
            locks.enter_context(owned(working_of(root), lambda: emit("notice", text=waiting)))
        if (
            rendezvous.nodes > 1
            or not _is_scored(job)
            or (job.model().task.objective == "tokens" and _samples(job) is None)
        ):
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
    """What is to be scored: the models in `candidate` and, if it can be compared, `champion`, whose
    files have `champion_digest`, on the test split of `examples`, and the candidate on the rows of
    `must_pass`; `code` as for `open_model`, `compared` as in records.Scores."""
    train = settings_of(train, open_model(candidate, code).precision, gpu=has_gpu())
    folders: dict[Who, Path] = {"champion": champion} if champion is not None else {}
    folders["candidate"] = candidate
    refusal = _incomparable(candidate, champion, code) if champion is not None else None
    judged = _judged_before(champion)
    turns = []
    for who, folder in folders.items():
        if who == "candidate" or refusal is None:
            digest = digest_of(folder) if who == "candidate" else champion_digest
            key = pieces.scores_key(digest, examples, train, has_gpu())
            turns.append(Turn(who, str(folder), digest, folder_of(artifact_root, "scores", key)))
    return ScoreJob(
        turns=tuple(turns),
        judged=tuple(map(str, folders.values())),
        examples=str(examples),
        status=str(attempt_in(working_of(turns[-1].kept))),
        train=train,
        champion_version=champion_version,
        champion_digest=champion_digest,
        incomparable=refusal,
        code=code,
        must_pass=must_pass,
        compared=dict(compared),
        champion_judged=judged.metrics,
        champion_judged_rows=judged.rows,
    )


@dataclasses.dataclass(frozen=True)
class _Judged:
    """What a model reached on the rows that it was judged on."""

    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rows: int = 0


def _judged_before(champion: Path | None) -> _Judged:
    """By the evidence that lies beside the files of a registered model."""
    if champion is None:
        return _Judged()
    try:
        evidence = Evidence.read(champion.parent / _EVIDENCE)
    except (OSError, ValueError):  # registered before evidence was kept
        return _Judged()
    return _Judged(dict(evidence.metrics), evidence.rows)


def settings_of(train: TrainSpec, trained: str, *, gpu: bool) -> TrainSpec:
    """How both models are scored: as the candidate was `trained`, on a CPU in fp32, instead of fp8
    in bf16. `auto` is decided here, because scores are kept under their precision."""
    plain = {"compile": False, "activation_checkpointing": "none", "entrypoint": None}
    numbers = {} if gpu else {"precision": "fp32", "weights": "fp32"}
    if gpu and train.precision == "auto":
        wanted = trained or "bf16"
        numbers = {"precision": wanted if wanted != "bf16" or gpus_have_bf16() else "fp32"}
    if gpu and train.precision == "fp8":
        numbers = {"precision": "bf16"}
    return train.model_copy(update=plain | numbers)


def _run(job: ScoreJob, rendezvous: Rendezvous) -> None:
    """The ranks' part on this node. Once all is scored, a failure costs samples at most."""
    path = Path(job.status) / "job.json"
    job.write(path)
    try:
        with shared_secret(rendezvous, root_of(job.turns[-1].kept)) as place:
            words = ["-m", "rekindle.train.score_rank", str(path)]
            torchrun(words, job.train, status=Path(job.status), rendezvous=place)
    except StepError as failure:
        if not _is_scored(job):
            raise
        writes = job.model().task.objective == "tokens"
        event = "no samples were written" if writes else "a rank failed after all rows were scored"
        emit("notice", text=f"{event}: {failure.problems[0].what}")


def _is_scored(job: ScoreJob) -> bool:
    count = piece_count(open_examples(Path(job.examples), TEST))
    return not any(turn.missing(pieces.names_of(job, turn, count)) for turn in job.turns)


def _samples(job: ScoreJob) -> tuple[Sample, ...] | None:
    """What the candidate wrote, if it has; nothing where there are no texts to go on with."""
    name, openings = pieces.openings_of(job)
    return job.candidate.samples(name) if openings else ()


def _incomparable(ours: Path, theirs: Path, code: str) -> tuple[str, str] | None:
    """Why candidate and champion cannot be compared: the name of a check, and a sentence."""
    candidate, champion = (open_model(folder, code) for folder in (ours, theirs))
    if candidate.task.objective == "tokens" and champion.task.objective != "tokens":
        return "same_task", "the champion is not a language model"
    if candidate.task.modality != champion.task.modality:
        return "same_task", f"the champion takes {champion.task.modality} examples"
    forms = [model.settings.get("form") for model in (candidate, champion)]
    if forms[0] != forms[1]:
        return "same_task", f"the champion was trained on the form {forms[1]}, not {forms[0]}"
    shapes = [model.settings.get("image_shape") for model in (candidate, champion)]
    if shapes[0] != shapes[1]:  # pixels as many would be read in another order
        return "same_task", f"the champion reads images of {shapes[1]}, the candidate {shapes[0]}"
    if champion.labels != candidate.labels:
        both = f"{list(champion.labels)}, the candidate {list(candidate.labels)}"
        return "same_classes", f"the champion knows the classes {both}: they cannot be compared"
    return None


def hand_over(job: ScoreJob, output: Path) -> Scores:
    """Write the scores on the examples that decide, and the record beside them."""
    keep_N = pieces.judged_rows(job)
    rows = _facts(Path(job.examples)).filter(pa.array(keep_N))
    hashes = rows.column("hash").to_pylist()
    contenders, cuts = {}, []
    count = piece_count(open_examples(Path(job.examples), TEST))
    for turn in job.turns:
        model = open_model(Path(turn.folder), job.code)
        parts = list(turn.read(count))  # of no examples, no more than their hashes
        found = pa.concat_tables(parts or [pa.table({"hash": pa.array([], pa.binary(16))})])
        scored = found.filter(pa.array(keep_N))
        if scored.column("hash").to_pylist() != hashes:
            fix = f"delete {turn.kept} and run the step `score` again"
            raise DataError("the scores are those of other examples", where=turn.kept, fix=fix)
        nats = None
        if "target_ids" in scored.column_names:
            cuts.append(scored.column("cut").combine_chunks())
            # what the best guess needs for a target that knows only how frequent each is
            targets = scored.column("target_ids").combine_chunks().flatten()
            counts_V = np.bincount(np.asarray(targets, np.int64))
            shares = counts_V[counts_V > 0] / max(1, counts_V.sum())
            nats = float(-(shares * np.log(shares)).sum())
        if len(scored.column_names) > 1:
            rows = rows.append_column(turn.who, _struct(scored))
        contenders[turn.who] = Contender(
            run_key=model.run_key,
            digest=turn.digest,
            scores=turn.kept.rpartition("/")[2],
            precision=job.train.precision,
            labels=model.labels,
            unigram_nats=nats,
            bytes=sum(one.stat().st_size for one in model.path.rglob("*") if one.is_file()),
        )
    samples = (_samples(job) or ()) if cuts else ()
    ours = job.model()
    shape = ours.settings.get("image_shape")
    distinct_N = keep_N.copy()
    distinct_N[keep_N] = firsts(hashes)
    record = Scores(
        objective=ours.task.objective,
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
        reference=reference_of(Path(job.examples), ours.task.modality, shape, distinct_N),
        bad_rows=read_summary(Path(job.examples)).bad_rows,
        must_pass=job.must_pass.rows.content if job.must_pass else "",
        compared=job.compared,
        champion_judged=job.champion_judged,
        champion_judged_rows=job.champion_judged_rows,
    )
    output.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, output / TABLE, compression="zstd")
    if golden := pieces.golden_of(job):
        logits = job.candidate.piece(golden[0]).column("logits")
        table = pa.table({"label": golden[1].column("label"), "logits": logits})
        pq.write_table(table, output / MUST_PASS)
    record.write(output / RECORD)
    return record


def _facts(examples: Path) -> pa.Table:
    """Of each row of the test split `id`, `hash`, `label` if any, and slices as one struct."""
    slices = read_summary(examples).slices
    names = [n for n in ("id", "hash", "label") if n in open_examples(examples, TEST).schema.names]
    found = open_examples(examples, TEST, *names, *slices)
    table = pa.Table.from_batches(list(found), found.schema)
    facts = table.select(names)
    return facts.append_column("slices", _struct(table.select(slices))) if slices else facts


def _struct(table: pa.Table) -> pa.StructArray:
    """What a table holds, as one column; without what only `hand_over` needs."""
    names = [name for name in table.column_names if name not in _LEFT_OUT]
    return pa.StructArray.from_arrays([table.column(n).combine_chunks() for n in names], names)
