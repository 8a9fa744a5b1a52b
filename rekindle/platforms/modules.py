"""A platform whose subjects are modules of its folder: client, runs, schedule and doctor, as ours
are. The class hands its settings on; a type checker holds the modules against what is asked here.

A module is imported when it is asked: an SDK is needed by what speaks to the service only."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Protocol, TypeVar

from rekindle.platforms.api import Platform, SchedulesPipelines, SectionT_co
from rekindle.spec.section import PlatformSection

if TYPE_CHECKING:
    from rekindle.outputs import PlannedStep, Schedule
    from rekindle.platforms.cache_diff import CacheKey
    from rekindle.platforms.checks import Needs, PlatformCheck
    from rekindle.platforms.logs import LogPiece
    from rekindle.platforms.snapshot import RunSnapshot
    from rekindle.platforms.submission import (
        Definition,
        Lowered,
        RunTag,
        SubmissionPreview,
        SubmittedRun,
    )
    from rekindle.records import ArtifactRecord, StepRecord
    from rekindle.spec.schedule import ScheduleSpec

Place = TypeVar("Place", bound=PlatformSection, contravariant=True)


class ClientModule(Protocol[Place]):
    """What is submitted, and under which name. See `Platform.preview` and `submit`."""

    def cache_keys(self, files: Mapping[str, bytes], /) -> tuple[CacheKey, ...]: ...

    def where(self, place: Place, /) -> str: ...

    def run_name(self, definition: Definition, token: str, /) -> str: ...

    def steps(self, definition: Definition, /) -> tuple[PlannedStep, ...]: ...

    def submit(self, definition: Definition, place: Place, mark: RunTag, /) -> SubmittedRun: ...


class RunsModule(Protocol[Place]):
    """Runs that are there, as the methods of `Platform` of these names."""

    def describe(self, place: Place, id: str, /) -> RunSnapshot: ...

    def read_log(self, place: Place, id: str, step: StepRecord, cursor: str, /) -> LogPiece: ...

    def cancel(self, place: Place, id: str, /) -> None: ...

    def resume(
        self, definition: Definition, place: Place, id: str, mark: RunTag, /
    ) -> SubmittedRun: ...

    def artifacts(
        self, place: Place, id: str, step: StepRecord, /
    ) -> Mapping[str, ArtifactRecord]: ...

    def read(self, place: Place, uri: str, /) -> bytes: ...


class ScheduleModule(Protocol[Place]):
    """Schedules, as the methods of `SchedulesPipelines` of these names."""

    def lowered(self, schedule: ScheduleSpec, place: Place, /) -> Lowered: ...

    def set_schedule(
        self, definition: Definition, place: Place, schedule: ScheduleSpec, name: str, /
    ) -> Schedule: ...

    def list_schedules(self, place: Place, /) -> tuple[Schedule, ...]: ...

    def pause_schedule(self, place: Place, name: str, /) -> Schedule: ...

    def delete_schedule(self, place: Place, name: str, /) -> bool: ...


class DoctorModule(Protocol[Place]):
    """What is missing, as the methods of `Platform` of these names."""

    def permissions(self, place: Place, needs: Needs, /) -> str: ...

    def checks(
        self, place: Place, definition: Definition | None, needs: Needs, /
    ) -> Iterator[PlatformCheck]: ...


class PlatformOfModules(Platform[SectionT_co], SchedulesPipelines):
    """A platform with schedules whose work its modules do."""

    @property
    @abc.abstractmethod
    def _client(self) -> ClientModule[SectionT_co]: ...

    @property
    @abc.abstractmethod
    def _runs(self) -> RunsModule[SectionT_co]: ...

    @property
    @abc.abstractmethod
    def _schedule(self) -> ScheduleModule[SectionT_co]: ...

    @property
    @abc.abstractmethod
    def _doctor(self) -> DoctorModule[SectionT_co]: ...

    def cache_keys(self, files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
        return self._client.cache_keys(files)

    def preview(self, definition: Definition, token: str) -> SubmissionPreview:
        from rekindle.platforms.submission import SubmissionPreview

        client = self._client
        name = client.run_name(definition, token)
        return SubmissionPreview(client.where(self.settings), name, client.steps(definition))

    def submit(self, definition: Definition, mark: RunTag) -> SubmittedRun:
        return self._client.submit(definition, self.settings, mark)

    def describe(self, id: str) -> RunSnapshot:
        return self._runs.describe(self.settings, id)

    def read_log(self, id: str, step: StepRecord, cursor: str) -> LogPiece:
        return self._runs.read_log(self.settings, id, step, cursor)

    def cancel(self, id: str) -> None:
        self._runs.cancel(self.settings, id)

    def resume(self, definition: Definition, id: str, mark: RunTag) -> SubmittedRun:
        return self._runs.resume(definition, self.settings, id, mark)

    def artifacts(self, id: str, step: StepRecord) -> Mapping[str, ArtifactRecord]:
        return self._runs.artifacts(self.settings, id, step)

    def read(self, uri: str) -> bytes:
        return self._runs.read(self.settings, uri)

    def permissions(self, needs: Needs) -> str:
        return self._doctor.permissions(self.settings, needs)

    def checks(self, definition: Definition | None, needs: Needs) -> Iterator[PlatformCheck]:
        return self._doctor.checks(self.settings, definition, needs)

    def lowered(self, schedule: ScheduleSpec) -> Lowered:
        return self._schedule.lowered(schedule, self.settings)

    def set_schedule(self, definition: Definition, schedule: ScheduleSpec, name: str) -> Schedule:
        return self._schedule.set_schedule(definition, self.settings, schedule, name)

    def list_schedules(self) -> tuple[Schedule, ...]:
        return self._schedule.list_schedules(self.settings)

    def pause_schedule(self, name: str) -> Schedule:
        return self._schedule.pause_schedule(self.settings, name)

    def delete_schedule(self, name: str) -> bool:
        return self._schedule.delete_schedule(self.settings, name)
