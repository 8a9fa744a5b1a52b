"""Runs on platforms, as the verbs meet them: where they are asked for, how one is followed to its
end, and what is brought home then: records of its steps, the log of the one that failed, the card.

A platform is asked again and again while a run goes on; that it does not answer for a while does
not end the waiting."""

from __future__ import annotations

import datetime
import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle.errors import PlatformError, RequestError, UnreachableError
from rekindle.masking import Masked, masked
from rekindle.platforms.definition import Definition
from rekindle.platforms.local.store import Store, slug
from rekindle.platforms.submission import Mark, Placed
from rekindle.platforms.watch import OVER, first_failed, followed
from rekindle.records import (
    RECORD_FILES,
    RECORD_KINDS,
    ArtifactRecord,
    RunRecord,
    StepRecord,
    Submission,
)
from rekindle.report.collect import HISTORY, PROFILE
from rekindle.spec.places import PlatformsSpec

if TYPE_CHECKING:
    from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

WATCHES = {
    "azureml": "rekindle.platforms.azureml.watch",
    "kubeflow": "rekindle.platforms.kubeflow.watch",
    "sagemaker": "rekindle.platforms.sagemaker.watch",
    "vertex": "rekindle.platforms.vertex.watch",
}
DEFINITION = "definition"  # folder of a run with what was submitted
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 5.0, 60.0
PATIENCE_SECONDS = 6 * 3600.0  # with a platform that does not answer at all


def watch_of(record: RunRecord) -> tuple[Any, Any, Submission]:
    """The module that asks the record's platform, its settings, and the submission; RequestError
    for a run that the platform may know nothing of."""
    sent = record.submission
    if sent is None or not sent.id:
        raise RequestError(
            f"nobody knows whether {record.run_id} arrived on {record.platform}",
            fix=f"say it again, it goes on with this one: {record.command}",
        )
    places = PlatformsSpec.model_validate(record.spec["platforms"])
    module = importlib.import_module(WATCHES[record.platform])
    return module, getattr(places, record.platform), sent


def asked(record: RunRecord, home: Path) -> RunRecord:
    """The record as the platform knows the run now, kept under `home`; one that is over and all
    brought home is not asked for again."""
    if record.submission is None or not record.submission.id or record.submission.settled:
        return record
    watch, place, sent = watch_of(record)
    now = record
    if record.status not in OVER:
        look = watch.look(place, sent.id)
        now = _without_secrets(followed(record, look, datetime.datetime.now(datetime.UTC)))
    if now.status in OVER:
        now = _brought_home(now, home)
    if now != record:
        now.write(home / "runs" / now.run_id / "run.json")
    if now.status in OVER:
        from rekindle.cli.job import write_card

        write_card(home, now.run_id)
    return now


def waited_for(record: RunRecord, home: Path, on_change: Callable[[RunRecord], None]) -> RunRecord:
    """The record of the run when it is over; UnreachableError when its platform has not answered
    for hours."""
    pause, silent_since = PAUSE_SECONDS, None
    while record.status not in OVER:
        try:
            record = asked(record, home)
        except UnreachableError as error:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_SECONDS:
                raise
            log.warning("%s does not answer, and is asked again: %s", record.platform, error)
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)
        else:
            pause, silent_since = PAUSE_SECONDS, None
            on_change(record)
        if record.status not in OVER:
            time.sleep(pause)
    return record


def log_of(record: RunRecord, step: StepRecord, home: Path, follow: bool = False) -> Iterator[str]:
    """What the step printed, in pieces; with `follow` until it ends. What is secret here is masked:
    platforms keep what steps print."""
    watch, place, sent = watch_of(record)
    cursor, over, shown = "", not follow, Masked()
    while True:
        piece = watch.read_log(place, sent.id, step, cursor)
        cursor = piece.cursor
        if piece.text:
            yield shown.feed(piece.text.encode()).decode()
        if over:
            yield shown.rest().decode()
            return
        record = asked(record, home)
        step = record.step(step.name)
        over = step.status not in ("pending", "running")
        if not over:
            time.sleep(PAUSE_SECONDS)


def _without_secrets(record: RunRecord) -> RunRecord:
    """A platform repeats what a step said last."""
    steps = tuple(
        step.model_copy(update={"error": masked(step.error)}) if step.error else step
        for step in record.steps
    )
    return record.model_copy(update={"steps": steps, "error": masked(record.error)})


