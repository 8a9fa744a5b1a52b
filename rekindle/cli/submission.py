"""A submission: compiled, agreed to, left on record, and sent once, however often that is said.

What the verbs and the notebook share. A record is written before anything is sent, so that what is
cut off on the way is found and gone on with."""

from __future__ import annotations

import dataclasses
import importlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.cli.compile import compiled
from rekindle.cli.doctor import refuse_early
from rekindle.cli.options import newest_first, numbered
from rekindle.cli.planning import on_machines, planned
from rekindle.cli.remote import keep_definition
from rekindle.errors import PlatformError, Problem, RequestError
from rekindle.platforms.local.store import make_home
from rekindle.platforms.submission import TOKEN, Mark, digest_of
from rekindle.records import RunRecord, StepRecord, Submission

if TYPE_CHECKING:
    from rekindle.answers import Planned
    from rekindle.platforms.definition import Definition
    from rekindle.platforms.submission import Outline, Placed
    from rekindle.spec.model import Spec

# each has `lacks(place)`, `outline(definition, place, token)`, `submit(definition, place, mark)`
CLIENTS = {
    "azureml": "rekindle.platforms.azureml.client",
    "kubeflow": "rekindle.platforms.kubeflow.client",
    "sagemaker": "rekindle.platforms.sagemaker.client",
    "vertex": "rekindle.platforms.vertex.client",
}


Consent = Callable[["Outline", "Planned | None"], None]


def submitted(
    spec: Spec, platform: str, home: Path, token: str | None, consent: Consent
) -> tuple[RunRecord, Placed, Outline]:
    """The record of the run, which is on the platform now, where it is, and what was made.
    `consent` is called with that, and with the plan if there is one, before anything is written or
    sent, and may raise."""
    if token is not None and not TOKEN.fullmatch(token):
        raise RequestError(
            f"`{token}` is no token", where="--token", fix="up to 63 of a-z, 0-9, - and _"
        )
    client, spec = client_of(platform), on_machines(spec, platform, home)
    definition = ready(client, platform, spec)
    figures = planned(spec, platform, home)
    place, digest = getattr(spec.platforms, platform), digest_of(definition.files)
    record = begun(home, platform, digest, token) or _new(
        spec, platform, digest, token, figures, home
    )
    assert record.submission is not None
    outline: Outline = client.outline(definition, place, record.submission.token)
    consent(outline, figures)
    refuse_early(platform, place, definition)
    if not record.steps:
        steps = tuple(StepRecord(name=step.step) for step in outline.steps)
        machines = {step.step: (step.machine, step.machines) for step in outline.steps}
        sent = record.submission.model_copy(update={"machines": machines})
        record = record.model_copy(update={"steps": steps, "submission": sent})
    record, placed = _sent(record, client, definition, place, home)
    return record, placed, outline


def begun(home: Path, platform: str, definition: str, token: str | None) -> RunRecord | None:
    """The submission that this goes on with: the one with the same token, or without a token the
    newest of the same definition that nobody knows to have arrived."""
    for record in newest_first(home):
        sent = record.submission
        if sent is None or (record.platform, sent.definition) != (platform, definition):
            continue
        if sent.token == token or (token is None and not sent.id):
            return record
    return None


def _new(
    spec: Spec, platform: str, definition: str, token: str | None, figures: Planned | None,
    home: Path,
) -> RunRecord:  # fmt: skip
    from rekindle.cli.job import new_record

    sent = Submission(definition=definition, token=token or secrets.token_hex(8))
    fresh = numbered(new_record(spec, (), platform, figures), home)
    return fresh.model_copy(update={"status": "submitting", "submission": sent})


def client_of(platform: str) -> Any:
    """The module that speaks to the platform."""
    return importlib.import_module(CLIENTS[platform])


def ready(client: Any, platform: str, spec: Spec) -> Definition:
    """The definition; RequestError with everything that is wrong with it or not said."""
    from rekindle.cli.job import graph_of

    problems: list[Problem] = list(client.lacks(getattr(spec.platforms, platform)))
    try:
        definition = compiled(platform, spec, *graph_of(spec))
    except RequestError as error:
        named = {(problem.what, problem.where) for problem in error.problems}
        problems = [one for one in problems if (one.what, one.where) not in named]
        problems += error.problems
    if problems:
        raise RequestError(dict.fromkeys(problems))
    return definition


def _sent(
    record: RunRecord, client: Any, definition: Definition, place: Any, home: Path
) -> tuple[RunRecord, Placed]:
    """The record of the submission, which is on the platform now, and where. What is cut off on
    the way there is gone on with by the same call."""
    submission = record.submission
    assert submission is not None
    path = home / "runs" / record.run_id / "run.json"
    make_home(home)
    keep_definition(record, definition, home)
    record.write(path)  # before anything is sent: what is cut off here is found again
    mark = Mark(record.run_id, submission.definition, submission.token)
    try:
        placed: Placed = client.submit(definition, place, mark)
    except PlatformError as error:
        record.model_copy(update={"error": str(error.problems[0].what)}).write(path)
        again = "; the same command goes on with this submission"
        raise type(error)(
            [dataclasses.replace(p, fix=p.fix + again) for p in error.problems]
        ) from error
    submission = submission.model_copy(update={"id": placed.id, "url": placed.url})
    status = "running" if record.status == "submitting" else record.status
    update = {"submission": submission, "status": status, "error": ""}
    record = record.model_copy(update=update)
    record.write(path)
    return record, placed
