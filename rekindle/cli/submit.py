"""`rekindle submit CONFIG --platform P`: compiles, shows what will be made where, asks, sends it
once, and says where to look."""

from __future__ import annotations

import dataclasses
import importlib
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.cli.compile import PLATFORMS, compiled
from rekindle.cli.doctor import refuse_early
from rekindle.cli.options import all_runs, config, overrides, shared
from rekindle.errors import PlatformError, Problem, RequestError
from rekindle.platforms.submission import digest_of
from rekindle.records import RunRecord, Submission

if TYPE_CHECKING:
    from rekindle.platforms.definition import Definition
    from rekindle.platforms.submission import Outline
    from rekindle.spec.model import Spec

# each has `lacks(place)`, `outline(definition, place, token)`, `submit(definition, place, token)`,
# and `schedule_set`, `schedule_list`, `schedule_pause`, `schedule_delete`
CLIENTS = {
    "azureml": "rekindle.platforms.azureml.client",
    "kubeflow": "rekindle.platforms.kubeflow.client",
    "sagemaker": "rekindle.platforms.sagemaker.client",
    "vertex": "rekindle.platforms.vertex.client",
}

platform = click.option(
    "--platform", type=click.Choice(list(PLATFORMS)), required=True, help="Where it shall run.",
)  # fmt: skip
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@click.command("submit")
@config
@overrides
@platform
@yes
@click.option("--token", default=None, metavar="TEXT",
              help="Says that it is the same submission: with the same config and token nothing is "
              "sent twice. Default: the one that was cut off, or a new one.")  # fmt: skip
@shared
def command(
    config: Path,
    overrides: tuple[str, ...],
    platform: str,
    yes: bool,
    token: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Compile CONFIG, show what the platform will get, ask, and have the platform run it."""
    from rekindle.spec.load import load_target

    client = client_of(platform)
    spec = load_target(config, overrides)
    definition = ready(client, platform, spec)
    place, digest = getattr(spec.platforms, platform), digest_of(definition.files)
    record = begun(home, platform, digest, token) or _new(spec, platform, digest, token)
    sent = record.submission
    assert sent is not None
    outline = client.outline(definition, place, sent.token)
    show(outline, outline.id)
    agree(yes, "Submit it?")
    refuse_early(platform, place, definition)
    path = home / "runs" / record.run_id / "run.json"
    record.write(path)  # before anything is sent: what is cut off here is found again
    try:
        placed = client.submit(definition, place, sent.token)
    except PlatformError as error:
        record.model_copy(update={"error": str(error.problems[0].what)}).write(path)
        again = "; the same command goes on with this submission"
        raise PlatformError(
            [dataclasses.replace(p, fix=p.fix + again) for p in error.problems]
        ) from error
    sent = sent.model_copy(update={"id": placed.id, "url": placed.url})
    status = "running" if record.status == "submitting" else record.status
    update = {"submission": sent, "status": status, "error": ""}
    record.model_copy(update=update).write(path)
    if as_json:
        document = {
            "schema_version": 1, "run_id": record.run_id, "platform": platform,
            "where": outline.where, "token": sent.token, **dataclasses.asdict(placed),
            "steps": [dataclasses.asdict(step) for step in outline.steps],
        }  # fmt: skip
        print(json.dumps(document))
    else:
        click.echo(f"{'submitted' if placed.anew else 'submitted before'}: {placed.id}")
        click.echo(placed.url)
        click.echo(f"next: rekindle status {record.run_id}")
    return 0


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
