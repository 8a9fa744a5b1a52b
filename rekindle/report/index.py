"""The page over all runs under a home: what each came to, and how the metric moved from run to run
of the same job.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from rekindle.records import RunRecord, write_atomically
from rekindle.report import outcome, page, plots, words
from rekindle.report.collect import Findings, collect

_SPARK_RUNS = 50


@dataclasses.dataclass(frozen=True)
class Row:
    """One run. `card` is the relative link to its card, empty if it has none yet."""

    run: RunRecord
    verdict: outcome.Verdict
    headline: outcome.Headline | None
    version: str
    is_champion: bool
    card: str


@dataclasses.dataclass(frozen=True)
class Job:
    """All runs of one name, newest first, with the metric's course."""

    name: str
    rows: tuple[Row, ...]
    spark: Markup

    @property
    def champion(self) -> Row | None:
        """The run whose version became champion last."""
        return next((row for row in self.rows if row.is_champion), None)


def render_index(home: Path) -> Path:
    """Writes `home/index.html` and returns its path; runs whose record cannot be read are named at
    the end.
    """
    rows: list[Row] = []
    notes: list[str] = []
    for path in sorted((home / "runs").glob("*/run.json")):
        try:
            run = RunRecord.read(path)
        except (OSError, ValueError):
            notes.append(f"{path.parent.name}: run.json cannot be read and is left out.")
            continue
        rows.append(_row(run, path.parent))
    rows.sort(key=lambda row: (_moment(row.run), row.run.run_id), reverse=True)
    target = home / "index.html"
    write_atomically(target, page.render("index.html.j2", rows=rows, jobs=_jobs(rows), notes=notes))
    return target


def _row(run: RunRecord, folder: Path) -> Row:
    found: Findings = collect(run, history=False)
    registration = found.registration
    return Row(
        run=run,
        verdict=outcome.verdict(run, found),
        headline=outcome.headline(run, found),
        version=registration.version if registration else "",
        is_champion=bool(registration and "champion" in registration.aliases),
        card=f"runs/{quote(folder.name)}/card.html" if (folder / "card.html").is_file() else "",
    )


def _moment(run: RunRecord) -> str:
    """`started_at` in a form that sorts."""
    moment = words.instant(run.started_at)
    return moment.isoformat() if moment else run.started_at


def _jobs(rows: Sequence[Row]) -> tuple[Job, ...]:
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(row.run.name, []).append(row)
    return tuple(_job(name, tuple(group)) for name, group in by_name.items())


def _job(name: str, rows: tuple[Row, ...]) -> Job:
    metric = next((row.headline.name for row in rows if row.headline), "")
    measured = [row for row in reversed(rows) if row.headline and row.headline.name == metric][
        -_SPARK_RUNS:
    ]
    values = [row.headline.value if row.headline else math.nan for row in measured]
    promoted = [i for i, row in enumerate(measured) if row.verdict.word == "promoted"]
    label = f"{words.metric_name(metric)} over {len(values)} runs: " + ", ".join(
        map(words.metric, values[-8:])
    )
    return Job(name, rows, plots.spark(values, label=label, marked=promoted))
