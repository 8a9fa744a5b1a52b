"""Versions of a model: which one is champion, and moving that alias by hand."""

from pathlib import Path

import click

from rekindle import formats
from rekindle.app.champion import promote_run, registry_of
from rekindle.app.deploy import champion_here, roll_back
from rekindle.app.runs import find_run, load_target_spec
from rekindle.cli.options import agree, shared, tell, yes
from rekindle.records import ChampionChange, ChampionRecord
from rekindle.registry.history import champion_of, way_back

_HOW = {"gate": "by its gate", "reason": "by hand", "rollback": "by a roll back"}


@click.command("champion")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@shared
def champion(target: str | None, home: Path, as_json: bool) -> None:
    """Say which version is champion, since when, on what evidence, and which were before. Without
    an argument, of the model of the latest run."""
    found = champion_here(load_target_spec(target, home)[0], home)
    tell(found, "\n".join(_lines(found)), as_json)


def _lines(found: ChampionRecord) -> list[str]:
    change = found.change
    since = f", {_words(change)}" if change else ", since before rekindle kept the time"
    lines = [f"{found.name} version {found.version} is champion{since}"]
    if found.metrics:
        metrics = "  ".join(f"{k} {formats.fixed(v)}" for k, v in found.metrics.items())
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


@click.command("promote")
@click.argument("run")
@click.option(
    "--reason",
    default="",
    metavar="TEXT",
    help="Promote also what was compared with another champion, or cannot be (other "
    "classes), or was rolled back; kept in the history of champions.",
)
@shared
def promote(run: str, reason: str, home: Path, as_json: bool) -> None:
    """Make the candidate of RUN the champion, after its evidence has been checked again. A
    candidate that the gate refused for other reasons is never promoted."""
    registration, done = promote_run(home, find_run(home, run), reason)
    how = "already the champion; nothing changed" if done else "now the champion"
    tell(registration, f"{registration.name} version {registration.version} is {how}", as_json)


@click.command("rollback")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@click.option(
    "--to",
    default="",
    metavar="VERSION",
    help="A version that was champion. Default: the one before.",
)
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept on record.")
@yes
@shared
def rollback(
    target: str | None, to: str, reason: str, yes: bool, home: Path, as_json: bool
) -> None:
    """Make version --to, or the champion before, the champion again. The version that was champion
    is not promoted again by itself: that needs `rekindle promote RUN --reason`. A deployment of the
    model follows at once."""
    spec = load_target_spec(target, home)[0]
    where = registry_of(spec, home)
    now, to = (champion_of(where).version, to) if to else way_back(where)
    agree(yes, f"Roll {where.name} back from version {now} to version {to}?")
    before, after = roll_back(spec, home, reason, to)
    changed = f"version {after} is the champion again, not version {before}"
    text = f"version {after} is already the champion; nothing changed"
    tell(champion_of(where), f"{where.name}: {changed if before != after else text}", as_json)
