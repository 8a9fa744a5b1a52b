"""What a run leaves behind: versioned plain JSON, written by steps and platforms, read by report/
and the CLI.

Two kinds. A **run record** (`run.json`, one a run) says what was executed and what came of it; the
platform rewrites it atomically whenever a step changes state, so that a killed run still tells its
story. **Step records** are files inside a step's output artifacts (evidence, history, data summary,
registration); the artifact carries `metadata["record"] = <kind>`, which survives on every platform,
and that is how readers find them: see `RECORD_KINDS`.

Records hold no secrets. Those that a cacheable step writes hold no timestamps, so that the same
work gives the same bytes."""

import json
import os
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticSerializationError

SCHEMA_VERSION = 1

StepStatus = Literal["pending", "running", "succeeded", "failed", "skipped", "cancelled"]
RunStatus = Literal["submitting", "running", "succeeded", "failed", "cancelled", "preempted"]
Objective = Literal["classes", "numbers", "tags", "tokens"]
# what classifiers, taggers, language models and regressions are judged by
OF_CURVES = ("roc_auc", "average_precision", "recall_at_90_precision")
METRICS = ("accuracy", "macro_f1", "log_loss", "calibration_error", *OF_CURVES)
TAG_METRICS = ("entity_f1", "entity_precision", "entity_recall", "token_accuracy", "log_loss")
TOKEN_METRICS = ("log_loss", "perplexity", "token_accuracy", "bits_per_byte")
NUMBER_METRICS = ("r2", "rmse", "mae")
LOWER_IS_BETTER = frozenset(
    {"log_loss", "calibration_error", "perplexity", "bits_per_byte", "rmse", "mae"}
)
Decision = Literal["promoted", "pending", "approval_needed", "refused", "rolled_back"]
RolloutState = Literal[
    "shadow",
    "create",
    "smoke",
    "canary",
    "live",
    "settled",
    "roll_back",
    "rolled_back",
    "delete",
    "deleted",
]
ChangeKind = Literal["gate", "reason", "rollback"]


class Record(BaseModel):
    """Base of all records: frozen, unknown keys refused, JSON in and out; NaN and infinity survive,
    as strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The record stored at `path`; raises FileNotFoundError or pydantic.ValidationError."""
        return cls.model_validate_json(Path(path).read_bytes())

    def write(self, path: str | Path) -> None:
        """Store the record at `path` atomically: a reader sees the old file or the new one, never a
        part."""
        write_atomically(path, self.to_json(indent=2) + "\n")

    def to_json(self, indent: int | None = None) -> str:
        """The record as JSON, with text that UTF-8 cannot encode escaped as `\\udc80`: a step may
        return a lone surrogate, and a path may hold any bytes."""
        try:
            return self.model_dump_json(indent=indent)
        except PydanticSerializationError:
            shown = type(self).model_validate(_escaped(self.model_dump()))
            return shown.model_dump_json(indent=indent)


class VersionedRecord(Record):
    """Base of what is stored, or printed, as an object of its own."""

    schema_version: int = SCHEMA_VERSION


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_escaped(name): _escaped(one) for name, one in value.items()}
    return [_escaped(one) for one in value] if isinstance(value, list | tuple) else value


def write_atomically(path: str | Path, text: str) -> None:
    """Write `text` beside `path`, flush it to disk, then rename over it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        with draft.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def moved(value: Any, before: str, now: str) -> Any:
    """JSON with paths under the folder `before` replaced by paths under `now`, also where they are
    part of a longer text: a URI, or JSON in a string."""
    if before == now or len(before) < len("/a"):
        return value
    if isinstance(value, str):
        place = rf"(?<![\w.-]){re.escape(before)}(?=[/\"'\s?#]|$)"
        return re.sub(place, lambda _: now, value) if before in value else value
    if isinstance(value, Mapping):
        return {name: moved(one, before, now) for name, one in value.items()}
    return [moved(one, before, now) for one in value] if isinstance(value, list) else value


def canonical_json(value: Any) -> str:
    """One text for one value, for hashes and keys: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


