"""`rekindle champion [MODEL|RUN|CONFIG]`: which version is champion, since when and why."""

from pathlib import Path

import click

from rekindle import formats
from rekindle.app.deployed import champion
from rekindle.cli.options import shared, tell
from rekindle.records import ChampionChange, ChampionRecord

_HOW = {"gate": "by its gate", "reason": "by hand", "rollback": "by a roll back"}


@click.command("champion")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@shared
def command(target: str | None, home: Path, as_json: bool) -> None:
    """Say which version is champion, since when, on what evidence, and which were before. Without
    an argument, of the model of the latest run."""
    found = champion(target, home)
    tell(found, "\n".join(_lines(found)), as_json)


def _lines(found: ChampionRecord) -> list[str]:
    change = found.change
    since = f", {_words(change)}" if change else ", since before rekindle kept the time"
    lines = [f"{found.name} version {found.version} is champion{since}"]
    if found.metrics:
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in found.metrics.items())
        lines.append(f"metrics   {metrics}")
    compared = f"version {found.beaten}" if found.beaten else "no champion"
    lines.append(f"judged    against {compared}: {found.reason}")
    lines.append(f"registry  {found.tracking_uri}")
    lines += [f"serves    at {address}" for address in found.serves_at]
    if found.challenger:
        lines.append(f"waiting   version {found.challenger} is the challenger")
    if found.unfinished:
        last = found.history[-1].version
        lines.append(f"warning   a change to version {last} was interrupted; run it again")
    before = found.history[: -1 if found.history and not found.unfinished else None]
    lines += [f"before    version {one.version}, {_words(one)}" for one in before[::-1]]
    return lines


def _words(change: ChampionChange) -> str:
    when = f"{formats.instant(change.at):%Y-%m-%d %H:%M} UTC"
    return f"since {when}, {_HOW[change.how]}: {change.reason}"
