"""`rekindle alarms write|delete CONFIG --platform P`: alarms and a dashboard there."""

from pathlib import Path

import click

from rekindle.app.alarms import compared, monitoring, write
from rekindle.app.prepared import prepare_for
from rekindle.cli.options import (
    Decorated,
    Overrides,
    agree,
    of_config,
    platform,
    shared,
    tell,
    yes,
)
from rekindle.outputs import Alarm, Alarms
from rekindle.platforms.alarms import Monitoring, Watch
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec

EDITED = 3  # exit code


def _of_a_config(command: Decorated) -> Decorated:
    """CONFIG, its platform, and the options of both commands."""
    on_platform = platform("Platform whose monitoring service has them.", required=True)
    force = click.option("--force", is_flag=True, help="Also those that were edited there by hand.")
    for option in (shared, yes, force, on_platform, of_config):
        command = option(command)
    return command


@click.group("alarms")
def command() -> None:
    """Write or delete alarms and a dashboard where a platform is monitored."""


@command.command("write")
@_of_a_config
def write_(
    config: Path,
    overrides: Overrides,
    platform: str,
    force: bool,
    yes: bool,
    home: Path,
    as_json: bool,
) -> int:
    """Create or change the alarms and the dashboard of CONFIG: runs that failed, drift
    that `rekindle monitor` found, requests that fail (`deploy.max_error_rate`) or take
    long (`deploy.max_p99_ms`, else a second). For Kubeflow, files are written under the
    home, the same for all configs: one request in 100 that fails, or a second.

    Exit codes: 0 all are as CONFIG has them, 3 some were edited there and stay as they
    are."""
    service, spec = _service(config, overrides, platform, home)
    alarms = compared(service, spec)
    for alarm in alarms:
        click.echo(f"  {alarm.kind:<9} {alarm.name}: {alarm.state}", err=True)
    if any(alarm.state != "same" for alarm in alarms):
        agree(yes, f"Write them to {platform}?")
    written = write(service, alarms, force=force)
    _print_states(platform, written, as_json)
    return EDITED if any(alarm.state == "edited" for alarm in written) else 0


@command.command("delete")
@_of_a_config
def delete(
    config: Path,
    overrides: Overrides,
    platform: str,
    force: bool,
    yes: bool,
    home: Path,
    as_json: bool,
) -> int:
    """Delete what `rekindle alarms write CONFIG` made.

    Exit codes: 0 nothing is left, 3 some were edited there and stay."""
    service, spec = _service(config, overrides, platform, home)
    existing = [w for w in compared(service, spec, every=True) if w.state != "missing"]
    states: list[Alarm] = []
    to_delete: list[Watch] = []
    for alarm in existing:
        if force or alarm.state != "edited":
            to_delete.append(alarm)
            state = "deleted"
        else:
            state = "edited"
        states.append(Alarm(kind=alarm.kind, name=alarm.name, state=state))
    for alarm in to_delete:
        click.echo(f"  {alarm.kind:<9} {alarm.name}", err=True)
    if to_delete:
        agree(yes, f"Delete them from {platform}?")
    for alarm in to_delete:
        service.remove(alarm.kind, alarm.name)
    _print_states(platform, tuple(states), as_json, "deletes")
    return EDITED if len(to_delete) < len(existing) else 0


def _service(
    config: Path, overrides: Overrides, platform: str, home: Path
) -> tuple[Monitoring, Spec]:
    """The monitoring service of a config on a platform, and its spec."""
    spec = load_target(config, overrides)
    prepared = prepare_for(platform, spec, home, trains=False)
    service = monitoring(prepared.platform, prepared.spec, prepared.definition, home)
    return service, prepared.spec


def _print_states(
    platform: str, alarms: tuple[Alarm, ...], as_json: bool, force_does: str = "replaces"
) -> None:
    """Print what became of each alarm."""
    lines = []
    for alarm in alarms:
        state = alarm.state
        if state == "edited":
            state = f"was edited there and stays; --force {force_does} it"
        lines.append(f"{alarm.kind} {alarm.name}: {state}")
    text = "\n".join(lines) or "there are none"
    tell(Alarms(platform=platform, alarms=alarms), text, as_json)
