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
    """The result in a sentence, for people."""
    value: float | None = None
    """The figure that is compared with `threshold`; None where the check compares none."""
    threshold: float | None = None


class Churn(Record):
    """How often a model's answers differ from those of another model to the same rows."""

    answers: int
    """How many answers were compared: one a row, or one a word where words have tags."""
    share: float
    """The part of them that differs."""
    fixed: int
    """How many the model gets right and the other model got wrong."""
    broken: int
    """How many the model gets wrong and the other model got right."""


class Slice(Record):
    """Metrics of the examples whose `column` holds `value`."""

    column: str
    value: str
    rows: int
    candidate: Mapping[str, float]
    champion: Mapping[str, float] = Field(default_factory=dict)
    """Empty without a champion."""
    p_value: float | None = None
    """The probability of such a drop by chance alone."""
    detectable: float | None = None
    """The drop that would be detected in 80 % of cases, if this were the only slice."""


class CalibrationBin(Record):
    """Predictions whose highest probability is in [`lower`, `upper`)."""

    lower: float
    upper: float
    rows: int
    """How many predictions there are."""
    confidence: float
    """The mean of their highest probabilities."""
    accuracy: float
    """The share of them that is right."""


class Comparison(Record):
    """The gain of the candidate over the champion on the same examples, with a two-sided
    interval. A positive gain is an improvement."""

    metric: str
    estimate: float
    lower: float
    upper: float
    confidence: float
    """The probability that the interval holds the true gain, at least."""
    resamples: int
    """Resamples of the bootstrap; 0: the interval is exact."""
    seed: int
    detectable: float | None = None
    """The true gain at which `lower` would be above zero in 80 % of cases."""


class ClassResult(Record):
    """How good a model is at one class, or at one type of entity."""

    label: str
    rows: int
    """How many are of this class."""
    predicted: int
    """How often the model answered with this class."""
    precision: float | None = None
    """None where the model never answered with it."""
    recall: float | None = None
    """None where no row is of it."""
    f1: float | None = None
    """None where precision and recall both are."""
    champion_f1: float | None = None


class Sample(Record):
    """What a language model wrote after `prompt`, and how the text of the row goes on."""

    prompt: str
    generated: str
    expected: str


class SmokeRow(Record):
    """An example of the test split, and the candidate's answer to it."""

    id: str
    content: str
    """The text, JSON of the words or of the turns before an answer, or base64 of a PNG."""
    answer: Mapping[str, Any]
    """What `POST /predict` of a server gives: `label` and `probability`, `tags` and
    `probabilities`, `value`, or `text`."""


class Smoke(Record):
    """What a server of the model has to answer before it is ready."""

    tolerance: float
    """By how much probabilities may differ, which depends on the precision of scoring."""
    tokens: int = 0
    """How many tokens a language model wrote of each text."""
    rows: tuple[SmokeRow, ...]


class Reference(Record):
    """What production is compared with: figures of the rows that judged the model. Rows
    with the same content count once."""

    words: str = ""
    """Hashes of the words that it was trained on: base64 of 32-bit numbers, little endian."""
    inputs: Mapping[str, tuple[float, ...]] = Field(default_factory=dict)
    """By signal of the inputs (data/signals.py), its value for each row."""
    confidence: tuple[float, ...] = ()
    """Where the answers are classes, the highest probability for each row."""
    predicted: Mapping[str, int] = Field(default_factory=dict)
    """How often the model answered with each class."""


class Contender(Record):
    """One of the models that are compared, and how it was scored."""

    run_key: str
    """Identifies its training."""
    digest: str
    """Hash of the files of its folder."""
    scores: str
    """The key of its scores: a hash of its files, the examples, settings and code."""
    precision: str
    """The precision in which it was scored."""
    labels: tuple[str, ...] = ()
    """As in `ShardManifest`."""
    unigram_nats: float | None = None
    """Of a language model: the entropy of single targets in the rows that both contenders
    are judged on, which is what a model would score that knows only how often each token
    occurs."""
    bytes: int | None = None
    """The size of the files of its folder."""


