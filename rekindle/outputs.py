"""What verbs say with `--json`: one object each on stdout.

`configs/schemas/` has their schemas (`python -m tools.generate`). Verbs that end with a run
say `RunSummary`, `RunRecord` or `Registration` of records/, whichever they show."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from rekindle.errors import RekindleError
from rekindle.records import Comparison, Decision, Record, RunStatus, RunSummary, VersionedRecord


class ErrorRow(Record):
    """`what` is wrong, `where` (a field with its line, a flag, a step), and what to do (`fix`)."""

    code: str
    what: str
    where: str = ""
    fix: str = ""


def rows_of(error: RekindleError) -> tuple[ErrorRow, ...]:
    """A row a problem."""
    return tuple(ErrorRow(**dataclasses.asdict(problem)) for problem in error.problems)


class Errors(VersionedRecord):
    """Any verb that was refused or failed (exit codes 1 and 2)."""

    errors: tuple[ErrorRow, ...]


class Compiled(VersionedRecord):
    """`compile`: the files that were written; `platform` has commas between several."""

    platform: str
    files: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A step, whether it will run `again`, and why."""

    step: str
    again: Literal["yes", "perhaps", "no", "gone"]
    why: str


class Difference(VersionedRecord):
    """`diff`: every step of the config as it is now, then those that are gone."""

    platform: str
    steps: tuple[Verdict, ...]


@dataclasses.dataclass(frozen=True)
class PlannedStep:
    """A step that is to run: `machines` of the platform's kind `machine`."""

    step: str
    machine: str
    machines: int = 1
    spot: bool = False


