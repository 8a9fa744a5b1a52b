"""`rekindle doctor [CONFIG] [--platform P]`: checks that a platform has everything that a run
needs. Prints every check with its result, and all problems at once, each with its fix; changes
nothing."""

import itertools
from collections import Counter
from pathlib import Path

import click

from rekindle.app.preflight import readiness_here, readiness_on
from rekindle.cli.options import Overrides, answer, maybe_config, overrides, platform, shared
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
    """Check CONFIG against a platform, and print the least permissions that steps need. Makes
    read-only calls to the platform, and changes nothing."""
    if config is None and platform == "local":
        raise RequestError("there is no config to look at", fix="rekindle doctor CONFIG")
    spec = load_target(config, overrides) if config else None
    if spec and platform == "local":
        found = readiness_here(spec, home)
    else:
        found = readiness_on(spec, platform, home)
    silent = bool(found.checks) and all(check.state == "not asked" for check in found.checks)
    if silent:
        first = found.checks[0]  # nothing at all could be asked: the platform is not ready then
        what = f"{platform} could not be asked: {first.said}"
        fix = "check the network, and retry the command"
        error = PlatformError(what, where=first.where, fix=fix)
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


_COLOURS = {"ok": "green", "problem": "red", "not asked": "yellow"}


def _show(checks: tuple[ReadinessCheck, ...]) -> None:
    """A line a question, on stderr: permissions alone are for a pipe. Those that follow each other
    and were not asked for the same reason share one."""
    alike = itertools.groupby(checks, lambda check: (check.state, check.said))
    for (state, said), several in alike:
        names = Counter(check.name for check in several)
        shown = ", ".join(f"{name} ({n})" if n > 1 else name for name, n in names.items())
        click.secho(f"{state:<9} ", fg=_COLOURS[state], nl=False, err=True)
        click.echo(plain(f"{shown}: {said}" if said else shown), err=True)
