"""A run is over, with all its steps, as soon as it is there."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from rekindle.errors import PlatformError
from rekindle.platforms.logs import LogPiece
from rekindle.platforms.snapshot import RunSnapshot
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun
from rekindle.records import ArtifactRecord, StepRecord
from tests.platforms.toy import ToySpec, client


def describe(place: ToySpec, id: str) -> RunSnapshot:
    run = json.loads((Path(place.folder) / id).read_text())
    steps = tuple(StepRecord(name=name, status="succeeded", log=name) for name in run["steps"])
    return RunSnapshot("succeeded", steps, ended_at=datetime.datetime.now(datetime.UTC))


def read_log(place: ToySpec, id: str, step: StepRecord, cursor: str) -> LogPiece:
    return LogPiece("" if cursor else f"{step.name} was here\n", "end")


def cancel(place: ToySpec, id: str) -> None:
    raise PlatformError("a run of the toy is always over", where=id)


def resume(definition: Definition, place: ToySpec, id: str, mark: RunTag) -> SubmittedRun:
    return client.submit(definition, place, mark)


def artifacts(place: ToySpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    return {}


def read(place: ToySpec, uri: str) -> bytes:
    return Path(uri).read_bytes()
