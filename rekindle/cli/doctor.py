"""`rekindle doctor [CONFIG] [--platform P]`: checks that a platform has everything that a
run needs. Prints every check with its result, and all problems at once, each with its
fix; changes nothing."""

import itertools
from collections import Counter
from pathlib import Path

import click

from rekindle.app.readiness import readiness_here, readiness_on
from rekindle.cli.options import (
    Overrides,
    answer,
    maybe_config,
    overrides,
    platform,
    shared,
)
from rekindle.errors import PlatformError, Problem, RequestError
from rekindle.masking import plain
from rekindle.outputs import ReadinessCheck, rows_of
from rekindle.spec.load import load_target


@click.command("doctor")
@maybe_config
@overrides
@platform("Target platform.", here=True, default="local", show_default=True)
@shared
def command(
    config: Path | None, overrides: Overrides, platform: str, home: Path, as_json: bool
) -> int:
    """Check CONFIG against a platform, and print the least permissions that steps need.
    Makes read-only calls to the platform, and changes nothing."""
    if config is None and platform == "local":
        raise RequestError("there is no config to look at", fix="rekindle doctor CONFIG")
    spec = load_target(config, overrides) if config else None
    if spec and platform == "local":
        readiness = readiness_here(spec, home)
    else:
        readiness = readiness_on(spec, platform, home)
    checks = readiness.checks
    no_answer = _no_answer(platform, checks)
    if no_answer is not None:
        errors = (*readiness.errors, *rows_of(no_answer))
        readiness = readiness.model_copy(update={"errors": errors})
    only_no_answer = no_answer is not None and len(readiness.errors) == 1
    if as_json:
        answer(readiness)
        if not readiness.errors:
            return 0
        return 1 if only_no_answer else 2
    if readiness.permissions:
        click.echo(readiness.permissions)
    _print_checks(checks)
    if no_answer is not None and only_no_answer:
        raise no_answer
    if readiness.errors:
        raise RequestError([Problem(e.what, e.where, e.fix, e.code) for e in readiness.errors])
    if spec or checks:
        _print_ready(platform, checks)
    return 0


def _no_answer(platform: str, checks: tuple[ReadinessCheck, ...]) -> PlatformError | None:
    """The error where nothing at all could be asked: the platform is not ready then."""
    if not checks or any(check.state != "not asked" for check in checks):
        return None
    return PlatformError(
        f"{platform} could not be asked: {checks[0].said}",
        where=checks[0].where,
        fix="check the network, and retry the command",
    )


def _print_ready(platform: str, checks: tuple[ReadinessCheck, ...]) -> None:
    unasked = sum(check.state == "not asked" for check in checks)
    text = f"{platform} is ready"
    if unasked:
        text += f", but for {unasked} that could not be asked"
    click.echo(text, err=True)


_COLOURS = {"ok": "green", "problem": "red", "not asked": "yellow"}


def _print_checks(checks: tuple[ReadinessCheck, ...]) -> None:
    """A line a check, on stderr: permissions alone are for a pipe. Those that follow each
    other and were not asked for the same reason share one."""
    groups = itertools.groupby(checks, lambda check: (check.state, check.said))
    for (state, answer_text), group in groups:
        counts = Counter(check.name for check in group)
        names = ", ".join(map(_counted, counts, counts.values()))
        click.secho(f"{state:<9} ", fg=_COLOURS[state], nl=False, err=True)
        if answer_text:
            names += f": {answer_text}"
        click.echo(plain(names), err=True)


def _counted(name: str, count: int) -> str:
    return f"{name} ({count})" if count > 1 else name