class ArtifactRecord(Record):
    """An output artifact of a step: `uri` (here a path), KFP `schema_title`, `metadata`, and the
    content `digest`. `kept` is a folder with the records in one that lies elsewhere."""

    uri: str
    kept: str = ""
    schema_title: str = "system.Artifact"
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    digest: str = ""


class StepRecord(Record):
    """One step of one run. `name` is its path in the Graph, nested DAGs joined with `/`
    (`condition-1/promote`).

    `reason` says in words why it ran, was taken from the cache, was skipped, or failed. `seconds`
    is wall time including retries; `None` while it has not started. `log` is that of the step, or
    of its first node; `failed_log` that of another node which decided that it failed.
    `billed_seconds` of each machine, as the platform says, and `on_demand_seconds`: what it would
    bill without spot machines. `machine_seconds`, where a platform bills no other: how long each
    machine ran, in all attempts, without the waiting for them."""

    name: str
    component: str = ""
    status: StepStatus = "pending"
    cached: bool = False
    reason: str = ""
    started_at: str = ""
    seconds: float | None = None
    attempts: int = 0
    billed_seconds: float | None = None
    on_demand_seconds: float | None = None
    machine_seconds: float | None = None
    cache_key: str = ""
    log: str = ""
    failed_log: str = ""
    parameters: Mapping[str, Any] = Field(default_factory=dict)
    artifacts: Mapping[str, ArtifactRecord] = Field(default_factory=dict)
    error: str = ""

    def holding(self, kind: str) -> ArtifactRecord | None:
        """The first of its artifacts that holds a record of this kind."""
        return next((a for a in self.artifacts.values() if a.metadata.get("record") == kind), None)


class Ignored(Record):
    """A wish that a platform does not honour: `what` happens instead, and `asked_by` whom (steps,
    images, fields of the config)."""

    what: str
    asked_by: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(self.asked_by)}" if self.asked_by else self.what


class Submission(Record):
    """What was sent to a platform: the hash of the `definition`, and the `token` of the submission.

    `id` and `url` are the platform's, empty while it is not known whether the submission arrived.
    `resumed` counts how often what failed was tried again; `settled` says that the run is over and
    all that it left is known here; `machines` are those of each step, kind and number, which are
    spot machines for the steps in `spot`."""

    definition: str
    token: str
    id: str = ""
    url: str = ""
    resumed: int = 0
    settled: bool = False
    machines: Mapping[str, tuple[str, int]] = Field(default_factory=dict)
    spot: tuple[str, ...] = ()


