"""`rekindle alarms write|delete CONFIG --platform P`: alarms and a dashboard there."""

from pathlib import Path

import click

from rekindle.app.alarms import compared, monitoring, write
from rekindle.app.plan import on_machines
from rekindle.app.preflight import compile_for
from rekindle.cli.options import Decorated, Overrides, agree, of_config, platform, shared, tell, yes
from rekindle.outputs import Alarm, Alarms
from rekindle.platforms.alarms import Monitoring
from rekindle.platforms.platform import Platform
from rekindle.spec.load import load_target
from rekindle.spec.model import Spec

EDITED = 3


def _of_a_config(command: Decorated) -> Decorated:
    there = platform("Platform whose monitoring service has them.", required=True)
    force = click.option("--force", is_flag=True, help="Also those that were edited there by hand.")
    for option in (shared, yes, force, there, of_config):
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
    """Create or change the alarms and the dashboard of CONFIG: runs that failed, drift that
    `rekindle monitor` found, requests that fail (`deploy.max_error_rate`) or take long
    (`deploy.max_p99_ms`, else a second). For Kubeflow, files are written under the home, the same
    for all configs: one request in 100 that fails, or a second.

    Exit codes: 0 all are as CONFIG has them, 3 some were edited there and stay as they are."""
    service, spec = _service(config, overrides, platform, home)
    found = compared(service, spec)
    for one in found:
        click.echo(f"  {one.kind:<9} {one.name}: {one.state}", err=True)
    if any(one.state != "same" for one in found):
        agree(yes, f"Write them to {platform}?")
    told = write(service, found, force=force)
    _told(platform, told, as_json)
    return EDITED if any(one.state == "edited" for one in told) else 0


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
    found = [one for one in compared(service, spec, every=True) if one.state != "missing"]
    going = [one for one in found if force or one.state != "edited"]
    for one in going:
        click.echo(f"  {one.kind:<9} {one.name}", err=True)
    if going:
        agree(yes, f"Delete them from {platform}?")
    for one in going:
        service.remove(one.kind, one.name)
    states = ("deleted" if one in going else "edited" for one in found)
    told = (Alarm(kind=o.kind, name=o.name, state=s) for o, s in zip(found, states, strict=True))
    _told(platform, tuple(told), as_json, "deletes")
    return EDITED if len(going) < len(found) else 0


def _service(
    config: Path, overrides: Overrides, platform: str, home: Path
) -> tuple[Monitoring, Spec]:
    spec = on_machines(load_target(config, overrides), platform, home)
    there = Platform.of(platform, spec.platforms)
    definition = compile_for(platform, spec, whole=False)
    return monitoring(there, spec, definition, home), spec


def _told(platform: str, told: tuple[Alarm, ...], as_json: bool, forced: str = "replaces") -> None:
    words = {"edited": f"was edited there and stays; --force {forced} it"}
    lines = (f"{one.kind} {one.name}: {words.get(one.state, one.state)}" for one in told)
    tell(Alarms(platform=platform, alarms=told), "\n".join(lines) or "there are none", as_json)
