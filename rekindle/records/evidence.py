"""What a model was judged by: scores, metrics, comparison, and the gate's checks."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord

Objective = Literal["classes", "numbers", "tags", "tokens"]


class Check(Record):
    """One test of the gate."""

    name: str
    passed: bool
    detail: str
    """What it means, in a sentence."""
    value: float | None = None
    """What is held against `threshold`."""
    threshold: float | None = None


class Churn(Record):
    """How often a model answers otherwise than another on the same rows."""

    answers: int
    """How many were compared; of words, where each has a tag."""
    share: float
    """Of them, those that differ."""
    fixed: int
    """Of these, those that it gets right and the other got wrong."""
    broken: int
    """Of these, those that it gets wrong and the other got right."""


class Slice(Record):
    """Metrics of the examples whose `column` holds `value`."""

    column: str
    value: str
    rows: int
    candidate: Mapping[str, float]
    champion: Mapping[str, float] = Field(default_factory=dict)
    """Empty when there is none."""
    p_value: float | None = None
    """How often chance alone would show such a drop."""
    detectable: float | None = None
    """The drop that would be told from chance in 80 % of cases, were it the only slice."""


class CalibrationBin(Record):
    """Predictions whose top probability falls in [`lower`, `upper`)."""

    lower: float
    upper: float
    rows: int
    """How many."""
    confidence: float
    """How sure they were, in the mean."""
    accuracy: float
    """How often they were right."""


class Comparison(Record):
    """Candidate minus champion on the same examples: estimate and two-sided interval."""

    metric: str
    estimate: float
    lower: float
    upper: float
    confidence: float
    resamples: int
    """Of the bootstrap; 0: the interval is exact."""
    seed: int
    detectable: float | None = None
    """The smallest gain that the lower bound would show in 80 % of cases."""


class ClassResult(Record):
    """How good a model is at one class, or at one type of entity."""

    label: str
    rows: int
    """Of this class."""
    predicted: int
    """How often it was the answer."""
    precision: float | None = None
    """None where it never was the answer."""
    recall: float | None = None
    """None where no row has it."""
    f1: float | None = None
    """None where neither is known."""
    champion_f1: float | None = None


class Sample(Record):
    """What a language model wrote after `prompt`, and how the text really goes on."""

    prompt: str
    generated: str
    expected: str


class SmokeRow(Record):
    """An example that decided, and the candidate's answer to it."""

    id: str
    content: str
    """The text, JSON of the words or of the turns before an answer, or base64 of a PNG."""
    answer: Mapping[str, Any]
    """What `POST /predict` of a server gives: `label` and `probability`, `tags` and
    `probabilities`, `value`, or `text`."""


class Smoke(Record):
    """What a server of the model has to answer before it is ready."""

    tolerance: float
    """How much probabilities may differ: that of the precision which the model was scored in."""
    tokens: int = 0
    """Length of the texts that a language model wrote."""
    rows: tuple[SmokeRow, ...]


class Reference(Record):
    """What production is compared with: of the rows that judged a model, one a content."""

    words: str = ""
    """Hashes of the words that it was trained on: base64 of 32-bit numbers, little endian."""
    inputs: Mapping[str, tuple[float, ...]] = Field(default_factory=dict)
    """The numbers of each signal (data/signals.py)."""
    confidence: tuple[float, ...] = ()
    """How sure it was of its answers, if they are classes."""
    predicted: Mapping[str, int] = Field(default_factory=dict)
    """How often each class was the answer."""


class Contender(Record):
    """How a model was scored."""

    run_key: str
    """Identifies its training."""
    digest: str
    """Hash of the files of its folder."""
    scores: str
    """The key of its scores: files, examples, settings, code."""
    precision: str
    labels: tuple[str, ...] = ()
    """As in `ShardManifest`."""
    unigram_nats: float | None = None
    """Of a language model: the entropy of the targets in the rows that both contenders
    are judged on."""
    bytes: int | None = None
    """Of the files of its folder."""


