"""Finds runs of a config on a platform that have no record under a home."""

import logging
from pathlib import Path

from rekindle.app.follow import asked
from rekindle.app.plan import on_machines
from rekindle.app.readiness import ready
from rekindle.app.runs import new_record
from rekindle.errors import UnreachableError
from rekindle.platforms.local.store import Store
from rekindle.platforms.platform import Platform
from rekindle.records import Submission
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)


def recovered(spec: Spec, platform: str, home: Path) -> list[str]:
    """Ids of the runs of `spec` on the platform that have a record under `home` only now."""
    spec = on_machines(spec, platform, home)
    there, definition = Platform.of(platform, spec.platforms), ready(platform, spec)
    anew = list[str]()
    for found in there.found(definition):
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
