"""A run is over, with all its steps, as soon as it is there."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path

from rekindle.errors import PlatformError
from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import Mark, Placed
from rekindle.platforms.watch import Found, Log, Look
from rekindle.records import ArtifactRecord, StepRecord
from tests.platforms.toy import ToySpec, client


def look(place: ToySpec, id: str) -> Look:
    run = json.loads((Path(place.folder) / id).read_text())
    steps = tuple(StepRecord(name=name, status="succeeded", log=name) for name in run["steps"])
    return Look("succeeded", steps, ended_at=datetime.datetime.now(datetime.UTC))


def read_log(place: ToySpec, id: str, step: StepRecord, cursor: str) -> Log:
    return Log("" if cursor else f"{step.name} was here\n", "end")


def cancel(place: ToySpec, id: str) -> None:
    raise PlatformError("a run of the toy is always over", where=id)


def resume(definition: Definition, place: ToySpec, id: str, mark: Mark) -> Placed:
    return client.submit(definition, place, mark)


def artifacts(place: ToySpec, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
    return {}


def read(place: ToySpec, uri: str) -> bytes:
    return Path(uri).read_bytes()


def found(definition: Definition, place: ToySpec) -> tuple[Found, ...]:
    now = datetime.datetime.now(datetime.UTC)
    runs = [path for path in Path(place.folder).iterdir() if not path.suffix]
    marks = {path: Mark.read(path.read_text()) for path in runs}
    return tuple(Found(m, Placed(p.name, p.as_uri(), False), now) for p, m in marks.items() if m)
