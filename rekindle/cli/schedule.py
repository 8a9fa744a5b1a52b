"""`rekindle schedule set|list|pause|delete CONFIG --platform P`: what a platform starts by
itself."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rekindle.cli.doctor import refuse_early
from rekindle.cli.options import config, overrides, shared
from rekindle.cli.submit import agree, client_of, platform, ready, show, yes
from rekindle.errors import RequestError

if TYPE_CHECKING:
    from rekindle.platforms.submission import Schedule
    from rekindle.spec.model import Spec


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
    client, spec = client_of(platform), _spec(config, overrides)
    if spec.schedule is None:
        raise RequestError(
            "the config has no schedule", where="schedule",
            fix="add schedule: {cron: 0 3 * * 1, timezone: Europe/Berlin}",
        )  # fmt: skip
    definition = ready(client, platform, spec)
    place = getattr(spec.platforms, platform)
    show(client.outline(definition, place, ""), f"the schedule of {spec.name}")
    agree(yes, f"Start it at `{spec.schedule.cron}` ({spec.schedule.timezone})?")
    refuse_early(platform, place, definition)
    return _told(
        platform, [client.schedule_set(definition, place, spec.schedule, spec.name)], as_json
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
    client, spec = client_of(platform), _spec(config, overrides)
    found = client.schedule_list(getattr(spec.platforms, platform))
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
    client, spec = client_of(platform), _spec(config, overrides)
    paused = client.schedule_pause(getattr(spec.platforms, platform), spec.name)
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
    client, spec = client_of(platform), _spec(config, overrides)
    deleted = client.schedule_delete(getattr(spec.platforms, platform), spec.name)
    if as_json:
        print(json.dumps({"schema_version": 1, "platform": platform, "deleted": deleted}))
    else:
        click.echo("deleted" if deleted else "there was none")
    return 0


def _spec(config: Path, overrides: tuple[str, ...]) -> Spec:
    from rekindle.spec.load import load_target

    return load_target(config, overrides)


def _told(platform: str, found: list[Schedule], as_json: bool) -> int:
    if as_json:
        schedules = [dataclasses.asdict(one) for one in found]
        print(json.dumps({"schema_version": 1, "platform": platform, "schedules": schedules}))
    for one in [] if as_json else found:
        state = "on" if one.enabled else "paused"
        click.echo(f"{one.id}  {state}  {one.cron}  {one.timezone}")
    return 0
