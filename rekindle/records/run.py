"""A run and its steps, as they go on and after."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord, moved

StepStatus = Literal["pending", "running", "succeeded", "failed", "skipped", "cancelled"]
RunStatus = Literal["submitting", "running", "succeeded", "failed", "cancelled", "preempted"]


class ArtifactRecord(Record):
    """An output artifact of a step."""

    uri: str
    """Where it lies; here a path."""
    kept: str = ""
    """A folder with the records in an artifact that lies elsewhere."""
    schema_title: str = "system.Artifact"
    """KFP's, such as `system.Model`."""
    metadata: Mapping[str, Any] = Field(default_factory=dict)
    digest: str = ""
    """Of the content."""


WAITING = "waiting: "
"""What the reason of a step begins with that cannot go on as the platform is."""


class StepRecord(Record):
    """One step of one run."""

    name: str
    """Its path in the Graph, nested DAGs joined with `/` (`condition-1/promote`)."""
    component: str = ""
    status: StepStatus = "pending"
    cached: bool = False
    reason: str = ""
    """In words why it ran, was taken from the cache, was skipped, or failed."""
    started_at: str = ""
    """UTC, ISO 8601."""
    seconds: float | None = None
    """Wall time including retries; None while it has not started."""
    attempts: int = 0
    billed_seconds: float | None = None
    """Of each machine, as the platform says."""
    on_demand_seconds: float | None = None
    """What it would bill without spot machines."""
    machine_seconds: float | None = None
    """Where a platform bills no other: how long each machine ran, in all attempts,
    without the waiting for them."""
    cache_key: str = ""
    log: str = ""
    """Path of the log of the step, or of its first node."""
    failed_log: str = ""
    """Path of that of another node which decided that it failed."""
    parameters: Mapping[str, Any] = Field(default_factory=dict)
    artifacts: Mapping[str, ArtifactRecord] = Field(default_factory=dict)
    error: str = ""

    def holding(self, kind: str) -> ArtifactRecord | None:
        """The first of its artifacts that holds a record of this kind."""
        return next((a for a in self.artifacts.values() if a.metadata.get("record") == kind), None)


class Ignored(Record):
    """A wish that a platform does not honour."""

    what: str
    """What happens instead."""
    asked_by: tuple[str, ...] = ()
    """Steps, images, or fields of the config."""

    def __str__(self) -> str:
        return f"{self.what}: {', '.join(self.asked_by)}" if self.asked_by else self.what


class Submission(Record):
    """What was sent to a platform."""

    definition: str
    """Its hash."""
    token: str
    """Of the submission: a second one with the same is the same."""
    id: str = ""
    """The platform's; empty while it is not known whether the submission arrived."""
    url: str = ""
    """The platform's, as `id`."""
    resumed: int = 0
    """How often what failed was tried again."""
    settled: bool = False
    """Whether the run is over and all that it left is known here."""
    unread: str = ""
    """Why what the run left could not be read, with what to do; empty where it was."""
    machines: Mapping[str, tuple[str, int]] = Field(default_factory=dict)
    """Of each step: kind and number."""
    spot: tuple[str, ...] = ()
    """The steps whose machines are spot machines."""


class RunRecord(VersionedRecord):
    """`runs/<run_id>/run.json`: everything needed to show, resume, compare or reproduce a run."""

    run_id: str
    number: int = 0
    """Counts the runs of the home, whatever the clock says."""
    home: str = ""
    """The path of the home when the record was written."""
    name: str
    platform: str
    status: RunStatus
    started_at: str
    """UTC, ISO 8601."""
    seconds: float = 0.0
    config: str = ""
    """The path of the config, as the command was given it."""
    command: str = ""
    """The words that reproduce it."""
    settings: tuple[str, ...] = ()
    """Of a training of a grid: the values that it has for itself, such as `train.lr=1e-3`."""
    spec: Mapping[str, Any] = Field(default_factory=dict)
    """The resolved configuration."""
    arguments: Mapping[str, Any] = Field(default_factory=dict)
    """Of the pipeline."""
    steps: tuple[StepRecord, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    """What this platform does not honour."""
    submission: Submission | None = None
    plan: Mapping[str, Any] = Field(default_factory=dict)
    """What was planned before (outputs.Planned)."""
    error: str = ""
    because: str = ""
    """Of what `rekindle watch` began it."""
    versions: Mapping[str, str] = Field(default_factory=dict)
    """Of rekindle."""

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """The record at `path`, its paths adapted to where the home is now."""
        record = super().read(path)
        # HOME/runs/RUN/run.json
        home = str(Path(path).absolute().parent.parent.parent)
        if not record.home or record.home == home:
            return record
        return cls.model_validate(moved(record.model_dump(mode="json"), record.home, home))

    def step(self, name: str) -> StepRecord:
        """The step called `name`, else the one whose last path segment it is; raises KeyError."""
        matching = [step for step in self.steps if step.name == name]
        if not matching:
            matching = [step for step in self.steps if step.name.rsplit("/", 1)[-1] == name]
        if not matching:
            raise KeyError(name)
        return matching[0]
