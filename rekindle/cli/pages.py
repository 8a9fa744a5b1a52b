"""Pages of runs: the card of one, the index of all, and several side by side."""

from pathlib import Path

import click

from rekindle.app.runs import find_run, records_to_compare
from rekindle.cli.options import shared, tell
from rekindle.outputs import Card
from rekindle.report.card import render_card
from rekindle.report.collect import collect
from rekindle.report.comparison import compared, lines, render_comparison
from rekindle.report.index import render_index


@click.command("report")
@click.argument("run", default="latest")
@shared
def report(run: str, home: Path, as_json: bool) -> None:
    """Write the card of RUN (default: the latest) and the index of all runs; prints where
    they are."""
    record = find_run(home, run)
    card = str(render_card(home, record).absolute())
    index = str(render_index(home).absolute())
    text = f"card   {card}\nindex  {index}"
    tell(Card(run_id=record.run_id, card=card, index=index), text, as_json)


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the comparison as an HTML file, with the curves.",
)
@shared
def compare(runs: tuple[str, ...], html: Path | None, home: Path, as_json: bool) -> None:
    """Compare runs: config, data, metrics, gate and time. The first run is the one that
    the others are compared with; an interval says whether a model is better than the
    first beyond chance.

    RUN is a run id, a unique prefix of one, `latest`, or MODEL@VERSION: the run that made
    it."""
    pairs = [(record, collect(record)) for record in records_to_compare(home, runs)]
    comparison = compared(pairs)
    text_lines = list(lines(comparison))
    if html is not None:
        render_comparison(html, pairs, comparison)
        text_lines += ["", f"page  {html.absolute()}"]
    tell(comparison, "\n".join(text_lines), as_json)
