"""Versions of a model: what was registered, and who is champion since when."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from rekindle.records.base import Record, VersionedRecord

Decision = Literal["promoted", "pending", "approval_needed", "refused", "rolled_back"]
ChangeKind = Literal["gate", "reason", "rollback"]
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
    """When and why a version became champion."""

    version: str
    at: str
    """UTC, ISO 8601."""
    how: ChangeKind
    """By the `gate`, by a person's `reason` (`promote --reason`), or by a `rollback`."""
    reason: str


class ChampionRecord(VersionedRecord):
    """What `rekindle champion --json` prints."""

    name: str
    version: str
    digest: str
    change: ChampionChange | None
    """What made it champion; None where that was before rekindle kept it."""
    beaten: str
    """The version that it was compared with."""
    reason: str
    """Its gate's."""
    metrics: Mapping[str, float]
    window: str
    run_key: str
    challenger: str
    history: tuple[ChampionChange, ...]
    """The oldest change first."""
    unfinished: bool
    """Whether the alias did not follow the last change yet."""
    tracking_uri: str
    serves_at: tuple[str, ...] = ()
    """The addresses of its deployments."""
