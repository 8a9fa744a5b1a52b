"""A submission: compiled, agreed to, recorded, and sent once, however often retried.

The record is written before anything is sent, so that the same command continues an
interrupted submission."""

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path

from rekindle.app.prepared import PreparedSubmission
from rekindle.app.runs import DEFINITION, new_record, newest_first, numbered
from rekindle.errors import PlatformError, RequestError
from rekindle.outputs import Planned
from rekindle.platforms import submission as naming
from rekindle.platforms.api import ConfiguredPlatform
from rekindle.platforms.local.store import make_home
from rekindle.platforms.submission import (
    Definition,
    RunTag,
    SubmissionPreview,
    SubmittedRun,
)
from rekindle.records import RunRecord, StepRecord, Submission

Consent = Callable[[SubmissionPreview, Planned | None], None]


def submit_prepared(
    prepared: PreparedSubmission,
    home: Path,
    token: str | None,
    consent: Consent,
    because: str = "",
) -> tuple[RunRecord, SubmittedRun, SubmissionPreview]:
    """Submit a prepared config once; returns its record, where it runs, and the preview.

    `consent` is called with the preview, and with the plan if there is one, before
    anything is written or sent, and may raise."""
    if token is not None and not naming.TOKEN.fullmatch(token):
        fix = "up to 63 of a-z, 0-9, - and _"
        raise RequestError(f"`{token}` is not a token", where="--token", fix=fix)
    target = prepared.platform
    platform = target.name
    definition = prepared.definition
    plan = prepared.plan
    digest = naming.digest_of(definition.files)
    record = begun(home, platform, digest, token)
    if record is None:
        submission = Submission(definition=digest, token=token or secrets.token_hex(8))
        record = numbered(new_record(prepared.spec, (), platform, plan), home)
        update = {"status": "submitting", "submission": submission, "because": because}
        record = record.model_copy(update=update)
    assert record.submission is not None
    preview = prepared.preview(record.submission.token)
    consent(preview, plan)
    prepared.refuse_early()
    if not record.steps:
        record = _with_steps(record, preview)
    record, submitted_run = _send(record, target, definition, home)
    return record, submitted_run, preview


def begun(home: Path, platform: str, definition: str, token: str | None) -> RunRecord | None:
    """The submission to continue: the one with this token, or the newest that may not
    have arrived; None where there is none."""
    for record in newest_first(home):
        submission = record.submission
        if submission is None or record.platform != platform:
            continue
        if submission.definition != definition:
            continue
        # a call may take effect and its answer be lost: such a submission has no id
        if submission.token == token or (token is None and not submission.id):
            return record
    return None


def _with_steps(record: RunRecord, preview: SubmissionPreview) -> RunRecord:
    """The record with the steps that are to run, and their machines."""
    assert record.submission is not None
    submission = record.submission.model_copy(
        update={
            "machines": {step.step: (step.machine, step.machines) for step in preview.steps},
            "spot": tuple(step.step for step in preview.steps if step.spot),
        }
    )
    steps = tuple(StepRecord(name=step.step) for step in preview.steps)
    return record.model_copy(update={"steps": steps, "submission": submission})


def _send(
    record: RunRecord, target: ConfiguredPlatform, definition: Definition, home: Path
) -> tuple[RunRecord, SubmittedRun]:
    """Send a submission; returns its record, and where it is on the platform."""
    submission = record.submission
    assert submission is not None
    path = home / "runs" / record.run_id / "run.json"
    make_home(home)
    naming.write_files(path.with_name(DEFINITION), definition.files)
    record.write(path)  # before anything is sent: what is cut off here is found again
    tag = RunTag(record.run_id, submission.definition, submission.token)
    try:
        submitted_run = target.submit(definition, tag)
    except PlatformError as error:
        record.model_copy(update={"error": str(error.problems[0].what)}).write(path)
        continues = "; the same command goes on with this submission"
        problems = [dataclasses.replace(p, fix=p.fix + continues) for p in error.problems]
        raise type(error)(problems) from error
    submission = submission.model_copy(update={"id": submitted_run.id, "url": submitted_run.url})
    status = "running" if record.status == "submitting" else record.status
    record = record.model_copy(update={"submission": submission, "status": status, "error": ""})
    record.write(path)
    return record, submitted_run
