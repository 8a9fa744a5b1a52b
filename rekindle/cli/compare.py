"""`rekindle compare RUN RUN [...]`: what differs between runs, and which model is better."""

from pathlib import Path

import click

from rekindle.app.runs import found_records
from rekindle.cli.options import shared, tell
from rekindle.report.collect import collect
from rekindle.report.comparison import compared, lines, render_comparison


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write the comparison as an HTML file, with the curves.")  # fmt: skip
@shared
def command(runs: tuple[str, ...], html: Path | None, home: Path, as_json: bool) -> None:
    """Compare runs: config, data, metrics, gate and time. The first run is the one that the others
    are compared with; an interval says whether a model is better than the first beyond chance.

    RUN is a run id, a unique prefix of one, or `latest`."""
    pairs = [(record, collect(record)) for record in found_records(home, runs)]
    found = compared(pairs)
    if html is not None:
        render_comparison(html, pairs, found)
    page = [] if html is None else ["", f"page  {html.absolute()}"]
    tell(found, "\n".join([*lines(found), *page]), as_json)
