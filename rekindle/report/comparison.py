"""Several runs side by side: what differs in config and data, what came of it, and
whether a model is better than the first run's beyond chance.

Two models are compared as the gate compares them (evaluate/bounds.py) where both were
judged on the same examples and labels and their scores are still there; else a note says
why not. Language models with different tokenizers are compared in bits per byte only. The
page is one HTML file, like a card: tables of what differs, and the curves of the
trainings in one plot."""

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
from rekindle.report.collect import RunFindings, gate_of, model_of
from rekindle.report.plots import Series
from rekindle.report.texts import lower_is_better, shorten, shorten_middle
from rekindle.report.training import Curve, points, running_mean, window

if TYPE_CHECKING:
    from rekindle.objectives.scores import ModelScores

    Judged = tuple[ModelScores, Any]
Pair = tuple[RunRecord, RunFindings]
Row = tuple[str, ...]
_TRAINING = "finetune"  # the step of the shipped pipeline that trains
# rows of the table -> fields of `Churn`
_CHURN = {"churn": "share", "churn_fixed": "fixed", "churn_broken": "broken"}
_MOST_LETTERS = 60  # of a value, so that runs stand side by side on a terminal
# classes of the style sheet; a run beyond these has no line
COLOURS = ("a", "b", "c", "a dashed", "b dashed", "c dashed")


def compared(runs: Sequence[Pair]) -> Compared:
    """The runs in the order given; the others are compared with the first."""
    notes: list[str] = []
    return Compared(
        runs=tuple(_run(record, findings) for record, findings in runs),
        settings=_different([_leaves(record.spec) for record, _ in runs]),
        data=_different([_data(findings) for _, findings in runs]),
        metrics=_metrics(runs, notes),
        notes=tuple(notes),
    )


def _run(record: RunRecord, findings: RunFindings) -> ComparedRun:
    """What a run came to, as the comparison lists it."""
    gate = gate_of(findings)
    model = model_of(findings)
    return ComparedRun(
        run_id=record.run_id,
        started_at=record.started_at,
        status=record.status,
        seconds=record.seconds,
        training_seconds=_training_seconds(record),
        decision=gate.decision if gate else None,
        model=f"{model.name} v{model.version}" if model else "",
        rows=findings.evidence.rows if findings.evidence else None,
    )


def _training_seconds(record: RunRecord) -> float | None:
    """How long the last training took: nothing from the cache,
    None where there was none."""
    # a step of a nested pipeline has the names of those around it before its own
    trainings = [step for step in record.steps if step.name.rpartition("/")[2] == _TRAINING]
    if not trainings:
        return None
    last = trainings[-1]
    if last.cached:
        return 0.0
    return None if last.status in ("pending", "skipped") else last.seconds


def _leaves(value: object, path: str = "") -> dict[str, object]:
    """The leaves of nested mappings by their dotted path."""
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    leaves: dict[str, object] = {}
    for name, inner in value.items():
        leaves |= _leaves(inner, f"{path}.{name}" if path else str(name))
    return leaves


def _data(findings: RunFindings) -> dict[str, object]:
    """What the data of a run were, by name."""
    facts: dict[str, object] = {}
    if findings.fingerprint:
        facts["content"] = findings.fingerprint.data[:12]
        facts["window"] = findings.fingerprint.window
    if findings.shards:
        for split, rows in findings.shards.rows.items():
            facts[f"{split} rows"] = rows
        facts["classes"] = list(findings.shards.labels)
    if findings.evidence:
        facts["examples"] = findings.evidence.examples[:12]
    return facts


def _different(sides: Sequence[Mapping[str, Any]]) -> tuple[ComparedFact, ...]:
    """What is not the same everywhere, in the order of first sight;
    null where a side lacks it."""
    names: dict[str, None] = {}
    for side in sides:
        names |= dict.fromkeys(side)
    different = []
    for name in names:
        values = tuple(side.get(name) for side in sides)
        if any(value != values[0] for value in values):
            different.append(ComparedFact(name=name, values=values))
    return tuple(different)


