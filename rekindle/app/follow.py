"""Runs after they began: asked for where they are, followed to their end, cancelled, resumed, and
what is brought home then: records of their steps, the log of the one that failed, the card.

A platform is asked again and again while a run goes on; that it does not answer for a while does
not end the waiting."""

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
from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.masking import Masked, masked
from rekindle.platforms.local.store import owner, slug
from rekindle.platforms.platform import Platform
from rekindle.platforms.snapshot import ENDED_RUN, first_failed, merged
from rekindle.platforms.submission import RunTag, SubmittedRun
from rekindle.records import RECORD_FILES, ArtifactRecord, RunRecord, StepRecord, Submission
from rekindle.report.collect import HISTORY, PROFILE
from rekindle.spec.platforms import PlatformsSpec

log = logging.getLogger(__name__)

PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
PATIENCE_SECONDS = 6 * 3600.0  # with a platform that does not answer at all


def place_of(record: RunRecord) -> tuple[Platform, Submission]:
    """The record's platform, and the submission there; RequestError before that is confirmed."""
    sent = record.submission
    if sent is None or not sent.id:
        what = f"the submission of {record.run_id} was interrupted before"
        fix = f"rerun the command to continue it: {record.command}"
        raise RequestError(f"{what} {record.platform} confirmed it", fix=fix)
    sections = PlatformsSpec.model_validate(record.spec["platforms"])
    return Platform.of(record.platform, sections), sent


def refresh_from_platform(record: RunRecord, home: Path) -> RunRecord:
    """The record as its platform, if any, knows the run now, kept under `home` if it changed."""
    if record.submission is None or not record.submission.id or record.submission.settled:
        return record
    there, sent = place_of(record)
    now = record
    if record.status not in ENDED_RUN:
        now = merged(record, there.describe(sent.id), datetime.datetime.now(datetime.UTC))
        # a platform repeats what a step said last
        steps = tuple(step.model_copy(update={"error": masked(step.error)}) for step in now.steps)
        now = now.model_copy(update={"steps": steps, "error": masked(now.error)})
    if now.status in ENDED_RUN:
        now = _brought_home(now, home)
    if now != record:
        now.write(home / "runs" / now.run_id / "run.json")
    if now.status in ENDED_RUN:
        write_card(home, now.run_id)
        if record.status not in ENDED_RUN:
            tell_of(now)
            push(now, home)
    return now


def wait_until_ended(
    record: RunRecord, home: Path, on_change: Callable[[RunRecord], None]
) -> RunRecord:
    """The record of the run when it is over; UnreachableError after hours without an answer."""
    pause, silent_since = PAUSE_SECONDS, None
    while record.status not in ENDED_RUN:
        try:
            record = refresh_from_platform(record, home)
        except UnreachableError as error:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise
            log.warning("%s does not answer, and is asked again: %s", record.platform, error)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)
        else:
            pause, silent_since = PAUSE_SECONDS, None
            on_change(record)
        if record.status not in ENDED_RUN:
            time.sleep(pause)
    return record


def log_of(record: RunRecord, step: StepRecord, home: Path, follow: bool = False) -> Iterator[str]:
    """What the step printed, in pieces, without secrets; with `follow` until it ends."""
    there, sent = place_of(record)
    cursor, over, shown = "", not follow, Masked()
    while True:
        piece = there.read_log(sent.id, step, cursor)
        cursor = piece.cursor
        if piece.text:
            yield shown.feed(piece.text.encode()).decode()
        if over:
            yield shown.rest().decode()
            return
        record = refresh_from_platform(record, home)
        step = record.step(step.name)
        over = step.status not in ("pending", "running")
        if not over:
            time.sleep(PAUSE_SECONDS)


def step_with_log(record: RunRecord, wanted: str | None) -> StepRecord:
    """The step called `wanted`, or the one to look at; RequestError where that printed nothing."""
    ran = [one for one in record.steps if one.log]

    def longest(step: StepRecord) -> float:
        return math.inf if step.status == "running" else step.seconds or 0.0

    try:
        found = record.step(wanted) if wanted else first_failed(ran) or max(ran, key=longest)
    except (KeyError, ValueError):
        found = None
    if found is None or not found.log:
        which = f"a step `{wanted}`" if wanted else "any step"
        what = f"the run {record.run_id} has no log of {which}"
        raise RequestError(what, fix=steps_with_a_log(record, found))
    return found


