"""`rekindle runs`: the ledger of all runs under the home folder."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click

from rekindle import formats
from rekindle.catalog.prices import book
from rekindle.cli.options import shared, tell
from rekindle.errors import RequestError
from rekindle.outputs import Runs
from rekindle.platforms.local.store import is_alive
from rekindle.records import RunStatus
from rekindle.report.costs import table
from rekindle.report.ledger import Entry, ledger
from rekindle.report.texts import lower_is_better

STATUSES = (*get_args(RunStatus), "killed")


Row = dict[str, Any]  # a run as `--json` prints it
_MAY_BE_EMPTY = (
    "window",
    "settings",
)  # most data has no windows, most runs are not of a grid


def _badness(entry: Entry) -> float:
    """Of the metric that the gate looked at; runs without one come last."""
    headline = entry.headline
    if headline is None or math.isnan(headline.value):
        return math.inf
    return headline.value if lower_is_better(headline.name) else -headline.value


# Python sorts stably: what is alike stays in its order, the newest first
KEYS: Mapping[str, Callable[[Entry], float]] = {
    "started": lambda entry: 0.0,
    "seconds": lambda entry: -entry.seconds,
    "metric": _badness,
}


@click.command("runs")
@click.option("--name", help="Only runs with this `name`.")
@click.option(
    "--status",
    type=click.Choice(STATUSES),
    multiple=True,
    help="Only runs with this status; repeatable.",
)
@click.option(
    "--sort",
    type=click.Choice(list(KEYS)),
    default="started",
    show_default=True,
    help="What comes first: the newest, the longest, or the best metric.",
)
@click.option(
    "--costs",
    "by_cost",
    is_flag=True,
    help="What runs on platforms cost, by run and month.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="The first N only.")
@shared
def command(
    name: str | None,
    status: tuple[str, ...],
    sort: str,
    by_cost: bool,
    limit: int | None,
    home: Path,
    as_json: bool,
) -> None:
    """List runs, newest first: start, window of the data, what a training of a grid has
    for itself, status, time, metric, gate, model version and which is champion."""
    if by_cost:
        if status or limit or sort != "started":
            raise RequestError(
                "--costs sums up all runs and months; only --name leaves some out",
                where="--costs",
                fix="leave out --status, --sort and --limit",
            )
        _print_costs(name, home, as_json)
        return
    entries = [entry for entry in ledger(home).entries[::-1] if name in (None, entry.name)]
    # of several runs with a version that is champion, the newest
    champions = {entry.name: entry for entry in reversed(entries) if entry.is_champion}
    pairs: list[tuple[Entry, Row]] = []
    for entry in entries:
        row = _row(entry, home, is_champion=champions.get(entry.name) is entry)
        if not status or row["status"] in status:
            pairs.append((entry, row))
    pairs = sorted(pairs, key=lambda pair: KEYS[sort](pair[0]))[:limit]
    if as_json:
        # as `Runs` would have it: the summaries were written by their records
        rows = [row for _, row in pairs]
        click.echo(json.dumps({**Runs(runs=()).model_dump(mode="json"), "runs": rows}))
    else:
        _print_table(pairs)


def _print_costs(name: str | None, home: Path, as_json: bool) -> None:
    paid = ledger(home).paid(book(home), name or "")
    lines = formats.aligned([*table(paid)], right=(2, 3, 4, 5, 6, 7))
    if not paid.runs:
        lines = ["no run on a platform is known"]
    tell(paid, "\n".join(lines), as_json)


def _row(entry: Entry, home: Path, is_champion: bool) -> Row:
    """A run as `--json` prints it."""
    status: str = entry.status
    runs_here = entry.platform == "local" and entry.status == "running"
    if runs_here and not is_alive(home, entry.run_id):
        status = "killed"  # its record was never closed
    return entry.summary | {
        "status": status,
        "card": f"{os.path.realpath(home)}/runs/{entry.run_id}/card.html",
        "name": entry.name,
        "started_at": entry.started_at,
        "champion": is_champion,
    }


def _print_table(pairs: list[tuple[Entry, Row]]) -> None:
    """Print aligned columns, whatever the width of the terminal."""
    if not pairs:
        click.echo("no runs match; run `rekindle run CONFIG`, or change --name or --status")
        return
    rows = [_cells(entry, row) for entry, row in pairs]
    for name in _MAY_BE_EMPTY:
        if not any(cells[name] for cells in rows):
            for cells in rows:
                del cells[name]
    heads = list(rows[0])
    lines = [heads, *(list(cells.values()) for cells in rows)]
    click.echo("\n".join(formats.aligned(lines)))


def _cells(entry: Entry, row: Row) -> dict[str, str]:
    """The cells of a run by the heads of their columns."""
    started = ""
    began = formats.instant(entry.started_at)
    if began:
        started = f"{began.astimezone():%Y-%m-%d %H:%M}"
    decision = ""
    if row["gate"]:
        decision = row["gate"]["decision"].replace("_", " ")
    model = row["model"]
    version = ""
    if model:
        version = f"{model['name']} v{model['version']}"
        if row["champion"]:
            version += ", champion"
    return {
        "run": row["run_id"],
        "started": started,
        "window": formats.window(row["window"]),
        "settings": " ".join(row["settings"]),
        "status": row["status"],
        "time": formats.duration(row["seconds"]),
        "metric": _metric(entry, row),
        "gate": decision,
        "model": version,
    }


def _metric(entry: Entry, row: Row) -> str:
    """The metric that the gate looked at, or the validation loss of a grid's training."""
    headline = entry.headline
    if headline:
        return f"{headline.name} {formats.metric(headline.value)}"
    if row["settings"]:
        loss = row["validation"].get("loss")
        if loss is not None:
            return f"validation loss {formats.metric(loss)}"
    return ""