class RunRecord(VersionedRecord):
    """`runs/<run_id>/run.json`: everything needed to show, resume, compare or reproduce a run.

    `spec` is the resolved configuration; `command` the words that reproduce it; `ignored` what this
    platform does not honour; `plan` what was planned before (answers.Planned). `started_at` is UTC,
    ISO 8601; `number` counts the runs of the home, whatever the clock says; `home` is the path of
    the home when the record was written. `settings` of a training of a grid are the values that it
    has for itself, such as `train.lr=1e-3`. `because` of what `rekindle watch` began it."""

    run_id: str
    number: int = 0
    home: str = ""
    name: str
    platform: str
    status: RunStatus
    started_at: str
    seconds: float = 0.0
    config: str = ""
    command: str = ""
    settings: tuple[str, ...] = ()
    spec: Mapping[str, Any] = Field(default_factory=dict)
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    steps: tuple[StepRecord, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    submission: Submission | None = None
    plan: Mapping[str, Any] = Field(default_factory=dict)
    error: str = ""
    because: str = ""
    versions: Mapping[str, str] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The record at `path`, its paths adapted to where the home is now."""
        found = super().read(path)
        now = str(Path(path).absolute().parent.parent.parent)
        if not found.home or found.home == now:
            return found
        return cls.model_validate(moved(found.model_dump(mode="json"), found.home, now))

    def step(self, name: str) -> StepRecord:
        """The step called `name`, else the one whose last path segment it is; raises KeyError."""
        exact = [step for step in self.steps if step.name == name]
        found = exact or [s for s in self.steps if s.name.rsplit("/", 1)[-1] == name]
        if not found:
            raise KeyError(name)
        return found[0]


class Fingerprint(VersionedRecord):
    """Kind `fingerprint`: what the source held when the run began, and the keys that follow from
    it.

    `data` hashes the bytes in the window; `tokenizing` the folders that examples are encoded by, ""
    for none; `work_key` the data, the settings and the code; `run_key`
    adds where the weights started, so that it identifies the training exactly. `champion` is the
    registry version to beat ("" = none), `champion_digest` the hash of its files; `init_digest` of
    those behind `init_from`, "" for a model of the hub."""

    data: str
    tokenizing: str = ""
    window: str
    files: int
    bytes: int
    run_key: str
    work_key: str
    init_from: str
    init_digest: str = ""
    champion: str
    champion_digest: str = ""


class ShardFile(Record):
    """One Arrow file of a manifest; `path` is relative to the manifest, `key` that of its entry in
    the store of pieces. `longest` row in tokens, and how many `sequences` the rows fill, where the
    task packs them. `examples`: the fingerprint of their hashes, in order. `source`: which of
    several it is of, from 0."""

    path: str
    split: str
    rows: int
    tokens: int
    bytes: int
    sha256: str
    key: str = ""
    longest: int = 0
    sequences: int = 0
    examples: str = ""
    source: int = 0


class MixedRows(Record):
    """A source of a mixture: its training examples, the share of an epoch's sequences that is drawn
    from it, and how often an epoch goes through it."""

    source: str
    rows: int
    share: float
    epochs: float


class ShardManifest(VersionedRecord):
    """Kind `shards`: `manifest.json` beside the shards. A shard that does not match its entry is
    refused at read.

    `rows` per split; `dropped` examples per split that hold nothing to learn from (empty: none);
    `labels` in index order (empty where the task has none); `class_rows` per split and label
    (words, where each has a tag); `slices` the columns that evaluation groups by; `settings` what
    the task stored beside the shards (image shape, tokenizer length ...); `examples` the
    fingerprint of those of the shards. `bad_rows` counts rows that were dropped, by kind of fault
    (one with two faults twice); `left_out` others, by reason: `duplicate`, `gap`. `shuffle_bytes`:
    about how much a window of shards has, within which rows are shuffled; `disk_bytes`: most that a
    node keeps of them, because they stay in the store of pieces (0: they lie beside this file).
    `sources` of a mixture; `drawn` by their shares, else each row once an epoch. `notices`: what a
    person should know of how the examples were encoded."""

    task: str
    source: str
    window: str = ""
    tokenizer: str = ""
    examples: str = ""
    labels: tuple[str, ...] = ()
    slices: tuple[str, ...] = ()
    rows: Mapping[str, int] = Field(default_factory=dict)
    dropped: Mapping[str, int] = Field(default_factory=dict)
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    left_out: Mapping[str, int] = Field(default_factory=dict)
    class_rows: Mapping[str, Mapping[str, int]] = Field(default_factory=dict)
    settings: Mapping[str, Any] = Field(default_factory=dict)
    shuffle_bytes: int = 0
    disk_bytes: int = 0
    sources: tuple[MixedRows, ...] = ()
    drawn: bool = False
    notices: tuple[str, ...] = ()
    shards: tuple[ShardFile, ...] = ()


class TrainingSummary(VersionedRecord):
    """Kind `training`: `training.json` inside the model artifact, beside `history.jsonl` (one
    `HistoryRow` a line). `precision` is what was computed in, never `auto`. It, `layout` and
    `device` (`cpu`, or a GPU as torch calls it) are empty where the user's own script trained.
    `deterministic`: kernels and collectives were those that repeat their bits. `attention`: what
    kept documents of a sequence apart in training steps, the `varlen` kernel, or one call of `sdpa`
    a document, as attention dropout needs it; empty where the architecture's own attention ran.
    `best_step`: the step whose weights the model has, where the lowest validation loss decides;
    `planned_steps`: how many there would have been, where early stopping ended it, or a budget of
    `budget_hours`. `in_effect`: what another engine said of itself before the first step.
    `proof`: what was proven of the model before it (train/proof.py), in words.
    `train_seconds`: what the steps up to the last took, without those that were lost and made
    again."""

    run_key: str
    task: str
    engine: str
    world_size: int
    steps: int
    epochs: float
    global_batch_size: int
    seed: int
    precision: str
    parameters: int
    init_from: str
    weights_sha256: str
    train_rows: int
    validation: Mapping[str, float] = Field(default_factory=dict)
    layout: str = ""
    device: str = ""
    deterministic: bool = False
    attention: str = ""
    best_step: int | None = None
    planned_steps: int | None = None
    budget_hours: float | None = None
    in_effect: Mapping[str, str] = Field(default_factory=dict)
    proof: Mapping[str, str] = Field(default_factory=dict)
    train_seconds: float | None = None


class HistoryRow(Record):
    """One optimizer step of `history.jsonl`. `loss` is the mean over the global batch's targets.

    The other group is measured and differs between identical runs: throughput of all ranks
    (wall clock, smoothed over recent steps), `step_seconds` of this step, `data_wait`, the share of
    it in which rank 0 waited for data, `tokens` of all ranks without padding, `memory_bytes`,
    rank 0's peak, and `mfu`, the share of the devices' peak that the model's FLOPs were (see
    train/throughput.py)."""

    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    samples_per_second: float
    tokens_per_second: float | None = None
    tokens: int | None = None
    step_seconds: float | None = None
    data_wait: float | None = None
    memory_bytes: int | None = None
    mfu: float | None = None


class OperatorShare(Record):
    """An operator in a profile: how often it ran, and its share of the recorded time."""

    name: str
    calls: int
    share: float


class Profile(VersionedRecord):
    """`profile.json` beside `history.jsonl`, where `train.profile` asked for it: what `steps` steps
    of rank 0 were bound by. `shares` of their `seconds`: compute, communication, data, host."""

    steps: int
    seconds: float
    bound: str
    shares: Mapping[str, float]
    advice: str
    operators: tuple[OperatorShare, ...] = ()


class Check(Record):
    """One test of the gate: `value` against `threshold`, and what it means in a sentence."""

    name: str
    passed: bool
    detail: str
    value: float | None = None
    threshold: float | None = None


class Churn(Record):
    """How often a model answers otherwise than another on the same `answers` (of words, where each
    has a tag): the `share`, and how many of those it gets right that the other got wrong, `fixed`,
    and wrong that the other got right, `broken`."""

    answers: int
    share: float
    fixed: int
    broken: int


class Slice(Record):
    """Metrics of the examples whose `column` holds `value`; `champion` is empty when there is
    none. `p_value`: how often chance alone would show such a drop; `detectable`: the drop that
    would be told from chance in 80 % of cases, were it the only slice."""

    column: str
    value: str
    rows: int
    candidate: Mapping[str, float]
    champion: Mapping[str, float] = Field(default_factory=dict)
    p_value: float | None = None
    detectable: float | None = None


class CalibrationBin(Record):
    """Predictions whose top probability falls in [`lower`, `upper`): how many, how confident, how
    often right."""

    lower: float
    upper: float
    rows: int
    confidence: float
    accuracy: float


class Comparison(Record):
    """Candidate minus champion on the same examples: estimate and the two-sided interval, of so
    many `resamples`, or exact where there are 0. `detectable`: the smallest gain that the lower
    bound would show in 80 % of cases."""

    metric: str
    estimate: float
    lower: float
    upper: float
    confidence: float
    resamples: int
    seed: int
    detectable: float | None = None


class ClassResult(Record):
    """How good a model is at one class, or at one type of entity.

    `rows` are of this class, `predicted` as often it was the answer. `precision` is null where it
    never was, `recall` where no row has it, `f1` where neither; `champion_f1` is the champion's."""

    label: str
    rows: int
    predicted: int
    precision: float | None = None
    recall: float | None = None
    f1: float | None = None
    champion_f1: float | None = None


