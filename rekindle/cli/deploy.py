"""`rekindle deploy CONFIG`: the champion takes over where it serves; and `status`,
`rollback` and `delete` of a deployment."""

import time
from collections.abc import Callable
from pathlib import Path

import click

from rekindle import formats
from rekindle.app import deploy
from rekindle.app.runs import load_target_spec
from rekindle.cli.options import Overrides, PlatformChoice, agree, of_config, shared, tell, yes
from rekindle.cli.serving import SERVING, require
from rekindle.platforms.api import DeploysModels, names_with
from rekindle.records import Deployment, RolloutEvent, RolloutState
from rekindle.serve.messages import SHADOWED, Traffic
from rekindle.spec.load import load_target

_SILENT_SECONDS = 60.0
_platform = click.option(
    "--platform",
    type=PlatformChoice(["local", *names_with(DeploysModels)]),
    default="local",
    show_default=True,
    help="Where; local is this machine.",
)
_target = click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")


class _DeployVerbs(click.Group):
    """What is not the name of a command is the config of a deployment."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in ("-h", "--help", *self.commands):
            args = ["start", *args]  # options before the config are its own
        return super().parse_args(context, args)


@click.group("deploy", cls=_DeployVerbs)
def command() -> None:
    """Roll the champion of CONFIG out: `rekindle deploy CONFIG` is short for `rekindle
    deploy start CONFIG`."""


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
    """Start the champion of CONFIG beside the version that answers now; when it has
    proven itself, give it the shares of requests of `deploy.canary`, one after another,
    and then all. It is rolled back, with the alias, if it fails more requests or is
    slower. A command that was interrupted continues when you rerun it."""
    require(*SERVING)
    spec = load_target(config, overrides)

    def may(machines: str, usd: float | None, new: bool) -> bool:
        plan = f"{spec.model_name} on {platform}: {machines} for each version"
        if usd is None:
            plan += ", an unknown price"
        elif usd > 0:
            plan += f", ${usd:,.2f} a day"
        if dry_run:
            click.echo(plan)
        elif new and usd != 0:  # what costs nothing is not asked about
            agree(yes, f"Deploy {plan}?")
        return not dry_run

    print_traffic = traffic_printer(spec.deploy.min_requests)
    options = deploy.DeployOptions(platform, host, port, wait, may, print_event, print_traffic)
    deployment = deploy.deploy(spec, home, options)
    if deployment is not None:
        tell(deployment, "\n".join(_lines(deployment)), as_json)


@command.command("status", short_help="versions, their shares and requests, and what happened")
@_target
@_platform
@shared
def status(target: str | None, platform: str, home: Path, as_json: bool) -> None:
    """Versions that run, their shares, requests, errors and latencies, and what
    happened."""
    spec, _ = load_target_spec(target, home)
    deployment = deploy.deployment_of(spec, home, platform)
    lines = [*_lines(deployment), *map(_line, deployment.events)]
    tell(deployment, "\n".join(lines), as_json)


@command.command("rollback", short_help="give all requests to the version before")
@_target
@_platform
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept on record.")
@shared
def rollback(target: str | None, platform: str, reason: str, home: Path, as_json: bool) -> None:
    """Give all requests to the version before, and make it the champion again. `rekindle
    rollback` does the same, and goes further back with --to."""
    spec, _ = load_target_spec(target, home)
    last = deploy.deployment_of(spec, home, platform).events[-1]
    options = deploy.DeployOptions(platform, on_event=print_event)
    deploy.roll_back(spec, home, reason, last.previous, options)
    deployment = deploy.deployment_of(spec, home, platform)
    tell(deployment, "\n".join(_lines(deployment)), as_json)


@command.command("delete", short_help="end the deployment")
@_target
@_platform
@yes
@shared
def delete(target: str | None, platform: str, yes: bool, home: Path, as_json: bool) -> None:
    """End the deployment: what was accepted is answered, then no version answers any
    more."""
    spec, _ = load_target_spec(target, home)
    agree(yes, f"End the deployment of {spec.model_name}?")
    deployment = deploy.delete(spec, home, deploy.DeployOptions(platform, on_event=print_event))
    tell(deployment, f"{deployment.name} is not deployed any more", as_json)


def print_event(event: RolloutEvent) -> None:
    """Print an event of a roll-out."""
    click.echo(_line(event), err=True)


def _line(event: RolloutEvent) -> str:
    return f"{formats.instant(event.at):%Y-%m-%d %H:%M:%S}  {_event_text(event)}"


def _event_text(event: RolloutEvent) -> str:
    """What a roll-out does next, in words."""
    shares = ", ".join(f"version {v} gets {share} %" for v, share in event.shares.items())
    shares = shares or "none is left"
    reason = f": {event.reason}" if event.reason else ""
    texts: dict[RolloutState, str] = {
        "shadow": f"version {event.version} answers in the shadow of the one before",
        "create": f"starting version {event.version}{reason}",
        "smoke": f"version {event.version} has proven itself by rows of its test split",
        "canary": f"canary: {shares}",
        "live": f"version {event.version} gets all requests",
        "settled": "done",
        "roll_back": f"rolling back: {event.reason}",
        "rolled_back": f"rolled back: {shares}",
        "delete": "deleting",
        "deleted": "deleted",
    }
    return texts[event.state]


def traffic_printer(needed: int) -> Callable[[RolloutEvent, Traffic], None]:
    """A function that prints how many requests a version that is watched has had; a
    verdict takes `needed`. It prints at first, whenever they have doubled, and every
    minute."""
    last_printed: dict[int, tuple[int, float]] = {}  # event -> requests, and when

    def print_traffic(event: RolloutEvent, traffic: Traffic) -> None:
        requests_then, printed_at = last_printed.get(event.number, (0, -_SILENT_SECONDS))
        has_doubled = traffic.requests >= max(10, 2 * requests_then)
        if not has_doubled and time.monotonic() - printed_at <= _SILENT_SECONDS:
            return
        last_printed[event.number] = traffic.requests, time.monotonic()
        text = f"{traffic.requests:,} of at least {needed:,} requests"
        if traffic.errors:
            text += f", {traffic.errors:,} failed"
        if traffic.refused:
            text += f", {traffic.refused:,} refused (4xx)"
        click.echo(f"  {event.state}: {text}", err=True)

    return print_traffic


def _lines(deployment: Deployment) -> list[str]:
    """The deployment as it is now, for people."""
    lines = [f"{deployment.name} at {deployment.address}"]
    last = deployment.events[-1]
    for version, traffic in deployment.versions.items():
        name = version.removeprefix(SHADOWED)
        if name != version:
            name += f" in the shadow of {last.previous}"
        text = f"{traffic.errors:,} of {traffic.requests:,} requests failed"
        if traffic.refused:
            text += f", {traffic.refused:,} were refused (4xx)"
        if traffic.p50_ms:
            text += f", p50 {traffic.p50_ms:,.0f} ms, p99 {traffic.p99_ms:,.0f} ms"
        lines.append(f"version {name}  {traffic.state}, {traffic.share} % of requests, {text}")
    hours = f"versions stood for {deployment.version_hours:,.1f} hours so far"
    if deployment.usd is None:
        lines.append(f"{hours}: an unknown price")
    elif deployment.usd > 0:
        lines.append(f"{hours}: about ${deployment.usd:,.2f}")
    if not deployment.versions and last.state != "deleted":
        lines.append("its router does not run; `rekindle deploy CONFIG` starts it")
    return lines
