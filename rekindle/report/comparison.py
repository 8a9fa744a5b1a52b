"""Several runs side by side: what differs in config and data, what came of it, and whether a model
is better than the first run's beyond chance.

Two models are compared as the gate compares them (evaluate/bounds.py) where both were judged on the
same examples and labels and their scores are still there; else a note says why not. Language
models with different tokenizers are compared in bits per byte only. The page is one HTML file, like
a card: tables of what differs, and the curves of the trainings in one plot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle import formats
from rekindle.errors import first_line
from rekindle.outputs import Compared, ComparedFact, ComparedMetric, ComparedRun
from rekindle.records import Churn, Comparison, RunRecord, write_atomically
from rekindle.report import page, plots
from rekindle.report.collect import Findings, gate_of, model_of
from rekindle.report.plots import Series
from rekindle.report.texts import lower_is_better, shorten, shorten_middle
from rekindle.report.training import Curve, points, running_mean, window

if TYPE_CHECKING:
    from rekindle.evaluate.scores import Scores

    Judged = tuple[Scores, Any]
Pair = tuple[RunRecord, Findings]
Row = tuple[str, ...]
_TRAINING = "finetune"
_CHURN = {"churn": "share", "churn_fixed": "fixed", "churn_broken": "broken"}
_MOST_LETTERS = 60
COLOURS = ("a", "b", "c", "a dashed", "b dashed", "c dashed")


def compared(runs: Sequence[Pair]) -> Compared:
    """The runs in the order given; the others are compared with the first."""
    notes: list[str] = []
    settings = _different([_flat(record.spec) for record, _ in runs])
    data, metrics = _different([_data(found) for _, found in runs]), _metrics(runs, notes)
    shown = tuple(_run(*pair) for pair in runs)
    return Compared(runs=shown, settings=settings, data=data, metrics=metrics, notes=tuple(notes))


def _run(record: RunRecord, found: Findings) -> ComparedRun:
    gate, model = gate_of(found), model_of(found)
    trained = [s for s in record.steps if s.name.rpartition("/")[2] == _TRAINING]
    seconds = None
    if trained and (trained[-1].cached or trained[-1].status not in ("pending", "skipped")):
        seconds = 0.0 if trained[-1].cached else trained[-1].seconds
    return ComparedRun(
        run_id=record.run_id,
        started_at=record.started_at,
        status=record.status,
        seconds=record.seconds,
        training_seconds=seconds,
        decision=gate.decision if gate else None,
        model=f"{model.name} v{model.version}" if model else "",
        rows=found.evidence.rows if found.evidence else None,
    )


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by their dotted path."""
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        found |= _flat(inner, f"{path}.{name}" if path else str(name))
    return found


def _data(found: Findings) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if found.fingerprint:
        facts |= {"content": found.fingerprint.data[:12], "window": found.fingerprint.window}
    if found.shards:
        facts |= {f"{split} rows": rows for split, rows in found.shards.rows.items()}
        facts["classes"] = list(found.shards.labels)
    if found.evidence:
        facts["examples"] = found.evidence.examples[:12]
    return facts


def _different(sides: Sequence[Mapping[str, Any]]) -> tuple[ComparedFact, ...]:
    """What is not the same everywhere, in the order of first sight; null where a side lacks it."""
    names = dict.fromkeys(name for side in sides for name in side)
    rows = {name: tuple(side.get(name) for side in sides) for name in names}
    unlike = (row for row in rows.items() if any(value != row[1][0] for value in row[1]))
    return tuple(ComparedFact(name=name, values=values) for name, values in unlike)


def _metrics(runs: Sequence[Pair], notes: list[str]) -> tuple[ComparedMetric, ...]:
    judged = [found.evidence.metrics if found.evidence else {} for _, found in runs]
    names = dict.fromkeys(name for metrics in judged for name in metrics)
    first = _judged(*runs[0], notes)
    churns = dict[str, Churn]()
    others = [_changes(runs[0], first, pair, notes, churns) if first else {} for pair in runs[1:]]
    metrics = []
    for name in names:
        values = tuple(each.get(name) for each in judged)
        changes = (None, *(each.get(name) for each in others))
        metrics.append(ComparedMetric(name=name, values=values, changes=changes))
    for name, field in _CHURN.items() if churns else ():
        values = tuple(getattr(churns.get(run.run_id), field, None) for run, _ in runs)
        metrics.append(ComparedMetric(name=name, values=values, changes=(None,) * len(runs)))
    return tuple(metrics)


def _changes(
    base: Pair, first: Judged, pair: Pair, notes: list[str], churns: dict[str, Churn]
) -> dict[str, Comparison]:
    """How much better the model of a run is than the first one, by metric, and its churn; a note
    says why some metrics, or all, cannot be compared."""
    from rekindle.evaluate.evaluate import churn_of, compare
    from rekindle.spec.model import GateSpec

    (record, found), before = pair, base[0].run_id
    assert base[1].evidence is not None
    told = base[1].evidence.examples, base[1].evidence.rows
    if found.evidence is not None and (found.evidence.examples, found.evidence.rows) != told:
        notes.append(f"{record.run_id} was judged on other examples than {before}.")
        return {}
    judged = _judged(record, found, notes)
    if judged is None:
        return {}
    (scores, right), (theirs, theirs_right) = judged, first
    names = [name for name in theirs.metrics if name in scores.metrics]
    if type(scores) is not type(theirs):
        notes.append(f"{record.run_id} learnt another task than {before}.")
        return {}
    if right != theirs_right:
        names = [name for name in names if name == "bits_per_byte"]
        what = "other tokens" if names else "other labels or classes"
        only = "; only bits_per_byte compares them" if names else ""
        notes.append(f"{record.run_id} was judged on {what} than {before}{only}.")
    elif churn := churn_of(scores, theirs):
        churns[record.run_id] = churn
    return {name: compare(GateSpec(), name, scores, theirs) for name in names}