class Sample(Record):
    """What a language model wrote after `prompt`, and how the text really goes on."""

    prompt: str
    generated: str
    expected: str


class SmokeRow(Record):
    """An example that decided, and the candidate's answer to it.

    `content` is the text, JSON of the words or of the turns before an answer, or base64 of a PNG.
    `answer` is what `POST /predict` of a server gives: `label` and `probability`, `tags` and
    `probabilities`, or `text`."""

    id: str
    content: str
    answer: Mapping[str, Any]


class Smoke(Record):
    """What a server of the model has to answer before it is ready. `tolerance` is how much
    probabilities may differ: that of the precision which the model was scored in. `tokens` is the
    length of texts that a language model wrote."""

    tolerance: float
    tokens: int = 0
    rows: tuple[SmokeRow, ...]


class Reference(Record):
    """What production is compared with: of rows that judged a model, one a content, the `inputs`,
    the numbers of each signal (data/signals.py), how sure it was of its answers, if they are
    classes, and how often each was `predicted`. `words` are the hashes of words that it was trained
    on: base64 of 32-bit numbers, little endian."""

    words: str = ""
    inputs: Mapping[str, tuple[float, ...]] = Field(default_factory=dict)
    confidence: tuple[float, ...] = ()
    predicted: Mapping[str, int] = Field(default_factory=dict)