def _metrics(runs: Sequence[Pair], notes: list[str]) -> tuple[ComparedMetric, ...]:
    """The metrics of the runs and their changes from the first, and its churn."""
    metrics_of_runs: list[Mapping[str, float]] = []
    names: dict[str, None] = {}  # in the order of first sight
    for _, findings in runs:
        metrics_of_run = findings.evidence.metrics if findings.evidence else {}
        metrics_of_runs.append(metrics_of_run)
        names |= dict.fromkeys(metrics_of_run)
    first = _judged(*runs[0], notes)
    churns: dict[str, Churn] = {}
    changes_of_runs: list[Mapping[str, Comparison]] = [{} for _ in runs]
    if first:
        for position, pair in enumerate(runs[1:], 1):
            changes_of_runs[position] = _changes(runs[0], first, pair, notes, churns)
    rows = []
    for name in names:
        values = tuple(metrics.get(name) for metrics in metrics_of_runs)
        changes = tuple(changes.get(name) for changes in changes_of_runs)
        rows.append(ComparedMetric(name=name, values=values, changes=changes))
    if churns:
        for name, field in _CHURN.items():
            values = tuple(getattr(churns.get(run.run_id), field, None) for run, _ in runs)
            unchanged = (None,) * len(runs)
            rows.append(ComparedMetric(name=name, values=values, changes=unchanged))
    return tuple(rows)


def _changes(
    base: Pair, first: Judged, pair: Pair, notes: list[str], churns: dict[str, Churn]
) -> dict[str, Comparison]:
    """How much better the model of a run is than the first one, by metric, and its churn;
    a note says why some metrics, or all, cannot be compared."""
    from rekindle.evaluate.compare import churn_of, compare
    from rekindle.spec.model import GateSpec

    base_record, base_findings = base
    record, findings = pair
    base_evidence = base_findings.evidence
    evidence = findings.evidence
    assert base_evidence is not None
    base_rows = (base_evidence.examples, base_evidence.rows)
    if evidence is not None and (evidence.examples, evidence.rows) != base_rows:
        notes.append(f"{record.run_id} was judged on other examples than {base_record.run_id}.")
        return {}
    judged = _judged(record, findings, notes)
    if judged is None:
        return {}
    scores, labels = judged
    base_scores, base_labels = first
    if type(scores) is not type(base_scores):
        notes.append(f"{record.run_id} learnt another task than {base_record.run_id}.")
        return {}
    names = [name for name in base_scores.metrics if name in scores.metrics]
    # churn counts answers that changed, which only the same labels tell right from wrong
    if labels == base_labels:
        churn = churn_of(scores, base_scores)
        if churn:
            churns[record.run_id] = churn
    else:
        # bits a byte do not depend on how a tokenizer cuts the bytes
        names = [name for name in names if name == "bits_per_byte"]
        difference = "other labels or classes"
        exception = ""
        if names:
            difference = "other tokens"
            exception = "; only bits_per_byte compares them"
        notes.append(
            f"{record.run_id} was judged on {difference} than {base_record.run_id}{exception}."
        )
    return {name: compare(GateSpec(), name, scores, base_scores) for name in names}


def _judged(record: RunRecord, findings: RunFindings, notes: list[str]) -> Judged | None:
    """What the run's model scored and what was right, or None with a note."""
    if findings.evidence is None:
        notes.append(f"{record.run_id} was not evaluated.")
        return None
    try:
        from rekindle.evaluate.evaluate import candidate_scores

        audit_share = record.spec.get("evaluate", {}).get("audit", 0.0)
        split = (record.spec.get("data") or {}).get("split") or {}
        folder = findings.files["scores"].parent
        return candidate_scores(folder, audit_share, split.get("salt", ""))
    except KeyError:  # of `files`
        notes.append(f"{record.run_id} has no scores by example: its step `score` is not there.")
    except (OSError, ValueError, ImportError) as error:
        notes.append(f"the scores of {record.run_id} cannot be read: {first_line(error)}")
    return None


