"""`rekindle doctor [CONFIG] [--platform P]`: checks that a platform has everything that a
run needs. Prints every check with its result, and all problems at once, each with its
fix. Changes nothing on the platform, and the config only with `--write`."""

import itertools
import textwrap
from collections import Counter
from pathlib import Path

import click

from rekindle.app.readiness import readiness_here, readiness_on, settings_of, write_settings
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
from rekindle.outputs import Readiness, ReadinessCheck, rows_of
from rekindle.spec.load import load_target
from rekindle.spec.yaml_edit import as_lines


@click.command("doctor")
@maybe_config
@overrides
@platform("Target platform.", here=True, default="local", show_default=True)
@click.option(
    "--write", is_flag=True, help="Add to CONFIG what the platform says that it should have."
)
@shared
def command(
    config: Path | None,
    overrides: Overrides,
    platform: str,
    write: bool,
    home: Path,
    as_json: bool,
) -> int:
    """Check CONFIG against a platform, and print the least permissions that steps need.
    Makes read-only calls to the platform, and changes nothing there."""
    if config is None and platform == "local":
        raise RequestError("there is no config to look at", fix="rekindle doctor CONFIG")
    if config is None and write:
        fix = f"rekindle doctor CONFIG --platform {platform} --write"
        raise RequestError("--write has no config to write to", fix=fix)
    readiness = _ask(config, overrides, platform, home)
    settings = settings_of(readiness)
    if config is not None and write and settings:
        write_settings(config, settings, overrides)
        _print_written(config, settings)
        readiness = _ask(config, overrides, platform, home)
        readiness = readiness.model_copy(update={"written": settings})
        _print_overridden(settings, settings_of(readiness))
        settings = {}
    no_answer = _no_answer(platform, readiness.checks)
    if no_answer is not None:
        errors = (*readiness.errors, *rows_of(no_answer))
        readiness = readiness.model_copy(update={"errors": errors})
    only_no_answer = no_answer is not None and len(readiness.errors) == 1
    if as_json:
        answer(readiness)
        if not readiness.errors:
            return 0
        return 1 if only_no_answer else 2
    _print_readiness(readiness, config, settings)
    if no_answer is not None and only_no_answer:
        raise no_answer
    if readiness.errors:
        raise RequestError([Problem(e.what, e.where, e.fix, e.code) for e in readiness.errors])
    if config is not None or readiness.checks:
        _print_ready(platform, readiness.checks)
    return 0


def _ask(config: Path | None, overrides: Overrides, platform: str, home: Path) -> Readiness:
    spec = load_target(config, overrides) if config else None
    if spec and platform == "local":
        return readiness_here(spec, home)
    return readiness_on(spec, platform, home)


def _no_answer(platform: str, checks: tuple[ReadinessCheck, ...]) -> PlatformError | None:
    """The error where nothing at all could be asked: the platform is not ready then."""
    if not checks or any(check.state != "not asked" for check in checks):
        return None
    return PlatformError(
        f"{platform} could not be asked: {checks[0].said}",
        where=checks[0].where,
        fix="check the network, and retry the command",
    )


def _print_readiness(readiness: Readiness, config: Path | None, settings: dict[str, str]) -> None:
    if readiness.permissions:
        click.echo(readiness.permissions)
    _print_checks(readiness.checks)
    if settings:
        _print_settings(config, settings)


def _print_settings(config: Path | None, settings: dict[str, str]) -> None:
    """The lines that the config should have."""
    target = str(config) if config is not None else "a config"
    hint = "; --write adds them" if config is not None else ""
    click.echo(f"lines for {target}, as the platform says{hint}:", err=True)
    click.echo(plain(textwrap.indent(as_lines(settings), "    ")), err=True)


def _print_overridden(written: dict[str, str], lacking: dict[str, str]) -> None:
    """Say which of the lines that were written `--set` overrides."""
    overridden = sorted(lacking.keys() & written.keys())
    if overridden:
        names = ", ".join(overridden)
        click.echo(f"--set says otherwise of {names}, and wins: leave it out", err=True)


def _print_written(config: Path, settings: dict[str, str]) -> None:
    click.echo(f"added to {config}:", err=True)
    click.echo(plain(textwrap.indent(as_lines(settings), "    ")), err=True)


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
