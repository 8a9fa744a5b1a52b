"""Runs after they began: refreshed from their platform, followed to their end, cancelled,
resumed; and what is copied under the home at their end: records of their steps, the log
of the one that failed, the card.

A platform is asked again and again while a run goes on; that it does not answer for a
while does not end the waiting."""

import contextlib
import datetime
import logging
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rekindle.app.notify import push, tell_of
from rekindle.app.runs import sent_definition, write_card
from rekindle.errors import PlatformError, Problem, RequestError, UnreachableError
from rekindle.masking import Masked, masked
from rekindle.platforms.api import ConfiguredPlatform, platform_of
from rekindle.platforms.local.store import owner, slug
from rekindle.platforms.snapshot import ENDED_RUN, first_failed, merged
from rekindle.platforms.submission import RunTag, SubmittedRun
from rekindle.records import (
    RECORD_FILES,
    ArtifactRecord,
    RunRecord,
    StepRecord,
    Submission,
)
from rekindle.report.collect import HISTORY, PROFILE
from rekindle.spec.platforms import recorded_sections

log = logging.getLogger(__name__)

PAUSE_SECONDS = 5.0
LONGEST_PAUSE_SECONDS = 60.0
PATIENCE_SECONDS = 6 * 3600.0  # with a platform that does not answer at all


def place_of(record: RunRecord) -> tuple[ConfiguredPlatform, Submission]:
    """The record's platform, and the submission there.

    RequestError where the platform did not confirm the submission."""
    submission = record.submission
    if submission is None or not submission.id:
        raise RequestError(
            f"the submission of {record.run_id} was interrupted before {record.platform} "
            "confirmed it",
            fix=f"rerun the command to continue it: {record.command}",
        )
    sections = recorded_sections(record.spec["platforms"])
    return platform_of(record.platform, sections), submission


def refresh_from_platform(record: RunRecord, home: Path) -> RunRecord:
    """Ask the run's platform, if it has one, for its state; returns the new record.

    A changed record is written under `home`. At the end of a run what its steps left is
    copied there, its card is written, and `notify` and the monitoring system are told,
    once."""
    submission = record.submission
    if submission is None or not submission.id or submission.settled:
        return record
    platform, submission = place_of(record)
    had_ended = record.status in ENDED_RUN
    now = record
    if not had_ended:
        snapshot = platform.describe(submission.id)
        now = merged(record, snapshot, datetime.datetime.now(datetime.UTC))
        # a platform repeats what a step printed last, secrets included
        steps = [
            step.model_copy(update={"error": masked(step.error), "reason": masked(step.reason)})
            for step in now.steps
        ]
        now = now.model_copy(update={"steps": tuple(steps), "error": masked(now.error)})
    has_ended = now.status in ENDED_RUN
    if has_ended:
        now = _with_files_at_home(now, home)
    if now != record:
        now.write(home / "runs" / now.run_id / "run.json")
    if has_ended:
        write_card(home, now.run_id)
    if has_ended and not had_ended:
        tell_of(now)
        push(now, home)
    return now


def wait_until_ended(
    record: RunRecord, home: Path, on_change: Callable[[RunRecord], None]
) -> RunRecord:
    """Wait until the run is over, and return its record.

    UnreachableError after hours without an answer."""
    pause_seconds = PAUSE_SECONDS
    silent_since: float | None = None
    while record.status not in ENDED_RUN:
        try:
            record = refresh_from_platform(record, home)
        except UnreachableError as error:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise
            log.warning("%s does not answer, and is asked again: %s", record.platform, error)
            # a service that is down is asked less and less often
            pause_seconds = min(LONGEST_PAUSE_SECONDS, pause_seconds * 2)
        else:
            pause_seconds = PAUSE_SECONDS
            silent_since = None
            on_change(record)
        if record.status not in ENDED_RUN:
            time.sleep(pause_seconds)
    return record


def log_of(record: RunRecord, step: StepRecord, home: Path, follow: bool = False) -> Iterator[str]:
    """What the step printed, in pieces, without secrets; with `follow` until it ends."""
    platform, submission = place_of(record)
    masking = Masked()  # a secret may go across two pieces
    cursor = ""
    is_over = not follow
    while True:
        piece = platform.read_log(submission.id, step, cursor)
        cursor = piece.cursor
        if piece.text:
            yield masking.feed(piece.text.encode()).decode()
        if is_over:
            yield masking.rest().decode()
            return
        record = refresh_from_platform(record, home)
        step = record.step(step.name)
        # once it is over the log is read once more: it may have grown until then
        is_over = step.status not in ("pending", "running")
        if not is_over:
            time.sleep(PAUSE_SECONDS)


def step_with_log(record: RunRecord, name: str | None) -> StepRecord:
    """The step of this name, else the first that failed, else the one that runs or took
    longest; RequestError where it printed nothing."""
    try:
        step = record.step(name) if name else _step_to_look_at(record)
    except KeyError:
        step = None
    if step is None or not step.log:
        wanted_step = f"a step `{name}`" if name else "any step"
        raise RequestError(
            f"the run {record.run_id} has no log of {wanted_step}",
            fix=steps_with_a_log(record, step),
        )
    return step


