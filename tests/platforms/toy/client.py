"""A run is a file, named after its submission, so that it is made once."""

from __future__ import annotations

import json
from pathlib import Path

from rekindle.platforms.definition import Definition
from rekindle.platforms.submission import (
    Planned,
    RunTag,
    SubmissionPreview,
    SubmittedRun,
    digest_of,
)
from tests.platforms.toy import ToySpec


def outline(definition: Definition, place: ToySpec, token: str) -> SubmissionPreview:
    steps = json.loads(definition.text)["steps"]
    planned = tuple(Planned(name, "toy") for name in steps)
    return SubmissionPreview(place.folder, digest_of(definition.files, token), planned)


def submit(definition: Definition, place: ToySpec, mark: RunTag) -> SubmittedRun:
    run = Path(place.folder) / outline(definition, place, mark.token).id
    anew = not run.exists()
    if anew:
        run.write_text(json.dumps({"mark": str(mark), **json.loads(definition.text)}))
    return SubmittedRun(run.name, run.as_uri(), anew)
