"""`rekindle schedule set|list|pause|delete CONFIG --platform P`: what a platform starts by
itself."""

from __future__ import annotations

import dataclasses
import datetime
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.answers import ScheduleDeleted, ScheduleRow, Schedules
from rekindle.cli.doctor import refuse_early
from rekindle.cli.options import agree, answer, config, overrides, shared, yes
from rekindle.cli.submission import client_of, ready
from rekindle.cli.submit import platform, show
from rekindle.errors import Problem, RequestError

if TYPE_CHECKING:
    from rekindle.platforms.definition import Definition
    from rekindle.platforms.submission import Lowered, Schedule
    from rekindle.spec.model import Spec
    from rekindle.spec.schedule import ScheduleSpec

_SHOWN = 3  # of the next starts

# each has `lowered(schedule, place)`, `set_(definition, place, schedule, name)`, `list_(place)`,
# `pause(place, name)` and `delete(place, name)`
SCHEDULES = {
    "azureml": "rekindle.platforms.azureml.schedule",
    "kubeflow": "rekindle.platforms.kubeflow.schedule",
    "sagemaker": "rekindle.platforms.sagemaker.schedule",
    "vertex": "rekindle.platforms.vertex.schedule",
}


@click.group("schedule")
def command() -> None:
    """Have a platform run the pipeline of a config by itself, or no longer."""


@command.command("set")
@config
@overrides
@platform
@yes
@shared
def set_(
    config: Path, overrides: tuple[str, ...], platform: str, yes: bool, home: Path, as_json: bool
) -> int:
    """Run CONFIG as its `schedule` says. Said again, it changes the schedule to what the config is
    now; one that pauses goes on."""
    from rekindle.cli.planning import on_machines, outlook, planned

    client = client_of(platform)
    spec = on_machines(_spec(config, overrides), platform, home)
    if spec.schedule is None:
        raise RequestError(
            "the config has no schedule", where="schedule",
            fix="add schedule: {cron: 0 3 * * 1, timezone: Europe/Berlin}",
        )  # fmt: skip
    definition, there = _ready(client, platform, spec)
    place = getattr(spec.platforms, platform)
    show(client.outline(definition, place, ""), f"the schedule of {spec.name}")
    for line in (*outlook(planned(spec, platform, home)), *_said(spec.schedule, there)):
        click.echo(line, err=True)
    agree(yes, f"Start it at `{spec.schedule.cron}` ({spec.schedule.timezone})?")
    refuse_early(platform, place, definition)
    return _told(
        platform, [_of(platform).set_(definition, place, spec.schedule, spec.name)], as_json
    )


@command.command("list")
@config
@overrides
@platform
@shared
def list_(
    config: Path, overrides: tuple[str, ...], platform: str, home: Path, as_json: bool
) -> int:
    """List the schedules that rekindle set where CONFIG runs, with those of other configs."""
    spec = _spec(config, overrides)
    found = _of(platform).list_(getattr(spec.platforms, platform))
    return _told(platform, list(found), as_json)


@command.command("pause")
@config
@overrides
@platform
@shared
def pause(
    config: Path, overrides: tuple[str, ...], platform: str, home: Path, as_json: bool
) -> int:
    """Start CONFIG no longer, until `schedule set`."""
    spec = _spec(config, overrides)
    paused = _of(platform).pause(getattr(spec.platforms, platform), spec.name)
    return _told(platform, [paused], as_json)


@command.command("delete")
@config
@overrides
@platform
@shared
def delete(
    config: Path, overrides: tuple[str, ...], platform: str, home: Path, as_json: bool
) -> int:
    """Take the schedule of CONFIG away; runs that it started go on."""
    spec = _spec(config, overrides)
    deleted = _of(platform).delete(getattr(spec.platforms, platform), spec.name)
    if as_json:
        answer(ScheduleDeleted(platform=platform, deleted=deleted))
    else:
        click.echo("deleted" if deleted else "there was none")
    return 0


def _ready(client: Any, platform: str, spec: Spec) -> tuple[Definition, Lowered]:
    """What is sent; RequestError with everything that is wrong with the job and its schedule."""
    problems, there = list[Problem](), None
    try:
        there = _of(platform).lowered(spec.schedule, getattr(spec.platforms, platform))
    except RequestError as error:
        problems += error.problems
    try:
        definition = ready(client, platform, spec)
    except RequestError as error:
        problems += error.problems
    if problems:
        raise RequestError(problems)
    assert there is not None
    return definition, there


def _said(schedule: ScheduleSpec, there: Lowered) -> Iterator[str]:
    """What the platform will do by itself, for whoever decides."""
    from rekindle.spec.cron import starts, unsteady

    now = datetime.datetime.now(datetime.UTC)
    for number, moment in enumerate(starts(schedule.cron, schedule.timezone, now, _SHOWN)):
        yield f"  {'starts' if number == 0 else '':<9}{moment}"
    yield f"  overlap  a start that falls due while a run goes on {there.overlap}"
    yield f"  missed   starts that were missed are {there.missed}"
    if odd := ", ".join(unsteady(schedule.cron, schedule.timezone, now)):
        yield f"  clocks   {odd}: {there.clocks}"


def _of(platform: str) -> Any:
    """The module that knows the platform's schedules."""
    return importlib.import_module(SCHEDULES[platform])


def _spec(config: Path, overrides: tuple[str, ...]) -> Spec:
    from rekindle.spec.load import load_target

    return load_target(config, overrides)


def _told(platform: str, found: list[Schedule], as_json: bool) -> int:
    if as_json:
        rows = tuple(ScheduleRow(**dataclasses.asdict(one)) for one in found)
        answer(Schedules(platform=platform, schedules=rows))
    for one in [] if as_json else found:
        state = "on" if one.enabled else "paused"
        click.echo(f"{one.id}  {state}  {one.cron}  {one.timezone}")
    return 0
