"""`rekindle doctor [CONFIG] [--platform P]`: is everything there that a run needs? Every question
with its answer, every problem at once with its fix; nothing is made or changed."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rekindle.answers import Readiness, ReadinessCheck, rows_of
from rekindle.cli.options import answer, overrides, shared
from rekindle.errors import PlatformError, Problem, RequestError

if TYPE_CHECKING:
    from rekindle.platforms.definition import Definition
    from rekindle.spec.model import Spec

LOCAL = "local"
# each has `permissions(place)`, the least that steps need, and `checks(place, definition, early)`,
# the questions that the platform could be asked, with their answers
PLATFORMS = {
    "azureml": "rekindle.platforms.azureml.doctor",
    "kubeflow": "rekindle.platforms.kubeflow.doctor",
    "sagemaker": "rekindle.platforms.sagemaker.doctor",
    "vertex": "rekindle.platforms.vertex.doctor",
}


@click.command("doctor")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@overrides
@click.option(
    "--platform", type=click.Choice([LOCAL, *PLATFORMS]), default=LOCAL, show_default=True,
    help="Where it shall run.",
)  # fmt: skip
@shared
def command(
    config: Path | None, overrides: tuple[str, ...], platform: str, home: Path, as_json: bool
) -> int:
    """Say what CONFIG and a platform lack for each other, and which permissions steps need at
    least. Asks the platform, and changes nothing."""
    from rekindle.spec.load import load_target

    if config is None and platform == LOCAL:
        raise RequestError("there is no config to look at", fix="rekindle doctor CONFIG")
    spec = load_target(config, overrides) if config else None
    found = _here(spec, home) if platform == LOCAL else _there(spec, platform, home)
    silent = bool(found.checks) and all(check.state == "not asked" for check in found.checks)
    if silent:
        error = _unanswered(platform, found.checks[0])
        found = found.model_copy(update={"errors": (*found.errors, *rows_of(error))})
    if as_json:
        answer(found)
        return 0 if not found.errors else 1 if silent and len(found.errors) == 1 else 2
    if found.permissions:
        click.echo(found.permissions)
    _show(found.checks)
    if silent and len(found.errors) == 1:
        raise error
    if found.errors:
        raise RequestError([Problem(e.what, e.where, e.fix, e.code) for e in found.errors])
    if spec or found.checks:
        unasked = sum(check.state == "not asked" for check in found.checks)
        more = f", but for {unasked} that could not be asked" if unasked else ""
        click.echo(f"{platform} is ready{more}", err=True)
    return 0


def refuse_early(platform: str, place: Any, definition: Definition) -> None:
    """RequestError with what would make a submission fail later: who is logged in, the bucket, the
    image. What cannot be asked is left to the platform."""
    from rekindle.platforms.asking import problems

    doctor: Any = importlib.import_module(PLATFORMS[platform])
    if found := problems(doctor.checks(place, definition, early=True)):
        raise RequestError(dict.fromkeys(found))


def _here(spec: Spec | None, home: Path) -> Readiness:
    from rekindle.cli.preflight import preflight

    assert spec is not None
    try:
        preflight(spec, home)
    except RequestError as error:
        return Readiness(platform=LOCAL, errors=rows_of(error))
    return Readiness(platform=LOCAL)


def _there(spec: Spec | None, platform: str, home: Path) -> Readiness:
    from rekindle.platforms.asking import problems
    from rekindle.spec.places import PlatformsSpec

    place = getattr(spec.platforms if spec else PlatformsSpec(), platform)
    doctor: Any = importlib.import_module(PLATFORMS[platform])
    definition, lacks = _compiled(spec, platform, home) if spec else (None, ())
    # without a config nobody has said which account, project or workspace it is about
    asks = spec is not None or platform == "kubeflow"
    found = doctor.checks(place, definition) if asks else ()
    errors = dict.fromkeys((*lacks, *problems(found)))
    return Readiness(
        platform=platform,
        permissions=doctor.permissions(place),
        checks=found,
        errors=rows_of(RequestError(errors)) if errors else (),
    )


def _compiled(
    spec: Spec, platform: str, home: Path
) -> tuple[Definition | None, tuple[Problem, ...]]:
    """What would be submitted, or why there is no such thing."""
    from rekindle.cli.planning import on_machines
    from rekindle.cli.submission import client_of, ready

    try:
        return ready(client_of(platform), platform, on_machines(spec, platform, home)), ()
    except RequestError as error:
        return None, error.problems


def _unanswered(platform: str, first: ReadinessCheck) -> PlatformError:
    """Nothing at all could be asked: that is no readiness."""
    return PlatformError(
        f"{platform} could not be asked: {first.said}", where=first.where,
        fix="see whether the network is there, and say it again",
    )  # fmt: skip


_COLOURS = {"ok": "green", "problem": "red", "not asked": "yellow"}


def _show(checks: tuple[ReadinessCheck, ...]) -> None:
    """A line a question, on stderr: permissions alone are for a pipe. Those that follow each other
    and were not asked for the same reason share one."""
    for (state, said), several in itertools.groupby(
        checks, lambda check: (check.state, check.said)
    ):
        names = Counter(check.name for check in several)
        shown = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in names.items())
        click.secho(f"{state:<9} ", fg=_COLOURS[state], nl=False, err=True)
        click.echo(f"{shown}: {said}" if said else shown, err=True)
