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

# how a version became champion, by the kind of change
_HOW = {"gate": "by its gate", "reason": "by hand", "rollback": "by a roll back"}


@click.command("champion")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@shared
def champion(target: str | None, home: Path, as_json: bool) -> None:
    """Say which version is champion, since when, on what evidence, and which were before.
    Without an argument, of the model of the latest run."""
    spec, _ = load_target_spec(target, home)
    record = champion_here(spec, home)
    tell(record, "\n".join(_lines(record)), as_json)


def _lines(record: ChampionRecord) -> list[str]:
    """The champion of a model and its history, for people."""
    since = ", since before rekindle kept the time"
    if record.change:
        since = f", {_change_text(record.change)}"
    lines = [f"{record.name} version {record.version} is champion{since}"]
    if record.metrics:
        metrics = [f"{name} {formats.fixed(value)}" for name, value in record.metrics.items()]
        lines.append(f"metrics   {'  '.join(metrics)}")
    compared_with = f"version {record.beaten}" if record.beaten else "no champion"
    lines.append(f"judged    against {compared_with}: {record.reason}")
    lines.append(f"registry  {record.tracking_uri}")
    lines += [f"serves    at {address}" for address in record.serves_at]
    if record.challenger:
        lines.append(f"waiting   version {record.challenger} is the challenger")
    history = list(record.history)
    if record.unfinished:
        version = history[-1].version
        lines.append(f"warning   a change to version {version} was interrupted; run it again")
    elif history:
        history.pop()  # which made the champion of now
    for change in reversed(history):
        lines.append(f"before    version {change.version}, {_change_text(change)}")
    return lines


def _change_text(change: ChampionChange) -> str:
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
    """Make the candidate of RUN the champion, after its evidence has been checked again.
    A candidate that the gate refused for other reasons is never promoted."""
    registration, was_champion = promote_run(home, find_run(home, run), reason)
    state = "now the champion"
    if was_champion:
        state = "already the champion; nothing changed"
    tell(
        registration,
        f"{registration.name} version {registration.version} is {state}",
        as_json,
    )


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
    """Make version --to, or the champion before, the champion again. The version that was
    champion is not promoted again by itself: that needs `rekindle promote RUN --reason`.
    A deployment of the model follows at once."""
    spec, _ = load_target_spec(target, home)
    registry = registry_of(spec, home)
    if to:
        now = champion_of(registry).version
    else:
        now, to = way_back(registry)
    agree(yes, f"Roll {registry.name} back from version {now} to version {to}?")
    before, after = roll_back(spec, home, reason, to)
    text = f"version {after} is the champion again, not version {before}"
    if before == after:
        text = f"version {after} is already the champion; nothing changed"
    tell(champion_of(registry), f"{registry.name}: {text}", as_json)
