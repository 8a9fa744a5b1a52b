"""`rekindle runs`: the ledger of all runs under the home folder."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rekindle.cli.options import run_ids, shared


@click.command("runs")
@shared
def command(home: Path, as_json: bool) -> int:
    """Every run, newest first: status, time, metric, gate, model."""
    from rekindle.cli.job import summary
    from rekindle.platforms.local.execute import is_alive
    from rekindle.records import RunRecord

    records = [RunRecord.read(home / "runs" / run_id / "run.json") for run_id in run_ids(home)]
    rows = []
    for record in sorted(records, key=lambda r: r.started_at, reverse=True):
        killed = record.status == "running" and not is_alive(home, record.run_id)
        row = summary(record, home)
        rows.append(
            {
                **row,
                "name": record.name,
                "started_at": record.started_at,
                "status": "killed" if killed else record.status,
            }
        )
    if as_json:
        print(json.dumps({"schema_version": 1, "runs": rows}))
    else:
        _table(rows)
    return 0


def _table(rows: list[dict[str, object]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("run", "status", "seconds", "accuracy", "gate", "model"):
        table.add_column(name, no_wrap=name == "run")
    for row in rows:
        metrics, gate, model = row["metrics"], row["gate"], row["model"]
        table.add_row(
            str(row["run_id"]), str(row["status"]), f"{row['seconds']:.1f}",
            f"{metrics['accuracy']:.4f}" if isinstance(metrics, dict) and metrics else "",
            str(gate["decision"]) if isinstance(gate, dict) else "",
            f"{model['name']} v{model['version']}" if isinstance(model, dict) else "",
        )  # fmt: skip
    Console().print(table if rows else "no runs yet: `rekindle run CONFIG`")
