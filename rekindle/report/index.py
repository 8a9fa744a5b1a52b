"""The page over all runs under a home: what each came to, and how the metric of each job moved."""

import contextlib
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from rekindle import formats
from rekindle.records import write_atomically
from rekindle.report import page, plots, texts
from rekindle.report.ledger import Entry, ledger, turns

_SPARK_RUNS = 50
_PAGE_RUNS = 200
_TURNS = 21  # one less is shown
_HEAD_CHARACTERS = 1_000


# a run, and the relative link to its card, empty if it has none yet
Row = tuple[Entry, str]


def render_index(home: Path) -> Path:
    """Writes `home/index.html` and returns its path; runs whose record cannot be read are named at
    the end. Older runs are on pages of their own, which are written where they changed."""
    known = ledger(home)
    rows = []
    for entry in reversed(known.entries):
        card = f"runs/{quote(entry.run_id)}/card.html"
        has_card = os.path.exists(f"{home}/{card}")  # noqa: PTH110 - many
        rows.append((entry, card if has_card else ""))
    older = max(0, (len(rows) - 1) // _PAGE_RUNS - 1)
    names = [*(f"index-{number + 1}.html" for number in range(older)), "index.html"]
    for number in range(older):  # from the oldest on, so that a new run changes none of them
        end = len(rows) - number * _PAGE_RUNS
        shown, target = rows[end - _PAGE_RUNS : end], home / names[number]
        mark = _mark(shown)
        if mark not in _head(target):
            links = {"older": names[number - 1] if number else "", "newest": names[-1]}
            values = {"rows": shown, "rows_mark": mark, "count": len(rows), **links}
            text = page.render("index.html.j2", jobs={}, watched={}, notes=(), **values)
            write_atomically(target, text)
    shown = rows[: len(rows) - older * _PAGE_RUNS]
    notes = [f"{name}: run.json cannot be read and is left out." for name in known.unreadable]
    values = {"rows": shown, "rows_mark": _mark(shown), "count": len(rows), "newest": ""}
    jobs: dict[str, list[Entry]] = {}
    for run, _ in rows:
        jobs.setdefault(run.name, []).append(run)
    watched = (turns(path) for path in sorted((home / "watch").glob("*.jsonl")))
    values |= {"older": names[-2] if older else "", "jobs": jobs, "notes": notes}
    values["courses"] = {name: _course(runs) for name, runs in jobs.items()}
    values["watched"] = {one[-1].name: one[:-_TURNS:-1] for one in watched if one}
    target = home / names[-1]
    write_atomically(target, page.render("index.html.j2", **values))
    return target


def _mark(rows: Sequence[Row]) -> str:
    """Tells whether a page shows these rows as they are."""
    facts = [(run.run_id, run.status, run.seconds, card) for run, card in rows]
    return f"rows-{zlib.crc32(repr(facts).encode(errors='replace')):08x}"


def _head(file: Path) -> str:
    with contextlib.suppress(OSError), file.open(errors="replace") as opened:
        return opened.read(_HEAD_CHARACTERS)
    return ""


def _course(runs: Sequence[Entry]) -> Markup:
    """How the metric of a job moved, of which the newest run is the first."""
    metric = next((run.headline.name for run in runs if run.headline), "")
    named = [run for run in runs if run.headline and run.headline.name == metric]
    measured = named[:_SPARK_RUNS][::-1]
    values = [run.headline.value if run.headline else math.nan for run in measured]
    promoted = [i for i, run in enumerate(measured) if run.promoted]
    last = ", ".join(map(formats.metric, values[-8:]))
    label = f"{texts.metric_name(metric)} over {len(values)} runs: {last}"
    return plots.spark(values, label=label, marked=promoted)
