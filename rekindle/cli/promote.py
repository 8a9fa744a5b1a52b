"""`rekindle promote RUN`: the approval that `register.approval: manual` waits for, and a person's
word for an older candidate."""

from pathlib import Path

import click

from rekindle.app.champion import promote_run
from rekindle.app.runs import find_run
from rekindle.cli.options import shared, tell


@click.command("promote")
@click.argument("run")
@click.option("--reason", default="", metavar="TEXT",
              help="Promote also what was compared with another champion, or was rolled "
              "back; kept in the history of champions.")  # fmt: skip
@shared
def command(run: str, reason: str, home: Path, as_json: bool) -> None:
    """Make the candidate of RUN the champion, after its evidence has been checked again. A
    candidate that the gate refused is never promoted."""
    registration, done = promote_run(home, find_run(home, run), reason)
    how = "already the champion; nothing changed" if done else "now the champion"
    tell(registration, f"{registration.name} version {registration.version} is {how}", as_json)
