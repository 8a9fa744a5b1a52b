"""Which checkpoints are kept: the newest few, the best, and one for each span of training time."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from rekindle.spec.model import CheckpointSpec
from rekindle.train.storage import Storage

MANIFEST = "manifest.json"
_NAME = re.compile(r"^step-(\d{9,})\.([0-9a-f]{8})$")


def names_in(storage: Storage) -> list[str]:
    """Names of checkpoints, complete or not, by step."""
    return sorted((n for n in storage.folders() if _NAME.match(n)), key=lambda n: (step_of(n), n))


def step_of(name: str) -> int:
    match = _NAME.match(name)
    assert match
    return int(match[1])


@dataclasses.dataclass(frozen=True)
class Facts:
    """What retention knows of a complete checkpoint."""

    name: str
    validation_loss: float | None = None
    train_seconds: float | None = None

    @classmethod
    def of(cls, name: str, manifest: Mapping[str, Any]) -> Self:
        state = manifest["state"]
        return cls(name, state.get("validation_loss"), state.get("train_seconds"))

    @property
    def judged(self) -> bool:
        """Whether its validation loss is a number."""
        return self.validation_loss is not None and math.isfinite(self.validation_loss)

    @classmethod
    def read(cls, storage: Storage, name: str) -> Self | None:
        """None where nothing was committed."""
        content = storage.read(f"{name}/{MANIFEST}")
        if content is None:
            return None
        try:
            return cls.of(name, json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(name)


def retained(complete: Sequence[Facts], spec: CheckpointSpec) -> set[str]:
    """Names to keep: the newest `keep`, the one with the lowest validation loss, the last of each
    span of training time."""
    ordered = sorted(complete, key=lambda facts: (step_of(facts.name), facts.name))
    kept = {facts.name for facts in ordered[-spec.keep :]}
    if spec.keep_best:
        judged = [(f.validation_loss, f.name) for f in ordered if f.judged]
        kept |= {min(judged, key=lambda pair: pair[0] or 0.0)[1]} if judged else set()
    if spec.keep_every_hours:
        last: dict[int, str] = {}
        for facts in ordered:
            if facts.train_seconds is not None:
                last[int(facts.train_seconds // (spec.keep_every_hours * 3600))] = facts.name
        kept |= set(last.values())
    return kept
