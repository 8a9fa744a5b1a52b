"""`rekindle deploy CONFIG`: the champion takes over where it serves; and `status`, `rollback` and
`delete` of a deployment."""

import time
from collections.abc import Callable
from pathlib import Path

import click

from rekindle import formats
from rekindle.app import deploy
from rekindle.app.runs import load_target_spec
from rekindle.cli.options import Overrides, agree, of_config, shared, tell, yes
from rekindle.cli.serving import SERVING, require
from rekindle.platforms.platform import ENDPOINTS
from rekindle.records import Deployment, RolloutEvent
from rekindle.serve.messages import SHADOWED, Traffic
from rekindle.spec.load import load_target
from rekindle.tables import rows

# of the states of a roll-out
_WORDS: dict[str, str] = rows(Path(__file__).with_name("words.yaml"))["rollout"]
_SILENT_SECONDS = 60.0
_platform = click.option(
    "--platform",
    type=click.Choice(["local", *ENDPOINTS]),
    default="local",
    show_default=True,
    help="Where; local is this machine.",
)
_target = click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")


class _Verbs(click.Group):
    """What is not the name of a command is the config of a deployment."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        first = args[:1]
        if first and first[0] not in ("-h", "--help"):  # options before the config are its own
            args = args if first[0] in self.commands else ["start", *args]
        return super().parse_args(context, args)


@click.group("deploy", cls=_Verbs)
def command() -> None:
    """Roll the champion of CONFIG out: `rekindle deploy CONFIG` is short for `rekindle deploy start
    CONFIG`."""


@command.command("start", short_help="roll out the champion of CONFIG")
@of_config
@_platform
@click.option(
    "--host",
    help="On this machine: address to listen at; at any other than the "
    "default, 127.0.0.1, all who reach it may ask.",
)
@click.option(
    "--port",
    type=click.IntRange(1, 65_535),
    help="On this machine. Default: 8080, or that of the deployment.",
)
@click.option("--dry-run", is_flag=True, help="Only say what it would run on and cost.")
@yes
@click.option(
    "--wait",
    is_flag=True,
    help="Watch the canary until it gets all requests, or is "
    "rolled back. Without it, the next call goes on.",
)
@shared
def start(
    config: Path,
    overrides: Overrides,
    platform: str,
    host: str | None,
    port: int | None,
    dry_run: bool,
    yes: bool,
    wait: bool,
    home: Path,
    as_json: bool,
) -> None:
    """Start the champion of CONFIG beside the version that answers now; when it has proven itself,
    give it the shares of requests of `deploy.canary`, one after another, and then all. It is rolled
    back, with the alias, if it fails more requests or is slower. A command that was interrupted
    continues when you rerun it."""
    require(*SERVING)
    spec = load_target(config, overrides)

    def may(machines: str, usd: float | None, new: bool) -> bool:
        cost = "an unknown price" if usd is None else f"${usd:,.2f} a day"
        plan = f"{spec.model_name} on {platform}: {machines} for each version"
        plan += f", {cost}" if usd != 0 else ""
        if dry_run:
            click.echo(plan)
        elif new and usd != 0:
            agree(yes, f"Deploy {plan}?")
        return not dry_run

    seen = traffic_printer(spec.deploy.min_requests)
    options = deploy.Options(platform, host, port, wait, may, print_event, seen)
    if done := deploy.deploy(spec, home, options):
        tell(done, "\n".join(_lines(done)), as_json)


@command.command("status", short_help="versions, their shares and requests, and what happened")
@_target
@_platform
@shared
def status(target: str | None, platform: str, home: Path, as_json: bool) -> None:
    """Versions that run, their shares, requests, errors and latencies, and what happened."""
    found = deploy.deployment_of(load_target_spec(target, home)[0], home, platform)
    tell(found, "\n".join([*_lines(found), *map(_line, found.events)]), as_json)


@command.command("rollback", short_help="give all requests to the version before")
@_target
@_platform
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept on record.")
@shared
def rollback(target: str | None, platform: str, reason: str, home: Path, as_json: bool) -> None:
    """Give all requests to the version before, and make it the champion again. `rekindle rollback`
    does the same, and goes further back with --to."""
    spec = load_target_spec(target, home)[0]
    last = deploy.deployment_of(spec, home, platform).events[-1]
    deploy.roll_back(
        spec, home, reason, last.previous, deploy.Options(platform, on_event=print_event)
    )
    done = deploy.deployment_of(spec, home, platform)
    tell(done, "\n".join(_lines(done)), as_json)


@command.command("delete", short_help="end the deployment")
@_target
@_platform
@yes
@shared
def delete(target: str | None, platform: str, yes: bool, home: Path, as_json: bool) -> None:
    """End the deployment: what was accepted is answered, then no version answers any more."""
    spec = load_target_spec(target, home)[0]
    agree(yes, f"End the deployment of {spec.model_name}?")
    done = deploy.delete(spec, home, deploy.Options(platform, on_event=print_event))
    tell(done, f"{done.name} is not deployed any more", as_json)


def print_event(event: RolloutEvent) -> None:
    """Print an event of a roll-out."""
    click.echo(_line(event), err=True)


def _line(event: RolloutEvent) -> str:
    shares = ", ".join(f"version {v} gets {s} %" for v, s in event.shares.items()) or "none is left"
    words = _WORDS[event.state].format(
        version=event.version,
        reason=event.reason,
        shares=shares,
        after=f": {event.reason}" if event.reason else "",
    )
    return f"{formats.instant(event.at):%Y-%m-%d %H:%M:%S}  {words}"


def traffic_printer(needed: int) -> Callable[[RolloutEvent, Traffic], None]:
    """Prints how many requests a version that is watched has had; a verdict takes `needed`."""
    seen = dict[int, tuple[int, float]]()  # requests by event when they were printed last

    def show(event: RolloutEvent, traffic: Traffic) -> None:
        """A line at first, whenever they have doubled, and every minute."""
        before, at = seen.get(event.number, (0, -_SILENT_SECONDS))
        if traffic.requests >= max(10, 2 * before) or time.monotonic() - at > _SILENT_SECONDS:
            seen[event.number] = traffic.requests, time.monotonic()
            failed = f", {traffic.errors:,} failed" if traffic.errors else ""
            failed += f", {traffic.refused:,} refused (4xx)" if traffic.refused else ""
            told = f"{traffic.requests:,} of at least {needed:,} requests{failed}"
            click.echo(f"  {event.state}: {told}", err=True)

    return show


def _lines(found: Deployment) -> list[str]:
    lines = [f"{found.name} at {found.address}"]
    for version, one in found.versions.items():
        times = f", p50 {one.p50_ms:,.0f} ms, p99 {one.p99_ms:,.0f} ms" if one.p50_ms else ""
        failed = f"{one.errors:,} of {one.requests:,} requests failed"
        failed += f", {one.refused:,} were refused (4xx)" if one.refused else ""
        known = version.removeprefix(SHADOWED)
        known += f" in the shadow of {found.events[-1].previous}" * (known != version)
        lines.append(f"version {known}  {one.state}, {one.share} % of requests, {failed}{times}")
    if found.usd is None or found.usd > 0:
        cost = "an unknown price" if found.usd is None else f"about ${found.usd:,.2f}"
        lines.append(f"versions stood for {found.version_hours:,.1f} hours so far: {cost}")
    if not found.versions and found.events[-1].state != "deleted":
        lines.append("its router does not run; `rekindle deploy CONFIG` starts it")
    return lines
