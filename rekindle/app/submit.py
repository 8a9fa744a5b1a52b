"""A submission: compiled, agreed to, recorded, and sent once, however often it is retried.

The record is written before anything is sent, so that the same command continues an interrupted
submission."""

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path

from rekindle.app.plan import on_machines, planned
from rekindle.app.preflight import compile_for, refuse_early
from rekindle.app.runs import DEFINITION, new_record, newest_first, numbered
from rekindle.errors import PlatformError, RequestError
from rekindle.outputs import Planned
from rekindle.platforms import submission as naming
from rekindle.platforms.local.store import make_home
from rekindle.platforms.platform import Platform
from rekindle.platforms.submission import Definition, RunTag, SubmissionPreview, SubmittedRun
from rekindle.records import RunRecord, StepRecord, Submission
from rekindle.spec.model import Spec

Consent = Callable[[SubmissionPreview, Planned | None], None]


def submit_spec(
    spec: Spec, platform: str, home: Path, token: str | None, consent: Consent, because: str = ""
) -> tuple[RunRecord, SubmittedRun, SubmissionPreview]:
    """The record of the run, which is on the platform now, where it is, and what was made.
    `consent` is called with that, and with the plan if there is one, before anything is written or
    sent, and may raise."""
    if token is not None and not naming.TOKEN.fullmatch(token):
        fix = "up to 63 of a-z, 0-9, - and _"
        raise RequestError(f"`{token}` is not a token", where="--token", fix=fix)
    there, spec = Platform.of(platform, spec.platforms), on_machines(spec, platform, home)
    definition = compile_for(platform, spec)
    figures, digest = planned(spec, platform, home), naming.digest_of(definition.files)
    record = begun(home, platform, digest, token)
    if record is None:
        sent = Submission(definition=digest, token=token or secrets.token_hex(8))
        record = numbered(new_record(spec, (), platform, figures), home)
        update = {"status": "submitting", "submission": sent, "because": because}
        record = record.model_copy(update=update)
    assert record.submission is not None
    outline = there.outline(definition, record.submission.token)
    consent(outline, figures)
    refuse_early(there, definition)
    if not record.steps:
        steps = tuple(StepRecord(name=step.step) for step in outline.steps)
        machines = {step.step: (step.machine, step.machines) for step in outline.steps}
        spot = tuple(step.step for step in outline.steps if step.spot)
        sent = record.submission.model_copy(update={"machines": machines, "spot": spot})
        record = record.model_copy(update={"steps": steps, "submission": sent})
    record, placed = _sent(record, there, definition, home)
    return record, placed, outline


def begun(home: Path, platform: str, definition: str, token: str | None) -> RunRecord | None:
    """The submission to go on with: by its token, or the newest that may not have arrived."""
    for record in newest_first(home):
        sent = record.submission
        if sent is None or (record.platform, sent.definition) != (platform, definition):
            continue
        if sent.token == token or (token is None and not sent.id):
            return record
    return None


def _sent(
    record: RunRecord, there: Platform, definition: Definition, home: Path
) -> tuple[RunRecord, SubmittedRun]:
    """The record of the submission, which is on the platform now, and where."""
    submission = record.submission
    assert submission is not None
    path = home / "runs" / record.run_id / "run.json"
    make_home(home)
    naming.write_files(path.with_name(DEFINITION), definition.files)
    record.write(path)  # before anything is sent: what is cut off here is found again
    mark = RunTag(record.run_id, submission.definition, submission.token)
    try:
        placed = there.submit(definition, mark)
    except PlatformError as error:
        record.model_copy(update={"error": str(error.problems[0].what)}).write(path)
        again = "; the same command goes on with this submission"
        problems = [dataclasses.replace(p, fix=p.fix + again) for p in error.problems]
        raise type(error)(problems) from error
    submission = submission.model_copy(update={"id": placed.id, "url": placed.url})
    status = "running" if record.status == "submitting" else record.status
    record = record.model_copy(update={"submission": submission, "status": status, "error": ""})
    record.write(path)
    return record, placed
