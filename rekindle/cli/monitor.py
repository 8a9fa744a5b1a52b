"""`rekindle monitor CONFIG`: whether what serves is still like what was judged."""

from collections.abc import Iterator
from pathlib import Path

import click

from rekindle.cli.options import Overrides, config, moment, overrides, shared, tell
from rekindle.cli.serve import require
from rekindle.platforms.platform import PLATFORMS
from rekindle.records import Monitored
from rekindle.spec.load import load_target

ALARM = 3


@click.command("monitor")
@config
@overrides
@click.option("--platform", type=click.Choice(["local", *PLATFORMS]), default="local",
              show_default=True, help="Where the model is deployed.")  # fmt: skip
@click.option("--now", metavar="TIME", help="Look as if it were TIME (UTC): for replays.")
@shared
def command(
    config: Path, overrides: Overrides, platform: str, now: str | None, home: Path, as_json: bool
) -> int:
    """Compare what CONFIG's champion was asked and answered within `monitor.window` with the rows
    that judged it: words, lengths or pixels, predicted classes, confidence, and, where labels have
    arrived, accuracy.

    Exit codes: 0 quiet, or too few rows to tell; 3 an alarm."""
    at = moment(now)
    require("mlflow", "scipy")
    from rekindle.app.monitor import check

    found = check(load_target(config, overrides), home, platform, at)
    tell(found, "\n".join(_lines(found)), as_json)
    return ALARM if found.verdict == "alarm" else 0


def _lines(found: Monitored) -> Iterator[str]:
    left = ", ".join(f"{number:,} {why}" for why, number in found.left_out.items())
    yield f"{found.name} version {found.version}, {found.start[:16]} to {found.end[:16]}: " + (
        f"{found.rows:,} rows" + f" ({left} left out)" * bool(left)
    )
    if found.signals:
        yield f"{'signal':<12}{'judged':>10}{'now':>10}{'apart':>8}{'p':>10}{'found from':>12}"
    for one in found.signals:
        least = "" if one.detectable is None else f"±{one.detectable:.3g}"
        yield (
            f"{one.name:<12}{one.before:>10.4g}{one.now:>10.4g}{one.effect:>8.3f}"
            f"{one.p_value:>10.2g}{least:>12}" + "  ALARM" * one.alarm
        )
    if found.expected_accuracy is not None:
        yield f"accuracy by confidence, an estimate: {found.expected_accuracy:.4f}"
    yield f"{found.verdict.replace('_', ' ')}: {found.reason}"