def _judged(record: RunRecord, found: Findings, notes: list[str]) -> Judged | None:
    """What the run's model scored and what was right, or None with a note."""
    if found.evidence is None:
        notes.append(f"{record.run_id} was not evaluated.")
        return None
    try:
        from rekindle.evaluate.evaluate import candidate_scores

        judging = record.spec.get("evaluate", {}).get("audit", 0.0)
        salt = ((record.spec.get("data") or {}).get("split") or {}).get("salt", "")
        return candidate_scores(found.files["scores"].parent, judging, salt)
    except KeyError:
        notes.append(f"{record.run_id} has no scores by example: its step `score` is not there.")
    except (OSError, ValueError, ImportError) as error:
        notes.append(f"the scores of {record.run_id} cannot be read: {first_line(error)}")
    return None


def lines(found: Compared) -> list[str]:
    """The tables, and what could not be compared."""
    about: list[Row] = [("run", *(run.run_id for run in found.runs))]
    about += [(name.lower(), *values) for name, values in facts(found.runs)]
    interval = "with 95% interval; marked where it holds no zero"
    title = f"metrics, and changes from the first run ({interval})"
    config, data = _fact_rows(found.settings), _fact_rows(found.data)
    rows: list[Row] = []
    for metric in found.metrics:
        rows.append((metric.name, *(formats.metric(value) for value in metric.values)))
        if any(metric.changes):
            rows.append(("", *(f"{change_text(c)} {certainly(c)}".strip() for c in metric.changes)))
    metrics = rows or [("no run was evaluated",)]
    text = formats.aligned(about)
    for name, rows in ((title, metrics), ("config", config), ("data", data)):
        text += ["", name, *formats.aligned(rows)]
    return [*text, *(["", *(f"note: {note}" for note in found.notes)] if found.notes else [])]


def facts(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """What the runs came to: of each fact its name, and a value for each run."""
    columns = [_facts(run) for run in runs]
    return [(rows[0][0], [value for _, value in rows]) for rows in zip(*columns, strict=True)]


def _facts(run: ComparedRun) -> tuple[tuple[str, str], ...]:
    trained = "from the cache" if run.training_seconds == 0 else None
    return (
        ("Started", formats.date(run.started_at)),
        ("Status", run.status),
        ("Time", formats.duration(run.seconds)),
        ("Training", trained or formats.duration(run.training_seconds)),
        ("Gate", (run.decision or "–").replace("_", " ")),
        ("Model", run.model or "–"),
        ("Judged on", f"{formats.count(run.rows)} rows" if run.rows is not None else "–"),
    )


def value_text(value: Any) -> str:
    """A setting as a config would have it; "–" for one that is not there."""
    if value is None:
        return "–"
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    is_line = isinstance(value, str) and "\n" not in value
    return value if is_line else json.dumps(value, ensure_ascii=False)


def change_text(change: Comparison | None) -> str:
    """The change of the value and its interval; "" for none."""
    if change is None:
        return ""
    ends = [change.estimate, change.lower, change.upper]
    if lower_is_better(change.metric):  # a comparison is turned so that more is better
        ends = [-change.estimate, -change.upper, -change.lower]
    middle, lower, upper = map(formats.signed, ends)
    return f"{middle} [{lower}, {upper}]"


def certainly(change: Comparison | None) -> str:
    """`better` or `worse` where the interval holds no zero, else nothing."""
    if change is None or change.lower <= 0 <= change.upper:
        return ""
    return "better" if change.lower > 0 else "worse"


def _fact_rows(rows: tuple[ComparedFact, ...]) -> list[Row]:
    return [
        (row.name, *(shorten_middle(value_text(value), _MOST_LETTERS) for value in row.values))
        for row in rows
    ] or [("the same",)]


def render_comparison(target: Path, runs: Sequence[Pair], found: Compared) -> None:
    """Write the page to `target`; the same records give the same bytes."""
    text = page.render(
        "compare.html.j2",
        compared=found,
        facts=facts(found.runs),
        change_text=change_text,
        certainly=certainly,
        value_text=value_text,
        curves=[curves for curves in _curves(runs) if curves.plot],
        left_out=max(0, len(runs) - len(COLOURS)),
    )
    write_atomically(target, text)


def _curves(runs: Sequence[Pair]) -> list[Curve]:
    """Figures with a line for each run."""
    shown = list(zip(COLOURS, runs, strict=False))
    legend = tuple((css, shorten(record.run_id, 60)) for css, (record, _) in shown)
    training, validation = [], []
    for css, (record, found) in shown:
        loss, held_out = (points(found.history, f) for f in ("loss", "validation_loss"))
        if width := window(len(loss)):
            loss = running_mean(loss, width)
        training.append(Series(record.run_id, loss, css))
        validation.append(Series(record.run_id, held_out, css, marks=len(held_out) <= 40))
    return [
        Curve(name, plots.line(series, label=f"{name} of {len(series)} runs.", zero=True), legend)
        for name, series in (("Training loss", training), ("Validation loss", validation))
    ]
