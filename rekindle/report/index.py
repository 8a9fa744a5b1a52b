"""The page over all runs under a home: what each came to, and the life of each job's model."""

import contextlib
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from rekindle import formats
from rekindle.catalog.prices import book
from rekindle.data.window import floor, parse_duration, shift
from rekindle.errors import RekindleError, first_line
from rekindle.records import Monitored, write_atomically
from rekindle.report import costs, page, plots, texts
from rekindle.report.ledger import Entry, checks, ledger, turns

_LIFE_RUNS = 50
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
            text = page.render("index.html.j2", jobs={}, watched={}, money=None, notes=(), **values)
            write_atomically(target, text)
    shown = rows[: len(rows) - older * _PAGE_RUNS]
    notes = [f"{name}: run.json cannot be read and is left out." for name in known.unreadable]
    jobs: dict[str, list[Entry]] = {}
    for run, _ in rows:
        jobs.setdefault(run.name, []).append(run)
    money = None
    if any(entry.platform != "local" for entry in known.entries):
        try:
            money = known.paid(book(home))
        except RekindleError as error:
            notes.append(f"What was paid is not known: {first_line(error)}")
    watched = (turns(path) for path in sorted((home / "watch").glob("*.jsonl")))
    checked, target = checks(home), home / names[-1]
    text = page.render(
        "index.html.j2",
        rows=shown,
        rows_mark=_mark(shown),
        count=len(rows),
        newest="",
        older=names[-2] if older else "",
        jobs=jobs,
        notes=notes,
        lives={name: _life(runs, checked.get(name, ())) for name, runs in jobs.items()},
        money=money,
        costs=costs,
        plots=plots,
        watched={one[-1].name: one[:-_TURNS:-1] for one in watched if one},
    )
    write_atomically(target, text)
    return target


def _mark(rows: Sequence[Row]) -> str:
    """Tells whether a page shows these rows as they are."""
    facts = [(run.run_id, run.status, run.seconds, card) for run, card in rows]
    return f"rows-{zlib.crc32(repr(facts).encode(errors='replace')):08x}"


def _head(file: Path) -> str:
    with contextlib.suppress(OSError), file.open(errors="replace") as opened:
        return opened.read(_HEAD_CHARACTERS)
    return ""


def _life(
    runs: Sequence[Entry], checks: Sequence[Monitored]
) -> tuple[Markup, bool, bool, float | None]:
    """The candidates of a job, of which the newest run is the first, and what monitors saw since
    the first of them; whether that was accuracy that was reached live, and alarms; the spread."""
    metric = next((run.headline.name for run in runs if run.headline), "")
    named = [run for run in runs if run.headline and run.headline.name == metric]
    judged = sorted(one for run in named[:_LIFE_RUNS] if (one := _candidate(run)))
    live, alarms, end = list[tuple[float, float]](), dict[tuple[float, float], str](), 0.0
    for check in checks if judged else ():
        moment = formats.instant(check.at)
        if moment and (seconds := moment.timestamp()) >= judged[0].time:
            end = max(end, seconds)
            live += [(seconds, one.now) for one in check.signals if one.name == metric]
            if check.verdict == "alarm":
                month = floor(moment, "month")
                span = month.timestamp(), shift(month, parse_duration("1 month")).timestamp()
                alarms[span] = f"alarm in {month:%b %Y}: {texts.shorten(check.reason, 300)}"
    words = [f"{texts.metric_name(metric)} of candidates", *(one.words for one in judged[-8:])]
    words += [f"live {formats.metric(now)} on {formats.day(time)}" for time, now in live[-1:]]
    words += [alarm.partition(":")[0] for alarm in alarms.values()]
    drawn = plots.life(judged, sorted(live), alarms, end=end, label="; ".join(words))
    return drawn, bool(live), bool(alarms), _spread([one.value for one in judged])


def _spread(values: Sequence[float]) -> float | None:
    """How far apart trainings come out, as a standard deviation; each is held against those before
    and after it, so that no trend counts. None where there are too few to tell."""
    gaps = [a - 2 * b + c for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    known = [gap for gap in gaps if math.isfinite(gap)]
    return math.sqrt(sum(gap**2 for gap in known) / 6 / len(known)) if len(known) > 2 else None


def _candidate(run: Entry) -> plots.Candidate | None:
    """What was judged in a run; the interval is that of the gain, laid on the champion's value."""
    moment, judged = formats.instant(run.moment), run.headline
    if moment is None or judged is None:
        return None
    lower = upper = judged.value
    gain = (run.summary["gate"] or {}).get("comparison")
    if gain and gain["metric"] == judged.name and judged.champion is not None:
        sign = -1 if texts.lower_is_better(judged.name) else 1
        lower, upper = sorted(judged.champion + sign * float(gain[e]) for e in ("lower", "upper"))
    words = f"{formats.day(moment.timestamp())} {formats.metric(judged.value)} {run.verdict.word}"
    return plots.Candidate(moment.timestamp(), judged.value, lower, upper, run.promoted, words)
