"""The card of a run: one HTML file that says what happened, what the model is worth, and why it was
promoted or not.

A section without a record is left out. A run that failed opens with the step that failed and how to
go on."""

from pathlib import Path

from rekindle.errors import RequestError
from rekindle.records import RunRecord, write_atomically
from rekindle.report import evaluation, lineage, page, plan_vs_actual, timeline, training, verdicts
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
    failures = timeline.failures(run, folder)
    shown = shown_by_steps(run)
    again = run.command or f"rekindle resume {run.run_id}"
    return {
        "run": run, "notes": found.notes, "registration": found.registration,
        "verdict": verdicts.verdict(run, found), "headline": verdicts.headline(run, found),
        "failures": failures, "run_error": timeline.run_error(run, failures),
        "resume": "" if run.status == "succeeded" else again,
        "gate": evaluation.gate(run, found.evidence),
        "quality": evaluation.quality(found.evidence), "slices": evaluation.slices(run, found),
        "training": training.training(run, found), "planned": plan_vs_actual.compared(run, found),
        "timeline": timeline.timeline(run, folder), "shown": shown,
        "foreign": any(one.html for one in shown), "data": lineage.data(run, found),
        "lineage": lineage.lineage(run, found), "configuration": lineage.configuration(run),
    }  # fmt: skip
