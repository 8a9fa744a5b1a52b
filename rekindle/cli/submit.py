"""`rekindle submit CONFIG --platform P`: compiles, shows what will be made where, asks, sends it
once, and says where to look."""

from __future__ import annotations

import dataclasses
import importlib
import json
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.compile import PLATFORMS, compiled
from rekindle.cli.options import all_runs, config, overrides, shared
from rekindle.errors import PlatformError, Problem, RequestError
from rekindle.platforms.submission import TOKEN, Mark, digest_of
from rekindle.records import RunRecord, StepRecord, Submission

if TYPE_CHECKING:
    from rekindle.platforms.definition import Definition
    from rekindle.platforms.submission import Outline, Placed
    from rekindle.spec.model import Spec

# each has `lacks(place)`, `outline(definition, place, token)`, `submit(definition, place, token)`,
# and `schedule_set`, `schedule_list`, `schedule_pause`, `schedule_delete`
CLIENTS = {
    "azureml": "rekindle.platforms.azureml.client",
    "kubeflow": "rekindle.platforms.kubeflow.client",
    "sagemaker": "rekindle.platforms.sagemaker.client",
    "vertex": "rekindle.platforms.vertex.client",
}

_NOTHING: Mapping[str, Any] = {}

platform = click.option(
    "--platform", type=click.Choice(list(PLATFORMS)), required=True, help="Where it shall run.",
)  # fmt: skip
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


wait = click.option("--wait", is_flag=True,
                    help="Stay until the run is over, and end as it does.")  # fmt: skip


@click.command("submit")
@config
@overrides
@platform
@yes
@wait
@click.option("--token", default=None, metavar="TEXT",
              help="Says that it is the same submission: with the same config and token nothing is "
              "sent twice. Default: the one that was cut off, or a new one.")  # fmt: skip
@shared
def command(
    config: Path,
    overrides: tuple[str, ...],
    platform: str,
    yes: bool,
    wait: bool,
    token: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Compile CONFIG, show what the platform will get, ask, and have the platform run it."""
    from rekindle.spec.load import load_target

    if token is not None and not TOKEN.fullmatch(token):
        raise RequestError(
            f"`{token}` is no token", where="--token", fix="up to 63 of a-z, 0-9, - and _"
        )
    client = client_of(platform)
    spec = load_target(config, overrides)
    definition = ready(client, platform, spec)
    place, digest = getattr(spec.platforms, platform), digest_of(definition.files)
    record = begun(home, platform, digest, token) or _new(spec, platform, digest, token)
    assert record.submission is not None
    outline = client.outline(definition, place, record.submission.token)
    show(outline, outline.id)
    agree(yes, "Submit it?")
    record, placed = sent(record, client, definition, place, outline, home)
    steps = [dataclasses.asdict(step) for step in outline.steps]
    return told(record, placed, home, wait, as_json, {"where": outline.where, "steps": steps})


def sent(
    record: RunRecord, client: Any, definition: Definition, place: Any, outline: Outline, home: Path
) -> tuple[RunRecord, Placed]:
    """The record of the submission, which is on the platform now, and where. What is cut off on
    the way there is gone on with by the same call."""
    from rekindle.cli.remote import keep_definition

    submission = record.submission
    assert submission is not None
    steps = record.steps or tuple(StepRecord(name=planned.step) for planned in outline.steps)
    record = record.model_copy(update={"steps": steps})
    path = home / "runs" / record.run_id / "run.json"
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


def told(
    record: RunRecord,
    placed: Placed,
    home: Path,
    wait: bool,
    as_json: bool,
    more: Mapping[str, Any] = _NOTHING,
) -> int:
    """Say where the run is and what to do next, or stay until it is over: the exit code."""
    submission = record.submission
    assert submission is not None
    if wait:
        return _waited(record, home, as_json)
    if as_json:
        document = {
            "schema_version": 1, "run_id": record.run_id, "platform": record.platform,
            "token": submission.token, **dataclasses.asdict(placed), **more,
        }  # fmt: skip
        print(json.dumps(document))
        return 0
    verb = "submitted" if placed.anew else "submitted before"
    click.echo(f"{'goes on' if submission.resumed else verb}: {placed.id}\n{placed.url}")
    for next_one in ("status", "logs -f", "cancel"):
        click.echo(f"next: rekindle {next_one} {record.run_id}")
    return 0


def _waited(record: RunRecord, home: Path, as_json: bool) -> int:
    from rekindle.cli.job import summary
    from rekindle.cli.progress import Progress
    from rekindle.cli.remote import exit_code, waited_for
    from rekindle.cli.run import conclude

    with Progress() as progress:
        progress.changed(record)
        record = waited_for(record, home, progress.changed)
    result = summary(record, home)
    if as_json:
        print(result.model_dump_json())
    else:
        conclude(record, result)
        if record.error:
            click.echo(f"{record.error}\nnext: rekindle logs {record.run_id}", err=True)
    return exit_code(record)


def begun(home: Path, platform: str, definition: str, token: str | None) -> RunRecord | None:
    """The submission that this goes on with: the one with the same token, or without a token the
    newest of the same definition that nobody knows to have arrived."""
    for record in reversed(all_runs(home)):
        sent = record.submission
        if sent is None or (record.platform, sent.definition) != (platform, definition):
            continue
        if sent.token == token or (token is None and not sent.id):
            return record
    return None


def _new(spec: Spec, platform: str, definition: str, token: str | None) -> RunRecord:
    from rekindle.cli.job import new_record

    sent = Submission(definition=definition, token=token or secrets.token_hex(8))
    fresh = new_record(spec, (), platform)
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
        problems += error.problems
    if problems:
        raise RequestError(dict.fromkeys(problems))
    return definition


def show(outline: Outline, what: str) -> None:
    """What will be made, for whoever decides."""
    click.echo(f"{what} in {outline.where}, {len(outline.steps)} steps:", err=True)
    width = max((len(planned.step) for planned in outline.steps), default=0)
    for planned in outline.steps:
        spot = " (spot)" if planned.spot else ""
        machine = f"{planned.machines} x {planned.machine}{spot}"
        click.echo(f"  {planned.step:<{width}}  {machine}", err=True)


def agree(yes: bool, question: str) -> None:
    """Go on if whoever sits there says so; RequestError if not, or if nobody does."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RequestError(
            "nobody is here to be asked, and nothing was sent", where="--yes",
            fix="say it with --yes",
        )  # fmt: skip
    if not click.confirm(question, err=True):
        raise RequestError("nothing was sent", fix="answer y, or say it with --yes")
