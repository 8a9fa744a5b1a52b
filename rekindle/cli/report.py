"""`rekindle report RUN`: the HTML card, and the index of all runs."""

from pathlib import Path

import click

from rekindle.app.runs import find_run
from rekindle.cli.options import shared, tell
from rekindle.outputs import Card
from rekindle.report.card import render_card
from rekindle.report.index import render_index


@click.command("report")
@click.argument("run", default="latest")
@shared
def command(run: str, home: Path, as_json: bool) -> None:
    """Write the card of RUN (default: the latest) and the index of all runs; prints where they
    are."""
    record = find_run(home, run)
    card, index = render_card(home, record), render_index(home)
    paths = {"card": str(card.absolute()), "index": str(index.absolute())}
    text = "\n".join(f"{name:<7}{path}" for name, path in paths.items())
    tell(Card(run_id=record.run_id, **paths), text, as_json)
