"""What a person, and a program, is told about a run before it begins."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from rekindle.cli.job import summary
from rekindle.cli.progress import Progress, step_table
from rekindle.records import Ignored, RunRecord, StepRecord

RECORD = RunRecord(
    run_id="r",
    name="digits",
    platform="local",
    status="running",
    started_at="2026-01-01T00:00:00Z",
    ignored=(
        Ignored(what="This machine is not taken away", asked_by=("resources.spot",)),
        Ignored(what="Accelerators are not provided", asked_by=("train", "score")),
        Ignored(what="There is no pod to remove"),
    ),
)


def test_what_is_ignored_is_one_table_before_the_run() -> None:
    console = Console(file=io.StringIO(), width=100)
    with Progress(console) as progress:
        progress.changed(RECORD)
        progress.changed(RECORD.model_copy(update={"status": "succeeded"}))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines == [
        "run r",
        "ignored here                    asked by",
        "This machine is not taken away  resources.spot",
        "Accelerators are not provided   train, score",
        "There is no pod to remove       the pipeline",
    ]


def test_what_is_ignored_is_a_field_of_the_summary(tmp_path: Path) -> None:
    told = summary(RECORD, tmp_path).model_dump(mode="json")["ignored"]
    assert told[1] == {"what": "Accelerators are not provided", "asked_by": ["train", "score"]}


def test_a_record_of_sentences_can_still_be_read() -> None:
    old = RECORD.model_dump(mode="json") | {"ignored": ["Accelerators are not provided: train."]}
    (row,) = RunRecord.model_validate(old).ignored
    assert row == Ignored(what="Accelerators are not provided: train.")


def test_a_step_that_was_tried_again_says_how_often() -> None:
    lost = "its spot machines were taken away 1 x"
    steps = (
        StepRecord(name="finetune", status="succeeded", seconds=61.25, attempts=2, reason=lost),
        StepRecord(name="evaluate", status="running", attempts=3),
        StepRecord(name="register", status="succeeded", attempts=2, cached=True),
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(step_table(RECORD.model_copy(update={"steps": steps})))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1:] == [
        f"✓  finetune  61.2 s  2 attempts; {lost}",
        "▸  evaluate     ...  3 attempts",
        "✓  register  cached",
    ]
