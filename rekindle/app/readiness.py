"""Whether a config, this machine and a platform have what a run needs: every problem at once, each
with its fix; nothing is made or changed."""

import functools
import itertools
from pathlib import Path

from rekindle.app.compile import compiled
from rekindle.app.pipeline import graph_of
from rekindle.app.plan import on_any_machine
from rekindle.app.preflight import looks
from rekindle.errors import Problem, RequestError, collected
from rekindle.outputs import Readiness, ReadinessCheck, rows_of
from rekindle.platforms.checks import problems as wrong_ones
from rekindle.platforms.checks import run_checks
from rekindle.platforms.platform import Platform
from rekindle.platforms.submission import Definition
from rekindle.spec.model import Spec
from rekindle.spec.platforms import PlatformsSpec


def ready(platform: str, spec: Spec) -> Definition:
    """The definition; RequestError with everything that is wrong with it or not said."""
    problems: list[Problem] = list(Platform.of(platform, spec.platforms).settings.missing())
    with collected(problems):
        definition = compiled(platform, spec, *graph_of(spec))
    if problems:
        raise RequestError(dict.fromkeys(problems))
    return definition


def refuse_early(platform: Platform, definition: Definition) -> None:
    """RequestError with what would make a submission fail later, as far as it can be asked."""
    if found := wrong_ones(run_checks(platform.checks(definition), early=True)):
        raise RequestError(dict.fromkeys(found))


def ready_here(spec: Spec, home: Path) -> Readiness:
    """What this machine and the config lack for a run here."""
    found = looks(spec, home)
    problems = list(itertools.chain.from_iterable(found.values()))
    ok = functools.partial(ReadinessCheck, where="", state="ok", said="no problem found")
    wrong = functools.partial(ReadinessCheck, where="", state="problem", said="")
    checks = tuple((wrong if lacks else ok)(name=name) for name, lacks in found.items())
    errors = rows_of(RequestError(problems)) if problems else ()
    return Readiness(platform="local", checks=checks, errors=errors)


def ready_there(spec: Spec | None, platform: str, home: Path) -> Readiness:
    """What a platform and the config lack for each other; the permissions that steps need."""
    there = Platform.of(platform, spec.platforms if spec else PlatformsSpec())
    definition, lacks = None, list[Problem]()
    spec = on_any_machine(spec, platform, home, lacks) if spec else None
    with collected(lacks):
        definition = ready(platform, spec) if spec else None
    found = run_checks(there.checks(definition))
    errors = dict.fromkeys((*lacks, *wrong_ones(found)))
    return Readiness(
        platform=platform, permissions=there.permissions(), checks=found,
        errors=rows_of(RequestError(errors)) if errors else (),
    )  # fmt: skip
