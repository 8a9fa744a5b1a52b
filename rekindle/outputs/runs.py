"""What verbs say that show runs, compare them, or remove what they left."""

from typing import Any, Literal

from rekindle.records import Comparison, Decision, Record, RunStatus, RunSummary, VersionedRecord


class Spent(Record):
    """Machine hours and dollars."""

    hours: float
    usd: float
    saved_usd: float
    """What spot machines saved."""
    lost_hours: float
    """Of a training, all but what the steps in its model took; all of a step that failed."""
    lost_usd: float
    """Dollars for these."""
    interruptions: int
    """How often spot machines were taken."""


class Cost(Spent):
    """What a run on a platform took."""

    run_id: str
    platform: str
    started_at: str
    billed: tuple[str, ...] = ()
    """The steps with the seconds that the platform says it bills; others have how long they ran."""
    unpriced: tuple[str, ...] = ()
    """The steps that are in no sum of dollars."""


class CostOfMonth(Spent):
    """The sums over the runs that began in a month."""

    month: str
    """Such as `2026-11`."""
    runs: int
    """How many began."""


class Costs(VersionedRecord):
    """`runs --costs`: the newest first."""

    runs: tuple[Cost, ...]
    months: tuple[CostOfMonth, ...]


class LogText(VersionedRecord):
    """`logs`: what a step has printed so far; with `-f`, until it ended."""

    run_id: str
    step: str
    text: str


class Card(VersionedRecord):
    """`report`: the card of a run and the index of all."""

    run_id: str
    card: str
    index: str


class LaidOut(VersionedRecord):
    """`init`: the files, relative to the folder."""

    folder: str
    files: tuple[str, ...]


class RunRow(RunSummary):
    """A run in the ledger."""

    name: str
    champion: bool
    """Whether its model is the last that became champion, as far as this home knows."""
    started_at: str
    status: RunStatus | Literal["killed"]  # type: ignore[assignment]
    """`killed`: no process works on it, and none closed it."""


class Runs(VersionedRecord):
    """`runs`: newest first."""

    runs: tuple[RunRow, ...]


class ComparedRun(Record):
    """A run that is compared."""

    run_id: str
    started_at: str
    status: RunStatus
    seconds: float
    """Of all steps together."""
    training_seconds: float | None
    """Of the training alone; 0: from the cache; None: there is none."""
    decision: Decision | None
    """The gate's."""
    model: str
    rows: int | None
    """Held-out rows that the model was judged on."""


class ComparedFact(Record):
    """A field of the config, or a fact of the data, that is not the same in all runs."""

    name: str
    values: tuple[Any, ...]
    """In the order of the runs; None where one lacks it."""


class ComparedMetric(Record):
    """A metric of each run."""

    name: str
    values: tuple[float | None, ...]
    changes: tuple[Comparison | None, ...]
    """Each model against the first run's, as the gate compares: more is better whatever
    the metric; None where they cannot be compared."""


class GridRow(Record):
    """A training of a grid."""

    settings: tuple[str, ...]
    """What it has for itself, as `--set` has them."""
    run_id: str
    status: RunStatus
    seconds: float
    validation_loss: float | None
    """None where the training failed, or there is no validation split."""
    validation_accuracy: float | None
    """As `validation_loss`."""


class Grid(VersionedRecord):
    """`run` with several values of a field."""

    trainings: tuple[GridRow, ...]
    """All of them."""
    best: RunSummary
    """The pipeline of the best one."""


class Compared(VersionedRecord):
    """`compare`: what differs between runs."""

    runs: tuple[ComparedRun, ...]
    settings: tuple[ComparedFact, ...]
    data: tuple[ComparedFact, ...]
    metrics: tuple[ComparedMetric, ...]
    notes: tuple[str, ...] = ()
    """What could not be compared."""


class HomeItem(Record):
    """Something under a home."""

    kind: str
    path: str
    """Below the home, or elsewhere an absolute path or a URI."""
    bytes: int
    """Of what may go."""
    stays: bool
    """Else it may go."""
    why: str
    """Why it stays or may go."""


class Collected(VersionedRecord):
    """`gc`: what was looked at, and whether it stays or is gone now."""

    items: tuple[HomeItem, ...]


class Predicted(VersionedRecord):
    """`predict`: what lies in `output`."""

    output: str
    rows: int
    parts: int
    parts_before: int
    """How many parts were there already."""
    model: str
    version: str