class Contender(Record):
    """How a model was scored. `run_key` identifies its training, `digest` hashes the files of its
    folder, which take so many `bytes`; `scores` is the key of its scores (files, examples,
    settings, code); `labels` as in `ShardManifest`. `unigram_nats`, of a language model, is the
    entropy of the targets in the rows that both contenders are judged on."""

    run_key: str
    digest: str
    scores: str
    precision: str
    labels: tuple[str, ...] = ()
    unigram_nats: float | None = None
    bytes: int | None = None


class Scores(VersionedRecord):
    """Kind `scores`: `scores.json` beside `scores.parquet`, which has one row an example that
    decides: `id`, `hash`, `label`, the columns of slices in the struct `slices`, and what each
    contender scores in the structs `candidate` and `champion`: `logits` (of tags, those of a word
    after those of the word before), or `nats`, `right` and `targets`, summed over the targets, and
    `target_bytes`.

    `objective` is that of the candidate's task. `champion` is null where there is none, or where
    `incomparable` says why it cannot be compared (the name of a check, and a sentence);
    `champion_digest` is the hash of its files.
    `same_targets`: both cut the texts into the same tokens. `examples`, `excluded` and `bad_rows`
    as in `Evidence`; `samples`, `smoke` and `reference` are the candidate's. `must_pass` is the
    text of the golden rows whose `label` and `logits` are in `must_pass.parquet`; "" for none.
    `compared`: how many versions before were compared with a champion, by epoch (`Evidence`).
    `champion_judged` are the champion's metrics on the `champion_judged_rows` that it was promoted
    for; empty where that is not known."""

    objective: Objective
    candidate: Contender
    champion: Contender | None = None
    champion_version: str = ""
    champion_digest: str = ""
    incomparable: tuple[str, str] | None = None
    same_targets: bool = True
    rows: int
    excluded: int
    examples: str
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    samples: tuple[Sample, ...] = ()
    smoke: Smoke | None = None
    reference: Reference | None = None
    must_pass: str = ""
    compared: Mapping[str, int] = Field(default_factory=dict)
    champion_judged: Mapping[str, float] = Field(default_factory=dict)
    champion_judged_rows: int = 0