def _step_to_look_at(record: RunRecord) -> StepRecord | None:
    """The first step that failed, else the one that runs or took longest, if any ran."""

    def seconds(step: StepRecord) -> float:
        if step.status == "running":
            return math.inf
        return step.seconds or 0.0

    steps = [step for step in record.steps if step.log]
    return first_failed(steps) or max(steps, key=seconds, default=None)


def steps_with_a_log(record: RunRecord, step: StepRecord | None) -> str:
    """What to do where `step` has no log: the command for the run that a cached step came
    from, or the names of steps with a log."""
    if step is not None and step.cached:
        origin = re.search(r"in run (\S+)", step.reason)
        if origin is not None:
            return f"rekindle logs {origin[1]} --step {step.name}"
    names = [s.name for s in record.steps if s.log and Path(s.log).is_file()]
    if not names:
        return "no step has begun yet; rekindle status"
    return f"steps with a log: {', '.join(names)}"


def request_cancel(record: RunRecord, home: Path) -> RunRecord:
    """Ask the run to stop, and return its record; one that is over is left as it is."""
    if record.status in ENDED_RUN:
        return record
    if record.platform != "local":
        platform, submission = place_of(record)
        platform.cancel(submission.id)
        return refresh_from_platform(record, home)
    pid = owner(home, record.run_id)
    if pid is None:
        raise RequestError(
            f"no process works on {record.run_id}: it was killed",
            fix=f"rekindle resume {record.run_id}",
        )
    os.kill(pid, signal.SIGINT)  # as Ctrl-C does
    return record


def resume_on_platform(record: RunRecord, home: Path) -> tuple[RunRecord, SubmittedRun]:
    """Have the platform continue a run; returns its record, and where the run is now."""
    platform, submission = place_of(record)
    resumed = submission.resumed + 1
    # a token of its own for each time, so that a retried command resumes once
    tag = RunTag(record.run_id, submission.definition, f"{submission.token}-{resumed}")
    submitted_run = platform.resume(sent_definition(record, home), submission.id, tag)
    submission = submission.model_copy(
        update={
            "id": submitted_run.id,
            "url": submitted_run.url,
            "resumed": resumed,
            "settled": False,
        }
    )
    # what the steps did before is not what they do now, least of all in another job
    steps = tuple(StepRecord(name=step.name, component=step.component) for step in record.steps)
    record = record.model_copy(
        update={
            "submission": submission,
            "steps": steps,
            "status": "running",
            "error": "",
        }
    )
    record.write(home / "runs" / record.run_id / "run.json")
    return record, submitted_run


def _with_files_at_home(record: RunRecord, home: Path) -> RunRecord:
    """The record of a run that ended, after what its steps left was copied under `home`.

    Its submission is settled unless something did not answer, which is asked for again
    later."""
    folder = home.resolve() / "runs" / record.run_id
    failed = first_failed(record.steps)
    steps: list[StepRecord] = []
    problems: list[Problem] = []
    for step in record.steps:
        is_first_failed = failed is not None and step.name == failed.name
        try:
            if step.status == "succeeded":
                step = step.model_copy(update={"artifacts": _artifacts(record, step, folder)})
            elif is_first_failed and step.log and not Path(step.log).is_file():
                step = step.model_copy(update={"log": _copy_log(record, step, folder)})
        except PlatformError as error:
            problems += error.problems
        steps.append(step)
    unread = ""
    if problems:
        unread = ". ".join(filter(None, (problems[0].what, problems[0].fix)))
        log.warning("what the steps of %s left could not be read: %s", record.run_id, unread)
    assert record.submission is not None
    update = {"settled": not problems, "unread": unread}
    submission = record.submission.model_copy(update=update)
    return record.model_copy(update={"steps": tuple(steps), "submission": submission})


def _artifacts(record: RunRecord, step: StepRecord, folder: Path) -> dict[str, ArtifactRecord]:
    """The artifacts of a step; records of ours among them are copied into `folder`."""
    platform, submission = place_of(record)
    artifacts = dict(platform.artifacts(submission.id, step))
    for name, artifact in artifacts.items():
        kind = artifact.metadata.get("record")
        if kind not in RECORD_FILES:
            continue
        record_folder = folder / "records" / slug(step.name) / slug(name)
        if _copy_record(platform.read, artifact.uri, kind, record_folder):
            update = {"kept": str(record_folder)}
            if kind == "training":  # it lies in the model's folder
                update["schema_title"] = "system.Model"
            artifacts[name] = artifact.model_copy(update=update)
    return artifacts


def _copy_record(read: Callable[[str], bytes], uri: str, kind: str, folder: Path) -> bool:
    """Copy a record; False where it is not there.

    It is a file in the artifact's folder, or the artifact itself."""
    name = RECORD_FILES[kind]
    content: bytes | None = None
    for path in (f"{uri}/{name}", uri):
        try:
            content = read(path)
        except FileNotFoundError:
            continue
        break
    if content is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    if kind == "training":
        for name_beside in (HISTORY, PROFILE):
            with contextlib.suppress(FileNotFoundError):
                (folder / name_beside).write_bytes(read(f"{uri}/{name_beside}"))
    return True


def _copy_log(record: RunRecord, step: StepRecord, folder: Path) -> str:
    """Copy the log of a step into `folder`; returns the path of the copy."""
    path = folder / "logs" / f"{slug(step.name)}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(log_of(record, step, folder))
    return str(path)