def exit_code(record: RunRecord) -> int:
    """That of a run here which ended like this."""
    return {"succeeded": 0, "preempted": 75, "cancelled": 130}.get(record.status, 1)


def _brought_home(record: RunRecord, home: Path) -> RunRecord:
    """With records of steps and the log of the first that failed in files under `home`; what does
    not answer now is asked for again by the next look."""
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
    watch, place, sent = watch_of(record)
    found = dict(watch.artifacts(place, sent.id, step))
    for name, artifact in found.items():
        kind = artifact.metadata.get("record")
        if kind in RECORD_KINDS:
            kept = folder / "records" / slug(step.name) / slug(name)
            if _copied(functools.partial(watch.read, place), artifact.uri, kind, kept):
                model = {"schema_title": "system.Model"} if kind == "training" else {}
                found[name] = artifact.model_copy(update={"kept": str(kept), **model})
    return found


def _copied(read: Callable[[str], bytes], uri: str, kind: str, folder: Path) -> bool:
    """Whether the record is there; a file in the artifact's folder, or the artifact."""
    name, content = RECORD_FILES[kind], None
    for place in (f"{uri}/{name}", uri):
        try:
            content = read(place)
            break
        except FileNotFoundError:
            continue
    if content is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    for beside in (HISTORY, PROFILE) if kind == "training" else ():
        try:
            (folder / beside).write_bytes(read(f"{uri}/{beside}"))
        except FileNotFoundError:
            continue
    return True


def _kept_log(record: RunRecord, step: StepRecord, folder: Path) -> str:
    path = folder / "logs" / f"{slug(step.name)}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(log_of(record, step, folder))
    return str(path)


def resumed(record: RunRecord, home: Path) -> tuple[RunRecord, Placed]:
    """The record of a run that its platform goes on with, and where that is."""
    watch, place, sent = watch_of(record)
    mark = Mark(record.run_id, sent.definition, f"{sent.token}-{sent.resumed + 1}")
    placed: Placed = watch.resume(sent_definition(record, home), place, sent.id, mark)
    update = {"id": placed.id, "url": placed.url, "resumed": sent.resumed + 1, "settled": False}
    # what the steps did before is not what they do now, least of all in another job
    steps = tuple(StepRecord(name=step.name, component=step.component) for step in record.steps)
    submission = sent.model_copy(update=update)
    record = record.model_copy(
        update={"submission": submission, "status": "running", "error": "", "steps": steps}
    )
    record.write(home / "runs" / record.run_id / "run.json")
    return record, placed


def sent_definition(record: RunRecord, home: Path) -> Definition:
    """What was submitted, from the run's folder; RequestError where that is lost."""
    folder = home / "runs" / record.run_id / DEFINITION
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    if not files:
        raise RequestError(
            f"what was submitted as {record.run_id} is not in {folder}",
            fix=f"submit it anew: {record.command}",
        )
    return Definition(files)


def keep_definition(record: RunRecord, definition: Definition, home: Path) -> None:
    """Leave what is about to be submitted in the run's folder."""
    folder = home / "runs" / record.run_id / DEFINITION
    for name, content in definition.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def recovered(spec: Spec, platform: str, home: Path) -> list[str]:
    """Ids of the runs of `spec` on the platform that have a record under `home` only now. They are
    known by their marks; their settings are taken to be those of `spec` as it is."""
    from rekindle.cli.job import new_record
    from rekindle.cli.planning import on_machines
    from rekindle.cli.submission import client_of, ready

    module = importlib.import_module(WATCHES[platform])
    spec = on_machines(spec, platform, home)
    definition = ready(client_of(platform), platform, spec)
    anew = list[str]()
    for found in module.found(definition, getattr(spec.platforms, platform)):
        path = Store(home).run(found.mark.run_id) / "run.json"
        if path.exists():
            continue
        mark, placed = found.mark, found.placed
        update = {
            "run_id": mark.run_id, "started_at": found.began_at.isoformat(timespec="seconds"),
            "home": str(home.absolute()),
            "submission": Submission(
                definition=mark.definition, token=mark.token, id=placed.id, url=placed.url
            ),
        }  # fmt: skip
        record = new_record(spec, (), platform).model_copy(update=update)
        record.write(path)
        try:
            asked(record, home)
        except UnreachableError as error:
            log.warning("%s is known by its name only: %s", mark.run_id, error)
        anew.append(mark.run_id)
    return anew
