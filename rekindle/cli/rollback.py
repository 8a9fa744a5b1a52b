"""`rekindle rollback [MODEL|RUN|CONFIG]`: the champion before is the champion again."""

from pathlib import Path

import click

from rekindle.app.champion import registry_of
from rekindle.app.deploy import roll_back
from rekindle.app.runs import wanted
from rekindle.cli.options import agree, shared, tell, yes
from rekindle.registry.history import champion_of, way_back


@click.command("rollback")
@click.argument("target", required=False, metavar="[MODEL|RUN|CONFIG]")
@click.option("--to", default="", metavar="VERSION",
              help="A version that was champion. Default: the one before.")  # fmt: skip
@click.option("--reason", required=True, metavar="TEXT", help="Why; kept on record.")
@yes
@shared
def command(target: str | None, to: str, reason: str, yes: bool, home: Path, as_json: bool) -> None:
    """Make version --to, or the champion before, the champion again. The version that was champion
    is not promoted again by itself: that needs `rekindle promote RUN --reason`. A deployment of the
    model follows at once."""
    spec = wanted(target, home)[0]
    where = registry_of(spec, home)
    now, to = (champion_of(where).version, to) if to else way_back(where)
    agree(yes, f"Roll {where.name} back from version {now} to version {to}?")
    before, after = roll_back(spec, home, reason, to)
    changed = f"version {after} is the champion again, not version {before}"
    text = f"version {after} is already the champion; nothing changed"
    found = champion_of(where)
    tell(found, f"{where.name}: {changed if before != after else text}", as_json)