class ChampionDrop(Record):
    """What the champion reaches in `metric` on the `rows` of today, `now`, beside what it reached
    on others when it was `judged`. `drop` is how much worse that is; `p_value`: how often chance
    alone would show as much."""

    metric: str
    judged: float
    judged_rows: int
    now: float
    rows: int
    drop: float
    p_value: float

    @property
    def is_sure(self) -> bool:
        """Whether chance does not explain it: in one of a hundred runs it seems so."""
        return self.drop > 0 and self.p_value < _SURE

    @property
    def sentence(self) -> str:
        """What a person should know of it."""
        return (
            f"the champion reaches {self.metric} {self.now:.4g} on these {self.rows:,}"
            f" rows and had {self.judged:.4g} on {self.judged_rows:,} when it was judged"
            f" (p = {self.p_value:.2g}): the data or their labels may have changed"
        )


_SURE = 0.01


class Audit(Record):
    """What the contenders reach on rows that decide nothing (`evaluate.audit`), by the same
    measures; `comparison` is null without a champion, or with too few rows or clusters."""

    rows: int
    metrics: Mapping[str, float]
    champion_metrics: Mapping[str, float] = Field(default_factory=dict)
    comparison: Comparison | None = None


_MOST_NAMED = 5  # classes in a warning
_FEWEST_ROWS = 10


class Evidence(VersionedRecord):
    """Kind `evidence`: `evidence.json`, why a candidate is or is not promoted. `promote` is what
    the pipeline branches on.

    `confusion[i][j]` counts examples (words, where each has a tag) of true class i predicted as j,
    in the order of `labels`, and `classes` has them one by one; a language model has neither
    labels, confusion, classes nor calibration, but `samples`. `examples`
    fingerprints the hashes of the rows scored, `excluded` counts rows left out because a contender
    was trained on them, or finds nothing to predict in them. `model_digest` hashes the files of the
    model that was judged, `champion_digest` those of the champion; `churn` is of the two.
    `bad_rows` counts the rows of the data that were dropped before all, by kind of fault. `smoke`
    is null where no row is fit for it, it and `reference` in evidence of before they were kept.
    `epoch` identifies how the test split is drawn, where it was compared with a champion on it.
    `champion_drop` is null where it is not known what the champion reached when it was judged."""

    run_key: str
    model_digest: str = ""
    promote: bool
    reason: str
    checks: tuple[Check, ...]
    metrics: Mapping[str, float]
    champion_version: str = ""
    champion_digest: str = ""
    champion_metrics: Mapping[str, float] = Field(default_factory=dict)
    comparison: Comparison | None = None
    churn: Churn | None = None
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    classes: tuple[ClassResult, ...] = ()
    calibration: tuple[CalibrationBin, ...] = ()
    slices: tuple[Slice, ...] = ()
    samples: tuple[Sample, ...] = ()
    smoke: Smoke | None = None
    reference: Reference | None = None
    rows: int
    excluded: int = 0
    examples: str
    epoch: str = ""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    audit: Audit | None = None
    champion_drop: ChampionDrop | None = None

    @property
    def is_for_a_person(self) -> bool:
        """Whether nothing speaks against the model but what a person may decide: the champion is of
        other classes or of another kind, or does much worse than when it was judged."""
        failed = {check.name for check in self.checks if not check.passed}
        return bool(failed) and failed <= {"same_classes", "same_task", "champion_drop"}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before trusting the metrics: few rows, a champion that does
        worse than it did, classes that are never predicted."""
        drop = self.champion_drop
        known = [drop.sentence] if drop is not None and drop.is_sure else []
        if self.rows < _FEWEST_ROWS:
            known.append(
                f"the test split has {self.rows} rows, which tell little of a model: at least"
                f" {_FEWEST_ROWS} are wanted (data.split.test, or more data)"
            )
        return (*known, *self._never_predicted())

    def _never_predicted(self) -> tuple[str, ...]:
        never = [part for part in self.classes if part.rows and not part.predicted]
        if not never:
            return ()
        first = sorted(never, key=lambda part: -part.rows)[:_MOST_NAMED]
        names = ", ".join(f"`{part.label}` ({part.rows:,} held out)" for part in first)
        more = len(never) - len(first)
        rest = f" and {more:,} more of {len(self.classes):,} classes" if more else ""
        return (f"the model never predicts {names}{rest}",)


class Signal(Record):
    """What a monitor compared: the mean (of `prediction` the share of the class that was the most
    frequent) `before`, in the rows that judged the model, and in `rows` `now`. `effect` is how far
    both are apart: in points of unknown words and accuracy, else the distance of distributions, 0
    to 1. `detectable` is about the change of the mean that is found in 80 of 100 checks. Of
    `latency` both are medians in seconds, `before` that of the window before, `rows` requests, and
    `effect` the seconds between."""

    name: str
    before: float
    now: float
    effect: float
    rows: int
    p_value: float
    detectable: float | None = None
    alarm: bool = False


class Monitored(VersionedRecord):
    """Kind `monitored`: a check of what a model answered from `start` to `end`. `rows` of its
    `version` were logged, with so many `different` contents, null where no row tells its content;
    `left_out` others by why they do not count. `verdict` says whether there
    is an alarm, `quiet`, or there are `too_few` rows to tell; `reason` says it in a sentence.
    `expected_accuracy` is estimated from confidence, without labels; `p99_seconds` is how long
    99 of 100 requests took."""

    name: str
    version: str
    at: str
    start: str
    end: str
    verdict: Literal["alarm", "quiet", "too_few"]
    reason: str
    rows: int
    different: int | None = None
    left_out: Mapping[str, int] = Field(default_factory=dict)
    signals: tuple[Signal, ...] = ()
    expected_accuracy: float | None = None
    p99_seconds: float | None = None


ROLLED_BACK_BY_HAND = "rolled_back_by_hand"
"""Tag of a version in the registry: when a person rolled it back."""


class Registration(VersionedRecord):
    """Kind `registration`: what the registry holds after the run, for this run's model."""

    name: str
    version: str
    aliases: tuple[str, ...]
    created: bool
    decision: Decision
    tracking_uri: str
    tags: Mapping[str, str] = Field(default_factory=dict)


