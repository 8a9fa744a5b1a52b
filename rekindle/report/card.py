"""The card of a run: one HTML file that says what happened, what the model is worth, and why it was
promoted or not.

A section without a record is left out. A run that failed opens with the step that failed and how to
go on."""

from pathlib import Path

from rekindle.errors import RequestError
from rekindle.records import Evidence, RunRecord, write_atomically
from rekindle.report import (
    evaluation,
    lineage,
    page,
    plan_vs_actual,
    plots,
    timeline,
    training,
    verdicts,
)
from rekindle.report.artifacts import shown as shown_by_steps
from rekindle.report.collect import Findings, collect


def render_card(home: Path, run: RunRecord) -> Path:
    """Writes `home/runs/<run_id>/card.html`; the same records give the same bytes."""
    if Path(run.run_id).name != run.run_id or run.run_id in ("", ".", ".."):
        raise RequestError(f"{run.run_id!r} is not a run id", fix="name a folder under runs/")
    folder = home / "runs" / run.run_id
    found = collect(run)
    target = folder / "card.html"
    write_atomically(target, page.render("card.html.j2", **_values(run, found, folder)))
    return target


def _values(run: RunRecord, found: Findings, folder: Path) -> dict[str, object]:
    failures, shown = timeline.failures(run, folder), shown_by_steps(run)
    ruler, tracks = timeline.timeline(run, folder)
    values = {
        "run": run, "found": found, "verdict": verdicts.verdict(run, found),
        "headline": verdicts.headline(run, found), "failures": failures,
        "run_error": timeline.run_error(run, failures), "ruler": ruler, "tracks": tracks,
        "slices": evaluation.slices(run, found), "curves": training.curves(run, found.history),
        "training_facts": training.facts(found.training, found.history),
        "trained_before": any(step.cached and step.holding("training") for step in run.steps),
        "mean_steps": training.window(len(found.history)),
        "planned": plan_vs_actual.compared(run, found), "shown": shown,
        "foreign": any(one.html for one in shown),
        "data_facts": lineage.data_facts(run, found.shards, found.fingerprint),
        "classes": lineage.classes(found.shards), "lineage": lineage.lineage(run, found),
        "configuration": lineage.configuration(run),
    }  # fmt: skip
    return values | (_judged(run, found.evidence) if found.evidence else {})


def _judged(run: RunRecord, evidence: Evidence) -> dict[str, object]:
    """What only a run that was evaluated has."""
    drawn, text = evaluation.interval(run, evidence)
    longest = max((len(name) for name in evidence.labels), default=0)
    return {
        "interval": drawn, "interval_text": text, "by_class": evaluation.by_class(evidence),
        "metrics": {**evidence.metrics, **evidence.champion_metrics},
        "confusion": evaluation.confusion(evidence),
        "mistakes": plots.mistakes(evidence.labels, evidence.confusion),
        "stacked": len(evidence.confusion) > 12 or longest > 12,
        "calibration": evaluation.calibration(evidence),
    }  # fmt: skip
