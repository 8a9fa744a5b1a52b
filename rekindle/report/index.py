"""The page over all runs under a home: what each came to,
and the life of each job's model."""

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
from rekindle.records import Monitored, Turn, write_atomically
from rekindle.report import costs, page, plots, texts
from rekindle.report.ledger import Entry, checks, ledger, turns

_LIFE_RUNS = 50  # whose models a job's life is drawn of
_PAGE_RUNS = 200  # on each page of older runs; the newest page has up to twice as many
_TURNS = 21  # one less is shown
_HEAD_CHARACTERS = 1_000  # of a page, in which its mark stands

# a run, and the relative link to its card, empty if it has none yet
Row = tuple[Entry, str]


def render_index(home: Path) -> Path:
    """Writes `home/index.html` and returns its path; runs whose record cannot be read are
    named at the end. Older runs are on pages of their own, which are written where they
    changed."""
    all_runs = ledger(home)
    rows = [(entry, _card_link(home, entry)) for entry in reversed(all_runs.entries)]
    older_pages = max(0, (len(rows) - 1) // _PAGE_RUNS - 1)
    names = [*(f"index-{number + 1}.html" for number in range(older_pages)), "index.html"]
    _render_older(home, rows, names)
    newest_rows = rows[: len(rows) - older_pages * _PAGE_RUNS]
    notes = [f"{name}: run.json cannot be read and is left out." for name in all_runs.unreadable]
    jobs: dict[str, list[Entry]] = {}
    for run, _ in rows:
        jobs.setdefault(run.name, []).append(run)
    money = None
    if any(entry.platform != "local" for entry in all_runs.entries):
        try:
            money = all_runs.paid(book(home))
        except RekindleError as error:
            notes.append(f"What was paid is not known: {first_line(error)}")
    checks_by_name = checks(home)
    target = home / names[-1]
    text = page.render(
        "index.html.j2",
        rows=newest_rows,
        rows_mark=_mark(newest_rows),
        count=len(rows),
        newest="",
        older=names[-2] if older_pages else "",
        jobs=jobs,
        notes=notes,
        lives={name: _life(runs, checks_by_name.get(name, ())) for name, runs in jobs.items()},
        money=money,
        costs=costs,
        plots=plots,
        watched=_watched(home),
    )
    write_atomically(target, text)
    return target


def _card_link(home: Path, entry: Entry) -> str:
    """The relative link to a run's card; "" where it has none yet."""
    card = f"runs/{quote(entry.run_id)}/card.html"
    return card if os.path.exists(f"{home}/{card}") else ""  # noqa: PTH110 - many


def _render_older(home: Path, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Writes the pages of older runs; `names` are those of all pages, the newest last."""
    # from the oldest on, so that a new run changes none of them
    for number, name in enumerate(names[:-1]):
        end = len(rows) - number * _PAGE_RUNS
        page_rows = rows[end - _PAGE_RUNS : end]
        mark = _mark(page_rows)
        if mark in _head(home / name):
            continue
        text = page.render(
            "index.html.j2",
            rows=page_rows,
            rows_mark=mark,
            count=len(rows),
            newest=names[-1],
            older=names[number - 1] if number else "",
            jobs={},
            watched={},
            money=None,
            notes=(),
        )
        write_atomically(home / name, text)


def _watched(home: Path) -> dict[str, list[Turn]]:
    """The last turns of `rekindle watch` by the name of the config, the newest first."""
    watched = {}
    for path in sorted((home / "watch").glob("*.jsonl")):
        turns_of_name = turns(path)
        if turns_of_name:
            watched[turns_of_name[-1].name] = turns_of_name[:-_TURNS:-1]
    return watched


def _mark(rows: Sequence[Row]) -> str:
    """Tells whether a page shows these rows as they are."""
    # a checksum is enough: it tells a page of ours from an older one
    facts = [(run.run_id, run.status, run.seconds, card) for run, card in rows]
    return f"rows-{zlib.crc32(repr(facts).encode(errors='replace')):08x}"


def _head(file: Path) -> str:
    """The beginning of a page, where its mark is; "" for one that is not there."""
    with contextlib.suppress(OSError), file.open(errors="replace") as opened:
        return opened.read(_HEAD_CHARACTERS)
    return ""


def _life(
    runs: Sequence[Entry], checks: Sequence[Monitored]
) -> tuple[Markup, bool, bool, float | None]:
    """The candidates of a job, of which the newest run is the first, and what monitors
    saw since the first of them; whether that was accuracy that was reached live, and
    alarms; the spread."""
    metric = next((run.headline.name for run in runs if run.headline), "")
    candidates = _candidates(runs, metric)
    live: list[tuple[float, float]] = []
    alarms: dict[tuple[float, float], str] = {}
    end = 0.0
    if candidates:
        for check in checks:
            moment = formats.instant(check.at)
            if moment is None or moment.timestamp() < candidates[0].time:
                continue
            seconds = moment.timestamp()
            end = max(end, seconds)
            live += [(seconds, signal.now) for signal in check.signals if signal.name == metric]
            if check.verdict == "alarm":
                month = floor(moment, "month")
                next_month = shift(month, parse_duration("1 month"))
                alarm_text = f"alarm in {month:%b %Y}: {texts.shorten(check.reason, 300)}"
                alarms[month.timestamp(), next_month.timestamp()] = alarm_text
    # what a screen reader says of the drawing: the last of each kind
    label = [f"{texts.metric_name(metric)} of candidates"]
    label += [candidate.words for candidate in candidates[-8:]]
    if live:
        time, now = live[-1]
        label.append(f"live {formats.metric(now)} on {formats.day(time)}")
    label += [alarm.partition(":")[0] for alarm in alarms.values()]
    drawing = plots.life(candidates, sorted(live), alarms, end=end, label="; ".join(label))
    spread = _spread([candidate.value for candidate in candidates])
    return drawing, bool(live), bool(alarms), spread


def _candidates(runs: Sequence[Entry], metric: str) -> list[plots.Candidate]:
    """The models of the newest runs that were judged by the metric, oldest first."""
    by_metric = [run for run in runs if run.headline and run.headline.name == metric]
    # older models are left out, and those that were judged by another metric compare with
    # none
    candidates = []
    for run in by_metric[:_LIFE_RUNS]:
        candidate = _candidate(run)
        if candidate is not None:
            candidates.append(candidate)
    return sorted(candidates)


def _spread(values: Sequence[float]) -> float | None:
    """How far apart trainings come out, as a standard deviation; each is held against
    those before and after it, so that no trend counts. None where there are too few to
    tell."""
    triples = zip(values, values[1:], values[2:], strict=False)
    gaps = []
    for before, value, after in triples:
        gap = before - 2 * value + after
        if math.isfinite(gap):
            gaps.append(gap)
    if len(gaps) <= 2:
        return None
    # of independent values a gap has 1 + 4 + 1 times the variance of one
    return math.sqrt(sum(gap**2 for gap in gaps) / 6 / len(gaps))


def _candidate(run: Entry) -> plots.Candidate | None:
    """What was judged in a run; the interval is that of the gain,
    laid on the champion's value."""
    moment = formats.instant(run.moment)
    judged = run.headline
    if moment is None or judged is None:
        return None
    lower = upper = judged.value
    gain = (run.summary["gate"] or {}).get("comparison")
    if gain and gain["metric"] == judged.name and judged.champion is not None:
        # a gain is turned so that more is better
        sign = -1 if texts.lower_is_better(judged.name) else 1
        lower, upper = sorted(
            [
                judged.champion + sign * float(gain["lower"]),
                judged.champion + sign * float(gain["upper"]),
            ]
        )
    seconds = moment.timestamp()
    label = f"{formats.day(seconds)} {formats.metric(judged.value)} {run.verdict.word}"
    return plots.Candidate(seconds, judged.value, lower, upper, run.promoted, label)