class ChampionChange(Record):
    """The `version` became champion `at` a time (ISO 8601, UTC): by the `gate`, by a person's
    `reason` (`promote --reason`), or by a `rollback`."""

    version: str
    at: str
    how: ChangeKind
    reason: str


class ChampionRecord(VersionedRecord):
    """What `rekindle champion --json` prints. `change` made it champion (null where that was before
    rekindle kept it), `reason` is its gate's, `beaten` the version it was compared with. `history`
    has the oldest change first; its last one is `unfinished` where the alias did not follow yet.
    `serves_at` are the addresses of its deployments."""

    name: str
    version: str
    digest: str
    change: ChampionChange | None
    beaten: str
    reason: str
    metrics: Mapping[str, float]
    window: str
    run_key: str
    challenger: str
    history: tuple[ChampionChange, ...]
    unfinished: bool
    tracking_uri: str
    serves_at: tuple[str, ...] = ()


class RolloutEvent(Record):
    """What a roll-out does next, written before it does it: `state` for the `version`, `previous`
    the one that had the requests before ("": none), `shares` of requests in percent, and the
    `reason` of a roll back. `at` is UTC. `digest` is the model's, and `inputs` how clients ask it,
    where it is created."""

    number: int
    state: RolloutState
    version: str
    previous: str
    at: str
    shares: Mapping[str, int]
    reason: str
    digest: str = ""
    inputs: str = ""


class VersionTraffic(Record):
    """Requests that a version was given since the shares last changed, those that it failed (5xx),
    and those that it refused (4xx). `p50_ms` and `p99_ms` are upper bounds, null without an
    answer."""

    state: str
    share: int
    requests: int
    errors: int
    p50_ms: float | None
    p99_ms: float | None
    refused: int = 0