class Scores(VersionedRecord):
    """Kind `scores`: `scores.json` beside `scores.parquet`.

    The table has a row for each example of the test split that counts: `id`, `hash`,
    `label`, the columns of slices in the struct `slices`, and the scores of each
    contender in the structs `candidate` and `champion`. These are `logits` (of tags, word
    after word), or `nats`, `right` and `targets`, summed over the targets, and
    `target_bytes`."""

    objective: Objective
    """The objective of the candidate's task."""
    candidate: Contender
    champion: Contender | None = None
    """None where there is none, or where `incomparable` says why it cannot be compared."""
    champion_version: str = ""
    champion_digest: str = ""
    """Hash of the champion's files."""
    incomparable: tuple[str, str] | None = None
    """Why the champion cannot be compared: the name of the check that fails, and a sentence."""
    same_targets: bool = True
    """Whether both contenders cut the texts into the same tokens."""
    rows: int
    excluded: int
    """As in `Evidence`."""
    examples: str
    """As in `Evidence`."""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    """As in `Evidence`."""
    samples: tuple[Sample, ...] = ()
    """What the candidate wrote, if it is a language model."""
    smoke: Smoke | None = None
    """What a server of the candidate has to answer."""
    reference: Reference | None = None
    """What production is compared with once the candidate serves."""
    must_pass: str = ""
    """Text of the golden rows whose `label` and `logits` are in `must_pass.parquet`; "": none."""
    compared: Mapping[str, int] = Field(default_factory=dict)
    """By `Evidence.epoch`, how many earlier versions were compared with a champion in it."""
    champion_judged: Mapping[str, float] = Field(default_factory=dict)
    """The champion's metrics when it was judged; empty where they are not known."""
    champion_judged_rows: int = 0
    """On how many rows it was judged."""


_SURE = 0.01


class ChampionDrop(Record):
    """How much worse the champion does today than when it was judged, on other rows."""

    metric: str
    judged: float
    """What the champion reached when it was judged, on `judged_rows`."""
    judged_rows: int
    now: float
    """What it reaches in this run, on `rows`."""
    rows: int
    drop: float
    """By how much `now` is worse; negative where it is better."""
    p_value: float
    """The probability of such a drop by chance alone."""

    @property
    def is_sure(self) -> bool:
        """Whether there is a drop that chance does not explain (which is wrong in at most
        one of a hundred runs)."""
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
    """What the contenders reach on rows on which no promotion depends (`evaluate.audit`),
    by the same measures."""

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
    """Whether the candidate is promoted; the pipeline branches on it."""
    reason: str
    """Why, or why not, in a sentence."""
    checks: tuple[Check, ...]
    metrics: Mapping[str, float]
    champion_version: str = ""
    champion_digest: str = ""
    """Hash of the champion's files."""
    champion_metrics: Mapping[str, float] = Field(default_factory=dict)
    comparison: Comparison | None = None
    churn: Churn | None = None
    """How the candidate's answers differ from the champion's; None without a champion."""
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    """`confusion[i][j]` is the number of examples (of words, where words have tags) whose
    true class is i and whose predicted class is j, in the order of `labels`."""
    classes: tuple[ClassResult, ...] = ()
    """The results of each class."""
    calibration: tuple[CalibrationBin, ...] = ()
    slices: tuple[Slice, ...] = ()
    samples: tuple[Sample, ...] = ()
    smoke: Smoke | None = None
    """None where no row is fit for it, and in the evidence of older versions of rekindle."""
    reference: Reference | None = None
    """None in the evidence of older versions of rekindle."""
    rows: int
    """How many examples the metrics are of."""
    excluded: int = 0
    """How many more were left out, because a contender was trained on them or finds
    nothing to predict in them."""
    examples: str
    """Hash of the hashes of the examples that were scored."""
    epoch: str = ""
    """Identifies how the test split is drawn, if the candidate was compared with a
    champion on it; with `evaluate.gate.looks` the gate counts the comparisons of an
    epoch."""
    bad_rows: Mapping[str, int] = Field(default_factory=dict)
    """Rows of the data that were dropped when they were read, by kind of fault."""
    audit: Audit | None = None
    champion_drop: ChampionDrop | None = None
    """None where it is not known what the champion reached when it was judged."""

    @property
    def is_for_a_person(self) -> bool:
        """Whether all that speaks against the model is for a person to decide: the
        champion has other classes or is of another kind, or does much worse than when it
        was judged."""
        failed = {check.name for check in self.checks if not check.passed}
        return bool(failed) and failed <= {"same_classes", "same_task", "champion_drop"}

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know before trusting the metrics, in sentences: few rows,
        a champion that does worse than it did, classes that are never predicted."""
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
        """A warning that names the classes that are never predicted, if there are any."""
        never = [part for part in self.classes if part.rows and not part.predicted]
        if not never:
            return ()
        first = sorted(never, key=lambda part: -part.rows)[:_MOST_NAMED]
        names = ", ".join(f"`{part.label}` ({part.rows:,} held out)" for part in first)
        unnamed = len(never) - len(first)
        if unnamed:
            names += f" and {unnamed:,} more of {len(self.classes):,} classes"
        return (f"the model never predicts {names}",)
