"""`rekindle plan CONFIG`: layout, memory, hours, money, and why not the others.

It asks no platform and changes nothing."""

from pathlib import Path

import click

from rekindle.app import calibrate
from rekindle.app.forecast import lines
from rekindle.app.plan import figures
from rekindle.app.preflight.rows import first_look
from rekindle.cli.options import (
    Overrides,
    maybe_config,
    overrides,
    platform,
    shared,
    tell,
)
from rekindle.masking import plain
from rekindle.spec.load import load_target


@click.command("plan")
@maybe_config
@overrides
@platform(
    "Platform whose machines are considered; default: the only one with a section under "
    "`platforms` in CONFIG, else this machine if `resources` names no machines, else all "
    "clouds.",
    here=True,
)
@click.option("--region", default="", help="Region; default: the platform's, else the cheapest.")
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=None,
    help="Examples in the training split, where no run has counted them.",
)
@click.option(
    "--prices",
    "own_prices",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Your own price file; it overrides known prices; repeatable.",
)
@click.option(
    "--calibrate",
    "run",
    metavar="RUN",
    help="First measure that run; its speed corrects this and later plans.",
)
@shared
def command(
    config: Path | None,
    overrides: Overrides,
    platform: str | None,
    region: str,
    examples: int | None,
    own_prices: tuple[Path, ...],
    run: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Estimate what the training of CONFIG needs, how long it takes and what it costs.

    With --calibrate, the measured speed of a run, here or on a platform, corrects the
    speeds that the planner takes from published figures; CONFIG may be left out."""
    if run is not None:
        measured = calibrate.calibrate(home, run)
        if config is None or not as_json:
            tell(measured, "\n".join(calibrate.lines(measured)), as_json)
    if config is None:
        if run is None:
            raise click.UsageError("a CONFIG to plan is missing")
        return 0
    spec = load_target(config, overrides)
    for problem in first_look(spec):
        click.echo(plain(f"warning: {problem}"), err=True)
    planned = figures(spec, platform or "", region, examples, home, own_prices)
    tell(planned, "\n".join(lines(planned)), as_json)
    return 2 if planned.errors else 0