class Deployment(VersionedRecord):
    """What `rekindle deploy --json` ends with: where a model serves, its versions there (none if
    the endpoint gives no answer), and what happened, oldest first. `version_hours` for which
    versions stood, each of two at once counted, and dollars for them at the prices of today, null
    where these are unknown."""

    name: str
    platform: str
    address: str
    versions: Mapping[str, VersionTraffic]
    events: tuple[RolloutEvent, ...]
    version_hours: float = 0.0
    usd: float | None = None


class GateSummary(Record):
    """The gate in a `RunSummary`: `promoted` says whether this run's model is the champion now,
    `passed` whether the gate let it pass; `comparison` as in `Evidence`."""

    promoted: bool
    decision: Decision
    passed: bool
    reason: str
    champion_version: str
    comparison: Comparison | None = None


class ModelSummary(Record):
    """Where the registry holds the model of a run; `created` is False for an exact rerun."""

    name: str
    version: str
    aliases: tuple[str, ...]
    created: bool


class StepSummary(Record):
    """One step of a `RunSummary`; see `StepRecord`."""

    name: str
    status: StepStatus
    seconds: float | None
    cached: bool
    reason: str


class RunSummary(VersionedRecord):
    """The object that `rekindle run --json` ends with. `gate` and `model` are null where a pipeline
    has neither; `window` of the data ("": all); `ignored` is what this machine did not honour;
    `earlier` names the runs of a backfill; `audit` is that of the evidence. `validation` has the
    last scores on the validation split, `settings` what a training of a grid has for itself."""

    run_id: str
    run_key: str
    status: RunStatus
    seconds: float
    steps: tuple[StepSummary, ...]
    metrics: Mapping[str, float]
    gate: GateSummary | None
    model: ModelSummary | None
    card: str
    warnings: tuple[str, ...] = ()
    window: str = ""
    validation: Mapping[str, float] = Field(default_factory=dict)
    settings: tuple[str, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    earlier: tuple[str, ...] = ()
    audit: Audit | None = None


class Turn(VersionedRecord):
    """A line of `watch/NAME.jsonl`: what `rekindle watch` decided `at` a time (UTC, ISO 8601), and
    because of what. With `ran`, `outcome` is empty until the run is over; `window` and `new_rows`
    are those of the data at the time."""

    turn: str
    at: str
    name: str
    decision: Literal["ran", "skipped", "suggested"] = "skipped"
    because: str = ""
    window: str = ""
    new_rows: int = 0
    run_id: str = ""
    outcome: str = ""


class Rehearsal(Record):
    """What a rehearsed fault did to a training: `step` at which it happened, the step that training
    `resumed_from_step` (0: from the start), how many samples had to be trained on again, and
    whether losses and final weights are, bit for bit, those of the uninterrupted training."""

    fault: str
    step: int
    resumed_from_step: int
    samples_lost: int
    losses_equal: bool
    weights_equal: bool


class RehearsalRecord(VersionedRecord):
    """`rehearsals/<id>.json`, and the object that `rekindle run --rehearse-preemption --json` ends
    with. `attempts` is how often the command had to be given until the training was done."""

    rehearsal_id: str
    config: str
    started_at: str
    seconds: float
    ranks: int
    attempts: int
    rehearsal: Rehearsal


RECORD_KINDS: dict[str, type[Record]] = {
    "fingerprint": Fingerprint,
    "shards": ShardManifest,
    "training": TrainingSummary,
    "scores": Scores,
    "evidence": Evidence,
    "registration": Registration,
}

# what a record is called in an artifact that is a folder
RECORD_FILES = {kind: f"{kind}.json" for kind in RECORD_KINDS} | {"shards": "manifest.json"}


def kind_of(content: bytes) -> str:
    """The kind of record that `content` is; "" for anything else. Kinds share no set of fields."""
    for kind, record in RECORD_KINDS.items():
        try:
            record.model_validate_json(content)
        except ValidationError:
            continue
        return kind
    return ""
