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


def _badness(entry: Entry) -> float:
    """Of the metric that the gate looked at; runs without one come last."""
    if (headline := entry.headline) is None or math.isnan(headline.value):
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
    "--costs", "by_cost", is_flag=True, help="What runs on platforms cost, by run and month."
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
    """List runs, newest first: start, window of the data, what a training of a grid has for itself,
    status, time, metric, gate, model version and which is champion."""
    folder = f"{os.path.realpath(home)}/runs"
    if by_cost:
        if status or limit or sort != "started":
            what = "--costs sums up all runs and months; only --name leaves some out"
            raise RequestError(what, where="--costs", fix="leave out --status, --sort and --limit")
        found = ledger(home).paid(book(home), name or "")
        lines = formats.aligned([*table(found)], right=(2, 3, 4, 5, 6, 7))
        tell(found, "\n".join(lines) if found.runs else "no run on a platform is known", as_json)
        return
    entries = [entry for entry in ledger(home).entries[::-1] if name in (None, entry.name)]
    champions = {entry.name: entry for entry in reversed(entries) if entry.is_champion}
    shown = []
    for entry in entries:
        here = entry.platform == "local" and entry.status == "running"
        row = entry.summary | {
            # a record that was never closed, and no process works on it
            "status": "killed" if here and not is_alive(home, entry.run_id) else entry.status,
            "card": f"{folder}/{entry.run_id}/card.html",
            "name": entry.name,
            "started_at": entry.started_at,
            "champion": champions.get(entry.name) is entry,
        }
        shown += [(entry, row)] if not status or row["status"] in status else []
    shown = sorted(shown, key=lambda pair: KEYS[sort](pair[0]))[:limit]
    if as_json:
        # as `Runs` would have it: the summaries were written by their records
        rows = [row for _, row in shown]
        click.echo(json.dumps({**Runs(runs=()).model_dump(mode="json"), "runs": rows}))
    else:
        _table(shown)


def _table(shown: list[tuple[Entry, dict[str, Any]]]) -> None:
    """Aligned columns, whatever the width of the terminal."""
    if not shown:
        click.echo("no runs match; run `rekindle run CONFIG`, or change --name or --status")
        return
    head = ("run", "started", "window", "settings", "status", "time", "metric", "gate", "model")
    rows = [_cells(entry, row) for entry, row in shown]
    # most data has no windows, and most runs are not of a grid
    empty = {n for n in (2, 3) if not any(row[n] for row in rows)}
    lines = [[c for i, c in enumerate(line) if i not in empty] for line in (head, *rows)]
    click.echo("\n".join(formats.aligned(lines)))


def _cells(entry: Entry, row: dict[str, Any]) -> tuple[str, ...]:
    headline, gate, model = entry.headline, row["gate"], row["model"]
    loss = row["validation"].get("loss") if row["settings"] else None
    trained = f"validation loss {formats.metric(loss)}" if loss is not None else ""
    began, champion = formats.instant(entry.started_at), ", champion" * row["champion"]
    return (
        row["run_id"],
        f"{began.astimezone():%Y-%m-%d %H:%M}" if began else "",
        formats.window(row["window"]),
        " ".join(row["settings"]),
        row["status"],
        formats.duration(row["seconds"]),
        f"{headline.name} {formats.metric(headline.value)}" if headline else trained,
        gate["decision"].replace("_", " ") if gate else "",
        f"{model['name']} v{model['version']}{champion}" if model else "",
    )
