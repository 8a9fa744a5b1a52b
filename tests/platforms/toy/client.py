"""A run is a file, named after its submission, so that it is made once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from rekindle.outputs import PlannedStep
from rekindle.platforms.cache_diff import CacheKey
from rekindle.platforms.submission import Definition, RunTag, SubmittedRun, digest_of
from tests.platforms.toy import ToySpec


def where(place: ToySpec) -> str:
    return place.folder


def run_name(definition: Definition, token: str) -> str:
    return digest_of(definition.files, token)


def steps(definition: Definition) -> tuple[PlannedStep, ...]:
    return tuple(PlannedStep(name, "toy") for name in json.loads(definition.text)["steps"])


def submit(definition: Definition, place: ToySpec, mark: RunTag) -> SubmittedRun:
    run = Path(place.folder) / run_name(definition, mark.token)
    anew = not run.exists()
    if anew:
        run.write_text(json.dumps({"mark": str(mark), **json.loads(definition.text)}))
    return SubmittedRun(run.name, run.as_uri(), anew)


def cache_keys(files: Mapping[str, bytes]) -> tuple[CacheKey, ...]:
    """The toy caches nothing."""
    (content,) = files.values()
    steps = json.loads(content)["steps"]
    return tuple(CacheKey(name, False, {"its image": image}) for name, image in steps.items())