def lines(result: Compared) -> list[str]:
    """The tables, and what could not be compared."""
    run_rows: list[Row] = [("run", *(run.run_id for run in result.runs))]
    run_rows += [(name.lower(), *values) for name, values in facts(result.runs)]
    tables = {
        "metrics, and changes from the first run "
        "(with 95% interval; marked where it holds no zero)": _metric_rows(result.metrics),
        "config": _fact_rows(result.settings),
        "data": _fact_rows(result.data),
    }
    text = formats.aligned(run_rows)
    for title, rows in tables.items():
        text += ["", title, *formats.aligned(rows)]
    if result.notes:
        text.append("")
        text += [f"note: {note}" for note in result.notes]
    return text


def _metric_rows(metrics: Sequence[ComparedMetric]) -> list[Row]:
    """A row of values for each metric, and below it the changes where there are some."""
    rows: list[Row] = []
    for metric in metrics:
        rows.append((metric.name, *(formats.metric(value) for value in metric.values)))
        if any(metric.changes):
            changes = [f"{change_text(c)} {certainly(c)}".strip() for c in metric.changes]
            rows.append(("", *changes))
    return rows or [("no run was evaluated",)]


def facts(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """What the runs came to: of each fact its name, and a value for each run."""
    columns = [_facts(run) for run in runs]
    rows = []
    for cells in zip(*columns, strict=True):
        name = cells[0][0]
        rows.append((name, [value for _, value in cells]))
    return rows


def _facts(run: ComparedRun) -> tuple[tuple[str, str], ...]:
    """What a run came to, as names and words."""
    training = formats.duration(run.training_seconds)
    if run.training_seconds == 0:
        training = "from the cache"
    return (
        ("Started", formats.date(run.started_at)),
        ("Status", run.status),
        ("Time", formats.duration(run.seconds)),
        ("Training", training),
        ("Gate", (run.decision or "–").replace("_", " ")),
        ("Model", run.model or "–"),
        ("Judged on", f"{formats.count(run.rows)} rows" if run.rows is not None else "–"),
    )


def value_text(value: object) -> str:
    """A setting as a config would have it; "–" for one that is not there."""
    if value is None:
        return "–"
    # 3.0 and 3 are the same setting
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    if isinstance(value, str) and "\n" not in value:
        return value
    return json.dumps(value, ensure_ascii=False)


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


def _fact_rows(facts: Sequence[ComparedFact]) -> list[Row]:
    """A row of values for each fact that is not the same in all runs."""
    rows: list[Row] = []
    for fact in facts:
        cells = [shorten_middle(value_text(value), _MOST_LETTERS) for value in fact.values]
        rows.append((fact.name, *cells))
    return rows or [("the same",)]


def render_comparison(target: Path, runs: Sequence[Pair], result: Compared) -> None:
    """Write the page to `target`; the same records give the same bytes."""
    text = page.render(
        "compare.html.j2",
        compared=result,
        facts=facts(result.runs),
        change_text=change_text,
        certainly=certainly,
        value_text=value_text,
        curves=[curves for curves in _curves(runs) if curves.plot],
        left_out=max(0, len(runs) - len(COLOURS)),
    )
    write_atomically(target, text)


def _curves(runs: Sequence[Pair]) -> list[Curve]:
    """Figures with a line for each run."""
    legend = []
    training = []
    validation = []
    # not strict: there are as many lines as colours
    for css, (record, findings) in zip(COLOURS, runs, strict=False):
        legend.append((css, shorten(record.run_id, 60)))
        loss = points(findings.history, "loss")
        width = window(len(loss))
        if width:
            loss = running_mean(loss, width)
        training.append(Series(record.run_id, loss, css))
        held_out = points(findings.history, "validation_loss")
        validation.append(Series(record.run_id, held_out, css, marks=len(held_out) <= 40))
    return [
        _curve("Training loss", training, tuple(legend)),
        _curve("Validation loss", validation, tuple(legend)),
    ]


def _curve(title: str, series: Sequence[Series], legend: tuple[tuple[str, str], ...]) -> Curve:
    label = f"{title} of {len(series)} runs."
    return Curve(title, plots.line(series, label=label, zero=True), legend)
