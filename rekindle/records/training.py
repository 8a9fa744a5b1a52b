"""A training: its summary, its loss curve, its profile, and a rehearsed fault."""

from collections.abc import Mapping

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord


class TrainingSummary(VersionedRecord):
    """Kind `training`: `training.json` inside the model artifact, beside `history.jsonl`
    (one `HistoryRow` a line)."""

    run_key: str
    task: str
    engine: str
    world_size: int
    steps: int
    epochs: float
    global_batch_size: int
    seed: int
    precision: str
    """What was computed in, never `auto`; empty where the user's own script trained."""
    parameters: int
    init_from: str
    weights_sha256: str
    train_rows: int
    validation: Mapping[str, float] = Field(default_factory=dict)
    layout: str = ""
    """Empty where the user's own script trained."""
    device: str = ""
    """`cpu`, or a GPU as torch calls it; empty where the user's own script trained."""
    deterministic: bool = False
    """Whether kernels and collectives were those that repeat their bits."""
    attention: str = ""
    """What kept documents of a sequence apart in training steps: the `varlen` kernel, or
    one call of `sdpa` a document, as attention dropout needs it; empty where the
    architecture's own attention ran."""
    best_step: int | None = None
    """The step whose weights the model has, where the lowest validation loss decides."""
    planned_steps: int | None = None
    """How many there would have been, where early stopping or a budget ended it."""
    budget_hours: float | None = None
    """The budget that ended it."""
    in_effect: Mapping[str, str] = Field(default_factory=dict)
    """What another engine said of itself before the first step."""
    proof: Mapping[str, str] = Field(default_factory=dict)
    """What was proven of the model before the first step (train/proof.py), in words."""
    train_seconds: float | None = None
    """What the steps up to the last took, without those that were lost and made again."""


class HistoryRow(Record):
    """One optimizer step of `history.jsonl`.

    The fields from `samples_per_second` on are measured, and differ between identical
    runs."""

    step: int
    epoch: float
    loss: float
    """The mean over the global batch's targets."""
    lr: float
    grad_norm: float
    validation_loss: float | None = None
    validation_accuracy: float | None = None
    samples_per_second: float
    """Of all ranks, by the wall clock, smoothed over recent steps."""
    tokens_per_second: float | None = None
    """As `samples_per_second`."""
    tokens: int | None = None
    """Of all ranks, without padding."""
    step_seconds: float | None = None
    """Of this step."""
    data_wait: float | None = None
    """The share of it in which rank 0 waited for data."""
    memory_bytes: int | None = None
    """Rank 0's peak so far."""
    mfu: float | None = None
    """The share of the devices' peak that the model's FLOPs were
    (train/throughput.py)."""


class OperatorShare(Record):
    """An operator in a profile."""

    name: str
    calls: int
    """How often it ran."""
    share: float
    """Of the recorded time."""


class Profile(VersionedRecord):
    """`profile.json` beside `history.jsonl`, where `train.profile` asked for it."""

    steps: int
    """How many of rank 0's were recorded."""
    seconds: float
    """How long these took."""
    bound: str
    """The largest of `shares`."""
    shares: Mapping[str, float]
    """Of `seconds`: compute, communication, data, host."""
    advice: str
    operators: tuple[OperatorShare, ...] = ()


class Rehearsal(Record):
    """What a rehearsed fault did to a training."""

    fault: str
    step: int
    """At which it happened."""
    resumed_from_step: int
    """The step that training went on from; 0: from the start."""
    samples_lost: int
    """How many had to be trained on again."""
    losses_equal: bool
    """Whether losses are, bit for bit, those of the uninterrupted training."""
    weights_equal: bool
    """Whether the final weights are."""


class RehearsalRecord(VersionedRecord):
    """`rehearsals/<id>.json`, and the object that `rekindle run --rehearse-preemption
    --json` ends with."""

    rehearsal_id: str
    config: str
    started_at: str
    seconds: float
    ranks: int
    attempts: int
    """How often the command had to be given until the training was done."""
    rehearsal: Rehearsal