class Submitted(VersionedRecord):
    """`submit` and `resume` without `--wait`. `id` and `url` are the platform's; `anew` is false
    where the same submission (`token`) was there already; `where` and `steps` are what it was asked
    to make, left out where it was asked before."""

    run_id: str
    platform: str
    token: str
    id: str
    url: str
    anew: bool
    where: str = ""
    steps: tuple[PlannedStep, ...] = ()


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A schedule as the platform has it: its `id` there, five fields of cron, a time zone, and
    whether it starts runs now."""

    id: str
    cron: str
    timezone: str
    enabled: bool


class Schedules(VersionedRecord):
    """`schedule set`, `list` and `pause`: the schedules that were asked about."""

    platform: str
    schedules: tuple[Schedule, ...]


class ScheduleDeleted(VersionedRecord):
    """`schedule delete`: whether there was one."""

    platform: str
    deleted: bool


class Alarm(Record):
    """An alarm, a dashboard or a file of them, and what became of it: `created`, `changed`,
    `unchanged`, `deleted`, or `edited` by hand, so that it stays."""

    kind: str
    name: str
    state: str


class Alarms(VersionedRecord):
    """`alarms write` and `alarms delete`."""

    platform: str
    alarms: tuple[Alarm, ...]


class Spent(Record):
    """Machine hours and dollars; those that were lost: of a training, all but what the steps in its
    model took, and all of a step that failed; what spot machines saved, and how often they were
    taken."""

    hours: float
    usd: float
    saved_usd: float
    lost_hours: float
    lost_usd: float
    interruptions: int


class Cost(Spent):
    """Of a run on a platform. `billed` steps have the seconds that the platform says it bills,
    others how long they ran; `unpriced` steps are in no sum of dollars."""

    run_id: str
    platform: str
    started_at: str
    billed: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()


class CostOfMonth(Spent):
    """The sums over the runs that began in a month, `2026-11`."""

    month: str
    runs: int


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


class ImageBuilt(VersionedRecord):
    """`images build`: the image here, docker's `id` of it, and the user's own code in it.

    `code` is the hash of that code, `files` are its files."""

    image: str
    id: str
    code: str
    files: tuple[str, ...]


class ImagesPushed(VersionedRecord):
    """`images push`: the images by digest, and the `lock` file that now names them."""

    images: tuple[str, ...]
    lock: str


class RunRow(RunSummary):
    """A run in the ledger. `killed`: no process works on it, and none closed it. `champion`: its
    model is the last that became champion, as far as this home knows."""

    name: str
    champion: bool
    started_at: str
    status: RunStatus | Literal["killed"]  # type: ignore[assignment]


class Runs(VersionedRecord):
    """`runs`: newest first."""

    runs: tuple[RunRow, ...]


class ComparedRun(Record):
    """A run that is compared: when it began, how it ended and how long it took, all steps together
    and `training_seconds` of the training alone (0: from the cache, null: none); what the gate
    decided, the model, and how many held-out `rows` it was judged on."""

    run_id: str
    started_at: str
    status: RunStatus
    seconds: float
    training_seconds: float | None
    decision: Decision | None
    model: str
    rows: int | None


class ComparedFact(Record):
    """A field of the config, or a fact of the data, that is not the same in all runs; `values` in
    the order of the runs, null where one lacks it."""

    name: str
    values: tuple[Any, ...]


class ComparedMetric(Record):
    """A metric of each run. `changes` compares each model with the first run's as the gate does:
    more is better whatever the metric; null where they cannot be compared."""

    name: str
    values: tuple[float | None, ...]
    changes: tuple[Comparison | None, ...]


class GridRow(Record):
    """A training of a grid: what it has for itself (`settings`, as `--set` has them), its run, and
    what the validation split said; null where the training failed or there is no such split."""

    settings: tuple[str, ...]
    run_id: str
    status: RunStatus
    seconds: float
    validation_loss: float | None
    validation_accuracy: float | None


class Grid(VersionedRecord):
    """`run` with several values of a field: every training, and the pipeline of the `best`."""

    trainings: tuple[GridRow, ...]
    best: RunSummary


class Compared(VersionedRecord):
    """`compare`: `settings` and `data` hold what differs; `notes` say what could not be
    compared."""

    runs: tuple[ComparedRun, ...]
    settings: tuple[ComparedFact, ...]
    data: tuple[ComparedFact, ...]
    metrics: tuple[ComparedMetric, ...]
    notes: tuple[str, ...] = ()


class HomeItem(Record):
    """Something under a home, by its `path` there, or elsewhere by an absolute path or a URI. It
    `stays`, or it may go and has `bytes`; `why` says why."""

    kind: str
    path: str
    bytes: int
    stays: bool
    why: str


class Collected(VersionedRecord):
    """`gc`: what was looked at, and whether it stays or is gone now."""

    items: tuple[HomeItem, ...]


class ReadinessCheck(Record):
    """A question to a platform: what was asked, of what (`where`), and what came of it. `said` is
    the answer, what is wrong, or why it could not be asked, which is no problem by itself."""

    name: str
    where: str
    state: Literal["ok", "problem", "not asked"]
    said: str
    fix: str = ""


class Readiness(VersionedRecord):
    """`doctor`: the permissions that steps need at least, every question, and
    everything that is wrong, with the config too."""

    platform: str
    permissions: str = ""
    checks: tuple[ReadinessCheck, ...] = ()
    errors: tuple[ErrorRow, ...] = ()


class PlannedTerm(Record):
    """A part of memory (bytes) or time (seconds a step)."""

    name: str
    amount: float


class PlannedLayout(Record):
    """Machines and a layout. Seconds are those of an optimizer step: least, expected, most (nine of
    ten lie within). `memory_bytes` are of tensors on the fullest GPU, of `needed_bytes` with the
    allocator's reserve, of `device_bytes` that there are. `zero` says what DeepSpeed divides, where
    it trains."""

    machine: str
    nodes: int
    gpus_per_node: int
    gpu: str
    region: str
    layout: str
    degrees: Mapping[str, int]
    schedule: str
    micro_batch_size: int
    accumulation: int
    activation_checkpointing: str
    precision: str = ""
    step_seconds: tuple[float, float, float]
    tokens_per_second: float
    mfu: float
    dominant: str
    memory_bytes: int
    needed_bytes: int
    device_bytes: int
    on_demand_usd_per_hour: float | None
    spot_usd_per_hour: float | None
    zero: str = ""


class PlannedSpot(Record):
    """Training on spot machines. Pairs are for machines that are reclaimed all at once, and one by
    one; `every` is the number of steps between two checkpoints. With a deadline, on-demand machines
    have to take over once training is `slack_hours` behind what it is without interruptions: the
    chance of that, and the expected cost of both kinds together."""

    viable: str
    hazard_per_node_hour: float
    hazard: str
    every: int
    hours: tuple[float, float]
    usd: tuple[float, float]
    interruptions: tuple[float, float]
    in_time: tuple[float | None, float | None]
    in_budget: tuple[float | None, float | None]
    slack_hours: float | None = None
    fallback: tuple[float, float] | None = None
    fallback_usd: tuple[float, float] | None = None
    reasons: tuple[str, ...]


class Rejection(Record):
    """A layout that was not taken, and why."""

    layout: str
    reason: str


class PlannedRest(Record):
    """The steps besides training, as long as they took in the run `run_id`; dollars where the
    prices of all their machines are known; `ingest` and `shard` on `divided` machines, had it
    another number (0: the same)."""

    hours: float
    usd: float | None
    run_id: str
    divided: int = 0


class Planned(VersionedRecord):
    """`plan`: what training needs, how long it takes and what it costs. `hours` as `step_seconds`,
    null where the number of steps depends on data; `rest`, which is in none of the others, is null
    where no earlier run is known; `advice` says why this engine and layout, and what the other
    engine would do, `if_else` what other machines or data would change, `notes` what is assumed or
    not known."""

    name: str
    parameters: int
    tokens_per_step: int
    steps: int | None
    chosen: PlannedLayout
    memory: tuple[PlannedTerm, ...]
    time: tuple[PlannedTerm, ...]
    hours: tuple[float, float, float] | None
    on_demand_usd: tuple[float, float, float] | None
    spot: PlannedSpot | None
    rest: PlannedRest | None = None
    others: tuple[PlannedLayout, ...]
    rejected: tuple[Rejection, ...]
    weighed: int
    advice: tuple[str, ...] = ()
    if_else: tuple[str, ...]
    notes: tuple[str, ...]
    errors: tuple[ErrorRow, ...] = ()


class Calibration(VersionedRecord):
    """`plan --calibrate`: a measured training, kept as `speeds/RUN.json`. Seconds are those of a
    step, measured as the median of `steps` of them, without the first `left_out`; `predicted` with
    the numbers called `constants`, uncorrected; `ratio` is measured over predicted. `job` names the
    work and the machines; an example had `sequence` tokens (0: not known)."""

    run_id: str
    gpu: str
    compiled: bool
    layout: str
    measured: float
    predicted: float
    ratio: float
    steps: int
    left_out: int
    job: str
    constants: str
    sequence: int = 0
    engine: str = "rekindle"


class Predicted(VersionedRecord):
    """`predict`: what lies in `output`; `parts_before` of its parts were there already."""

    output: str
    rows: int
    parts: int
    parts_before: int
    model: str
    version: str


ANSWERS: Mapping[str, type[VersionedRecord]] = {
    "card": Card,
    "collected": Collected,
    "compared": Compared,
    "compiled": Compiled,
    "alarms": Alarms,
    "costs": Costs,
    "difference": Difference,
    "errors": Errors,
    "grid": Grid,
    "image-built": ImageBuilt,
    "images-pushed": ImagesPushed,
    "laid-out": LaidOut,
    "log": LogText,
    "calibration": Calibration,
    "planned": Planned,
    "predicted": Predicted,
    "readiness": Readiness,
    "runs": Runs,
    "schedule-deleted": ScheduleDeleted,
    "schedules": Schedules,
    "submitted": Submitted,
}
