"""What a person, and a program, is told about a run before it begins."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.app.progress import Progress, step_table
from rekindle.app.runs import summary
from rekindle.records import ArtifactRecord, Ignored, RunRecord, StepRecord

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


def test_a_step_that_was_tried_again_says_how_often() -> None:
    lost = "its spot machines were taken away 1 x"
    new = ArtifactRecord(uri="u", metadata={"pieces": "1 of 24 new"})
    steps = (
        StepRecord(name="ingest", status="succeeded", seconds=9, artifacts={"examples": new}),
        StepRecord(name="finetune", status="succeeded", seconds=61.25, attempts=2, reason=lost),
        StepRecord(name="evaluate", status="running", attempts=3),
        StepRecord(name="register", status="succeeded", attempts=2, cached=True),
    )
    console = Console(file=io.StringIO(), width=100)
    console.print(step_table(RECORD.model_copy(update={"steps": steps}), console.width))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1:] == [
        "✓  ingest        9.0 s  pieces 1 of 24 new",
        f"✓  finetune  1 min 1 s  2 attempts; {lost}",
        "▸  evaluate        ...  3 attempts",
        "✓  register     cached",
    ]


def test_what_a_step_waits_for_is_printed_once_where_there_is_no_terminal() -> None:
    console = Console(file=io.StringIO(), width=100)
    quota = StepRecord(name="finetune", status="running", reason="waiting: exceeded quota")
    image = quota.model_copy(update={"reason": "waiting: ImagePullBackOff"})
    ended = quota.model_copy(update={"status": "failed"})
    with Progress(console) as progress:
        for step in (quota, quota, image, image, ended):
            progress.changed(RECORD.model_copy(update={"ignored": (), "steps": (step,)}))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert lines[1:] == [
        "  finetune: waiting: exceeded quota",
        "  finetune: waiting: ImagePullBackOff",
        "✗ finetune  waiting: exceeded quota",
    ]


COUNTING = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def count() -> int:
    return sum(range(9))

@dsl.pipeline(name="counting")
def counting():
    first = count().set_caching_options(False)
    count().set_caching_options(False).after(first)

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def fail():
    raise ValueError("no luck")

@dsl.pipeline(name="failing")
def failing():
    fail()
"""


def in_a_process(folder: Path, *words: str, **how: Any) -> subprocess.Popen[str]:
    (folder / "counting.py").write_text(COUNTING)
    (folder / "c.yaml").write_text("name: counting\npipeline: counting.py:counting\n")
    return subprocess.Popen(
        [sys.executable, "-m", "rekindle.cli.main", *words], cwd=folder, text=True, **how
    )


@pytest.mark.slow
def test_a_run_goes_on_when_nobody_reads_what_it_says_any_more(tmp_path: Path) -> None:
    run = in_a_process(
        tmp_path, "run", "c.yaml", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )  # as `| head -1` does
    assert run.stdout is not None
    assert run.stdout.readline().startswith("run counting-")
    run.stdout.close()
    assert run.wait(120) == 0
    status = in_a_process(tmp_path, "status", "--json", stdout=subprocess.PIPE)
    record = json.loads(status.communicate(timeout=60)[0])
    assert (record["status"], len(record["steps"])) == ("succeeded", 2)


@pytest.mark.slow
def test_what_is_said_of_a_failed_run_is_not_erased_from_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    run = in_a_process(
        tmp_path,
        "run",
        "c.yaml",
        "--set",
        "pipeline=counting.py:failing",
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(ours, 1 << 16):
            seen += piece
    os.close(ours)
    assert run.wait(120) == 1
    text = seen.decode()
    after = text[text.index("card ") :]
    assert "error: " in re.sub(r"\x1b\[[0-9;]*m", "", after)
    assert "\x1b[1A" not in after, "lines are taken back"