def steps_with_a_log(record: RunRecord, wanted: StepRecord | None) -> str:
    """Their names, for who looks for a log; or the run that has that of a cached step."""
    if wanted is not None and wanted.cached and (of := re.search(r"in run (\S+)", wanted.reason)):
        return f"rekindle logs {of[1]} --step {wanted.name}"
    names = ", ".join(one.name for one in record.steps if one.log and Path(one.log).is_file())
    return f"steps with a log: {names}" if names else "no step has begun yet; rekindle status"


def request_cancel(record: RunRecord, home: Path) -> RunRecord:
    """The record of a run that was told to stop."""
    if record.status in ENDED_RUN:
        return record
    if record.platform != "local":
        there, sent = place_of(record)
        there.cancel(sent.id)
        return refresh_from_platform(record, home)
    pid = owner(home, record.run_id)
    if pid is None:
        what = f"no process works on {record.run_id}: it was killed"
        raise RequestError(what, fix=f"rekindle resume {record.run_id}")
    os.kill(pid, signal.SIGINT)  # as Ctrl-C does
    return record


def resume_on_platform(record: RunRecord, home: Path) -> tuple[RunRecord, SubmittedRun]:
    """The record of a run that its platform goes on with, and where that is."""
    there, sent = place_of(record)
    mark = RunTag(record.run_id, sent.definition, f"{sent.token}-{sent.resumed + 1}")
    placed = there.resume(sent_definition(record, home), sent.id, mark)
    update = {"id": placed.id, "url": placed.url, "resumed": sent.resumed + 1, "settled": False}
    # what the steps did before is not what they do now, least of all in another job
    steps = tuple(StepRecord(name=step.name, component=step.component) for step in record.steps)
    update = {"submission": sent.model_copy(update=update), "steps": steps}
    record = record.model_copy(update={**update, "status": "running", "error": ""})
    record.write(home / "runs" / record.run_id / "run.json")
    return record, placed


def _brought_home(record: RunRecord, home: Path) -> RunRecord:
    """With what steps left in files under `home`; what does not answer now is asked for later."""
    folder, settled, steps = home.resolve() / "runs" / record.run_id, True, list[StepRecord]()
    failed = first_failed(record.steps)
    for step in record.steps:
        try:
            if step.status == "succeeded":
                step = step.model_copy(update={"artifacts": _artifacts(record, step, folder)})
            elif failed and step.name == failed.name and step.log and not Path(step.log).is_file():
                step = step.model_copy(update={"log": _kept_log(record, step, folder)})
        except PlatformError as error:
            settled = False
            log.warning("what `%s` left could not be read: %s", step.name, error)
        steps.append(step)
    assert record.submission is not None
    submission = record.submission.model_copy(update={"settled": settled})
    return record.model_copy(update={"steps": tuple(steps), "submission": submission})


def _artifacts(record: RunRecord, step: StepRecord, folder: Path) -> dict[str, ArtifactRecord]:
    there, sent = place_of(record)
    found = dict(there.artifacts(sent.id, step))
    for name, artifact in found.items():
        kind = artifact.metadata.get("record")
        if kind in RECORD_FILES:
            kept = folder / "records" / slug(step.name) / slug(name)
            if _copied(there.read, artifact.uri, kind, kept):
                model = {"schema_title": "system.Model"} if kind == "training" else {}
                found[name] = artifact.model_copy(update={"kept": str(kept), **model})
    return found


def _copied(read: Callable[[str], bytes], uri: str, kind: str, folder: Path) -> bool:
    """Whether the record is there; a file in the artifact's folder, or the artifact."""
    name = RECORD_FILES[kind]
    for place in (f"{uri}/{name}", uri):
        with contextlib.suppress(FileNotFoundError):
            content = read(place)
            break
    else:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    for beside in (HISTORY, PROFILE) if kind == "training" else ():
        with contextlib.suppress(FileNotFoundError):
            (folder / beside).write_bytes(read(f"{uri}/{beside}"))
    return True


def _kept_log(record: RunRecord, step: StepRecord, folder: Path) -> str:
    path = folder / "logs" / f"{slug(step.name)}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(log_of(record, step, folder))
    return str(path)
