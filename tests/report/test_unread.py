"""A run whose artifacts could not be read says so, and denies neither its gate nor its model."""

from __future__ import annotations

from rekindle.app.runs import no_model_of
from rekindle.records import RunRecord, StepRecord, Submission
from rekindle.report.collect import RunFindings
from rekindle.report.verdicts import verdict

WHY = "minio://b/x is in the cluster's own store, and nothing there hands it out. Set a root"


def run(unread: str) -> RunRecord:
    return RunRecord(
        run_id="r",
        name="digits",
        platform="kubeflow",
        status="succeeded",
        started_at="2026-11-30T00:00:00Z",
        steps=(StepRecord(name="evaluate", status="succeeded"),),
        submission=Submission(definition="d", token="t", id="1", unread=unread),
    )


def test_the_card_says_that_nothing_could_be_read_and_why() -> None:
    said = verdict(run(WHY), RunFindings())
    assert said.sentence == "Finished: 1 step done. What they left could not be read."
    assert WHY in str(said)
    assert "no gate in this pipeline" in verdict(run(""), RunFindings()).sentence


def test_a_model_that_is_not_known_is_not_denied() -> None:
    (problem,) = no_model_of(run(WHY)).problems
    assert problem.what == "what the run r registered could not be read"
    assert problem.fix == WHY
    (problem,) = no_model_of(run("")).problems
    assert problem.what == "the run r registered no model"
