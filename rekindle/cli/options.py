"""Options that several verbs share."""

import datetime as dt
import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from rekindle.app.runs import DEFAULT_HOME, HOME
from rekindle.data.window import parse_time
from rekindle.errors import RequestError
from rekindle.masking import masked
from rekindle.platforms.api import refuse_left_out
from rekindle.records import Record
from rekindle.spec.installed import platform_names

Decorated = Callable[..., Any]  # as click's decorators take and return it
Overrides = tuple[str, ...]

FOLDER = click.Path(file_okay=False, path_type=Path)

config = click.argument("config", type=click.Path(path_type=Path))
maybe_config = click.argument("config", type=click.Path(path_type=Path), required=False)
overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a field, such as train.lr=1e-4.",
)
yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
unasked = click.option(
    "-y",
    "--yes",
    is_flag=True,
    expose_value=False,
    help="Nothing is asked; scripts may pass it as everywhere.",
)
wait = click.option("--wait", is_flag=True, help="Wait for the run; exit with its exit code.")


def of_config(function: Decorated) -> Decorated:
    """CONFIG, and `--set`."""
    return config(overrides(function))


def platform(help_text: str, *, here: bool = False, **settings: Any) -> Decorated:
    """`--platform`, with click's `settings`; `here`: also `local`, this machine."""
    names = ["local", *platform_names()] if here else [*platform_names()]
    return click.option("--platform", type=PlatformChoice(names), help=help_text, **settings)


class PlatformChoice(click.Choice[str]):
    """The name of a platform; of one that is installed and cannot be used: why."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in self.choices:
            refuse_left_out(value)
        return super().convert(value, param, ctx)


class _MaskingFormatter(logging.Formatter):
    """No line of a log shows a secret."""

    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _set_verbose(context: click.Context, option: click.Parameter, value: bool) -> None:
    if logging.lastResort:  # shows warnings where no handler is configured
        logging.lastResort.setFormatter(_MaskingFormatter())
    if value:
        handler = logging.StreamHandler()
        handler.setFormatter(_MaskingFormatter("%(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])


def answer(record: Record) -> None:
    """Print a record as one JSON object on stdout: what `--json` asks for."""
    click.echo(record.to_json())


def tell(record: Record, text: str, as_json: bool) -> None:
    """Print a record on stdout, as one JSON object or as the text for people."""
    if as_json:
        answer(record)
    else:
        click.echo(text)


def show_notices(notices: Iterable[str]) -> None:
    """Print on stderr what a platform does otherwise than a run here."""
    for notice in notices:
        click.echo(f"notice: {notice}", err=True)


def agree(yes: bool, question: str) -> None:
    """Return if the user agrees.

    RequestError if not, or if there is no terminal to ask at."""
    if yes:
        return
    # questions are printed on stderr: stdout may be a pipe
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RequestError(
            "stdin is not a terminal, so this cannot be confirmed; nothing was changed",
            where="--yes",
            fix="pass --yes",
        )
    if not click.confirm(question, err=True):
        raise RequestError("nothing was changed", fix="answer y, or pass --yes")


def shared(function: Decorated) -> Decorated:
    """`--home`, `--json` and `-v`."""
    as_json = click.option(
        "--json",
        "as_json",
        is_flag=True,
        help="One JSON object on stdout, all else on stderr.",
    )
    return at_home(as_json(function))


def at_home(function: Decorated) -> Decorated:
    """`--home` and `-v`."""
    verbose = click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_set_verbose,
        help="Log decisions, and show tracebacks.",
    )
    home = click.option(
        "--home",
        type=FOLDER,
        default=DEFAULT_HOME,
        show_default=True,
        envvar=HOME,
        show_envvar=True,
        help="Folder of runs, artifacts and the embedded registry.",
    )
    return home(verbose(function))


def moment(now: str | None) -> dt.datetime | None:
    """The time of --now, in UTC; RequestError for what is not a time."""
    if not now:
        return None
    try:
        return parse_time(now).replace(tzinfo=dt.UTC)
    except ValueError:
        fix = "write it as 2026-07-01 or 2026-07-01T12:00"
        raise RequestError(f"`{now}` is not a time", where="--now", fix=fix) from None
