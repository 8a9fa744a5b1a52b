"""What `rekindle run --json` ends with, and what `rekindle watch` decided."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord
from rekindle.records.evidence import Audit, Comparison
from rekindle.records.registry import Decision
from rekindle.records.run import Ignored, RunStatus, StepStatus


class GateSummary(Record):
    """The gate in a `RunSummary`."""

    promoted: bool
    """Whether this run's model is the champion now."""
    decision: Decision
    passed: bool
    """Whether the gate let it pass."""
    reason: str
    champion_version: str
    comparison: Comparison | None = None
    """As in `Evidence`."""


class ModelSummary(Record):
    """Where the registry holds the model of a run."""

    name: str
    version: str
    aliases: tuple[str, ...]
    created: bool
    """False for an exact rerun."""


class StepSummary(Record):
    """One step of a `RunSummary`; see `StepRecord`."""

    name: str
    status: StepStatus
    seconds: float | None
    cached: bool
    reason: str


class RunSummary(VersionedRecord):
    """The object that `rekindle run --json` ends with."""

    run_id: str
    run_key: str
    status: RunStatus
    seconds: float
    steps: tuple[StepSummary, ...]
    metrics: Mapping[str, float]
    gate: GateSummary | None
    """None where a pipeline has none."""
    model: ModelSummary | None
    """None where a pipeline has none."""
    card: str
    """Path of the HTML card."""
    warnings: tuple[str, ...] = ()
    window: str = ""
    """Of the data; "": all."""
    validation: Mapping[str, float] = Field(default_factory=dict)
    """The last scores on the validation split."""
    settings: tuple[str, ...] = ()
    """What a training of a grid has for itself."""
    ignored: tuple[Ignored, ...] = ()
    """What this machine did not honour."""
    earlier: tuple[str, ...] = ()
    """The runs of a backfill."""
    audit: Audit | None = None
    """That of the evidence."""


class Turn(VersionedRecord):
    """A line of `watch/NAME.jsonl`: what `rekindle watch` decided, and because of what."""

    turn: str
    at: str
    """UTC, ISO 8601."""
    name: str
    decision: Literal["ran", "skipped", "suggested"] = "skipped"
    because: str = ""
    window: str = ""
    """Of the data at the time."""
    new_rows: int = 0
    """Of the data at the time."""
    run_id: str = ""
    outcome: str = ""
    """With `ran`: empty until the run is over."""
