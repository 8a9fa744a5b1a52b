"""A whole platform in a package of its own: a folder whose files are runs, which end at once.

It has schedules, which nothing looks at, and neither endpoints nor alarms nor a model registry."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from rekindle.errors import PlatformError, RequestError, SpecError
from rekindle.ir.graph import Graph
from rekindle.outputs import PlannedStep, Schedule
from rekindle.platforms.api import Platform
from rekindle.platforms.cache_diff import CacheKey
from rekindle.platforms.checks import Needs, PlatformCheck, about
from rekindle.platforms.feature_checks import admit
from rekindle.platforms.logs import LogPiece
from rekindle.platforms.snapshot import RunSnapshot
from rekindle.platforms.submission import (
    Definition,
    Lowered,
    RunTag,
    SubmissionPreview,
    SubmittedRun,
    digest_of,
)
from rekindle.records import ArtifactRecord, StepRecord
from rekindle.spec.schedule import ScheduleSpec
from rekindle.spec.section import Needed, PlatformSection


class ToySpec(PlatformSection):
    """A folder that plays a platform."""

    TITLE, PATH = "Toy", "platforms.toy"

    folder: Annotated[str, Needed("/srv/toy", to="compile")] = ""
    """Where runs and schedules lie."""
    image: str | None = None
    """Container image of rekindle's steps."""
    artifact_root: str = "/srv/artifacts"
    """Folder for checkpoints."""


class Toy(Platform[ToySpec]):
    """Runs are files, named after their submission, so that each is made once."""

    name: ClassVar[str] = "toy"
    section = ToySpec
    seam = 1

    def compile(self, ir_text: str, graph: Graph, arguments: Mapping[str, object]) -> Definition:
        if problems := self.settings.missing("compile"):
            raise SpecError(problems)
        admit(graph, self.name, arguments=arguments)
        steps = {step.path: step.container.image for step in graph.steps()}
        text = json.dumps({"arguments": dict(arguments), "steps": steps}, indent=1)
        return Definition({f"{graph.name}.toy.json": text.encode()})

    def cache_keys(self, files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
        (content,) = files.values()
        steps = json.loads(content)["steps"]
        return tuple(CacheKey(name, False, {"its image": image}) for name, image in steps.items())

    def preview(self, definition: Definition, token: str) -> SubmissionPreview:
        names = json.loads(definition.text)["steps"]
        steps = tuple(PlannedStep(name, "toy") for name in names)
        return SubmissionPreview(self.settings.folder, digest_of(definition.files, token), steps)

    def submit(self, definition: Definition, mark: RunTag) -> SubmittedRun:
        run = self._file(digest_of(definition.files, mark.token))
        is_new = not run.exists()
        if is_new:
            run.write_text(json.dumps({"mark": str(mark), **json.loads(definition.text)}))
        return SubmittedRun(run.name, run.as_uri(), is_new)

    def describe(self, id: str) -> RunSnapshot:
        run = json.loads(self._file(id).read_text())
        steps = tuple(StepRecord(name=name, status="succeeded", log=name) for name in run["steps"])
        return RunSnapshot("succeeded", steps, ended_at=datetime.datetime.now(datetime.UTC))

    def read_log(self, id: str, step: StepRecord, cursor: str) -> LogPiece:
        return LogPiece("" if cursor else f"{step.name} was here\n", "end")

    def cancel(self, id: str) -> None:
        raise PlatformError("a run of the toy is always over", where=id)

    def resume(self, definition: Definition, id: str, mark: RunTag) -> SubmittedRun:
        return self.submit(definition, mark)

    def artifacts(self, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
        return {}

    def read(self, uri: str) -> bytes:
        return Path(uri).read_bytes()

    def permissions(self, needs: Needs) -> str:
        return "none\n"

    def checks(self, definition: Definition | None, needs: Needs) -> Iterator[PlatformCheck]:
        yield about(self.name, self.settings)("folder", "folder", _folder, early=True)

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        return Lowered(schedule.cron, schedule.timezone, "waits", "made up for")

    def set_schedule(self, definition: Definition, schedule: ScheduleSpec, name: str) -> Schedule:
        self._file(f"{name}.schedule").write_text(schedule.cron)
        return Schedule(name, schedule.cron, schedule.timezone, enabled=True)

    def list_schedules(self) -> tuple[Schedule, ...]:
        files = sorted(Path(self.settings.folder).glob("*.schedule"))
        return tuple(Schedule(f.stem, f.read_text(), "UTC", enabled=True) for f in files)

    def pause_schedule(self, name: str) -> Schedule:
        return Schedule(name, self._file(f"{name}.schedule").read_text(), "UTC", enabled=False)

    def delete_schedule(self, name: str) -> bool:
        file = self._file(f"{name}.schedule")
        is_there = file.exists()
        file.unlink(missing_ok=True)
        return is_there

    def _file(self, name: str) -> Path:
        return Path(self.settings.folder) / name


def _folder(place: ToySpec) -> str:
    if not Path(place.folder).is_dir():
        raise RequestError(f"there is no folder {place.folder}", fix=f"mkdir {place.folder}")
    return place.folder