class Scores(VersionedRecord):
    """Kind `scores`: `scores.json` beside `scores.parquet`.

    The table has one row an example that decides: `id`, `hash`, `label`, the columns of
    slices in the struct `slices`, and what each contender scores in the structs
    `candidate` and `champion`: `logits` (of tags, those of a word after those of the word
    before), or `nats`, `right` and `targets`, summed over the targets, and
    `target_bytes`."""

    objective: Objective
    """Of the candidate's task."""
    candidate: Contender
    champion: Contender | None = None
    """None where there is none, or where `incomparable` says why it cannot be compared."""
    champion_version: str = ""
    champion_digest: str = ""
    """Hash of its files."""
    incomparable: tuple[str, str] | None = None
    """The name of a check, and a sentence."""
    same_targets: bool = True
    """Whether both cut the texts into the same tokens."""
    rows: int
    excluded: int
    """As in `Evidence`."""
    examples: str
    """As in `Evidence`."""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    """As in `Evidence`."""
    samples: tuple[Sample, ...] = ()
    """The candidate's."""
    smoke: Smoke | None = None
    """The candidate's."""
    reference: Reference | None = None
    """The candidate's."""
    must_pass: str = ""
    """Text of the golden rows whose `label` and `logits` are in `must_pass.parquet`; "": none."""
    compared: Mapping[str, int] = Field(default_factory=dict)
    """How many versions before were compared with a champion, by epoch (`Evidence`)."""
    champion_judged: Mapping[str, float] = Field(default_factory=dict)
    """The champion's metrics when it was promoted; empty where they are not known."""
    champion_judged_rows: int = 0
    """On how many rows."""


_SURE = 0.01


class ChampionDrop(Record):
    """How much worse the champion does today than when it was judged, on other rows."""

    metric: str
    judged: float
    """What it reached then, on `judged_rows`."""
    judged_rows: int
    now: float
    """What it reaches on the `rows` of today."""
    rows: int
    drop: float
    """How much worse that is."""
    p_value: float
    """How often chance alone would show as much."""

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


class Audit(Record):
    """What the contenders reach on rows that decide nothing (`evaluate.audit`), by the
    same measures."""

    rows: int
    metrics: Mapping[str, float]
    champion_metrics: Mapping[str, float] = Field(default_factory=dict)
    comparison: Comparison | None = None
    """None without a champion, or with too few rows or clusters."""


_MOST_NAMED = 5  # classes in a warning
_FEWEST_ROWS = 10


class Evidence(VersionedRecord):
    """Kind `evidence`: `evidence.json`, why a candidate is or is not promoted.

    A language model has neither labels, confusion, classes nor calibration, but
    `samples`."""

    run_key: str
    model_digest: str = ""
    """Hash of the files of the model that was judged."""
    promote: bool
    """What the pipeline branches on."""
    reason: str
    checks: tuple[Check, ...]
    metrics: Mapping[str, float]
    champion_version: str = ""
    champion_digest: str = ""
    """Hash of the champion's files."""
    champion_metrics: Mapping[str, float] = Field(default_factory=dict)
    comparison: Comparison | None = None
    churn: Churn | None = None
    """Of candidate and champion."""
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    """`confusion[i][j]` counts examples (words, where each has a tag) of true class i
    predicted as j, in the order of `labels`."""
    classes: tuple[ClassResult, ...] = ()
    """The same, class by class."""
    calibration: tuple[CalibrationBin, ...] = ()
    slices: tuple[Slice, ...] = ()
    samples: tuple[Sample, ...] = ()
    smoke: Smoke | None = None
    """None where no row is fit for it, and in evidence of before it was kept."""
    reference: Reference | None = None
    """None in evidence of before it was kept."""
    rows: int
    excluded: int = 0
    """Rows left out because a contender was trained on them, or finds nothing to predict
    in them."""
    examples: str
    """Fingerprint of the hashes of the rows scored."""
    epoch: str = ""
    """How the test split is drawn, where the model was compared with a champion on it."""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    """Rows of the data that were dropped before all, by kind of fault."""
    audit: Audit | None = None
    champion_drop: ChampionDrop | None = None
    """None where it is not known what the champion reached when it was judged."""

    @property
    def is_for_a_person(self) -> bool:
        """Whether nothing speaks against the model but what a person may decide: the
        champion is of other classes or of another kind, or does much worse than when it
        was judged."""
        failed = {check.name for check in self.checks if not check.passed}
        return bool(failed) and failed <= {"same_classes", "same_task", "champion_drop"}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before trusting the metrics: few rows, a champion
        that does worse than it did, classes that are never predicted."""
        drop = self.champion_drop
        warnings = list[str]()
        if drop is not None and drop.is_sure:
            warnings.append(drop.sentence)
        if self.rows < _FEWEST_ROWS:
            warnings.append(
                f"the test split has {self.rows} rows, which tell little of a model: at least"
                f" {_FEWEST_ROWS} are wanted (data.split.test, or more data)"
            )
        return (*warnings, *self._never_predicted())

    def _never_predicted(self) -> tuple[str, ...]:
        never = [part for part in self.classes if part.rows and not part.predicted]
        if not never:
            return ()
        first = sorted(never, key=lambda part: -part.rows)[:_MOST_NAMED]
        names = ", ".join(f"`{part.label}` ({part.rows:,} held out)" for part in first)
        unnamed = len(never) - len(first)
        if unnamed:
            names += f" and {unnamed:,} more of {len(self.classes):,} classes"
        return (f"the model never predicts {names}",)
