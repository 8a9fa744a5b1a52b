"""Options that several verbs share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from rekindle.errors import RequestError
from rekindle.masking import masked
from rekindle.records import Record, RunRecord

log = logging.getLogger(__name__)

Decorated = Callable[..., Any]

DEFAULT_HOME = Path(".rekindle")
TRAINING = "finetune"  # the step of the shipped pipeline
ON_MACHINES = (TRAINING, "score")  # those that `resources` are for
FOLDER = click.Path(file_okay=False, path_type=Path)

yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
wait = click.option("--wait", is_flag=True,
                    help="Stay until the run is over, and end as it does.")  # fmt: skip


class _Masking(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return masked(super().format(record))


def _set_verbose(context: click.Context, option: click.Parameter, value: bool) -> None:
    if logging.lastResort:  # what shows warnings where nobody asked for logs
        logging.lastResort.setFormatter(_Masking())
    if value:
        handler = logging.StreamHandler()
        handler.setFormatter(_Masking("%(name)s: %(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])


def answer(record: Record) -> None:
    """Say it as one JSON object on stdout: what `--json` asks for."""
    click.echo(record.to_json())


def agree(yes: bool, question: str) -> None:
    """Return if the user agrees; RequestError if not, or if there is no terminal to ask at."""
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RequestError(
            "stdin is not a terminal, so this cannot be confirmed; nothing was changed",
            where="--yes", fix="pass --yes",
        )  # fmt: skip
    if not click.confirm(question, err=True):
        raise RequestError("nothing was changed", fix="answer y, or pass --yes")


def shared(function: Decorated) -> Decorated:
    """`--home`, `--json` and `-v`."""
    for option in (
        click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=_set_verbose,
                     help="Log decisions, and show tracebacks."),
        click.option("--json", "as_json", is_flag=True,
                     help="One JSON object on stdout, all else on stderr."),
        click.option("--home", type=FOLDER, default=DEFAULT_HOME, show_default=True,
                     help="Where runs, artifacts and the embedded registry live."),
    ):  # fmt: skip
        function = option(function)
    return function


def overrides(function: Decorated) -> Decorated:
    """`--set a.b=c`, any number of times."""
    return click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a field, such as train.lr=1e-4.",
    )(function)


def config(function: Decorated) -> Decorated:
    """The argument CONFIG."""
    return click.argument("config", type=click.Path(path_type=Path))(function)


def all_runs(home: Path, name: str = "") -> list[RunRecord]:
    """All runs under `home`, or those of a name, in the order in which they began; a record that
    cannot be read is left out, with a warning.
    """
    return list(newest_first(home, name))[::-1]


def newest_first(home: Path, name: str = "", platform: str = "") -> Iterator[RunRecord]:
    """The same, the one that began last first, those on `platform` before all others; each record
    is read when its turn comes."""
    from rekindle.report.ledger import ledger

    entries = ledger(home).entries[::-1]
    for entry in sorted(entries, key=lambda entry: entry.platform != platform):
        if name in ("", entry.name):
            try:
                yield read_run(home, entry.run_id)
            except (OSError, ValueError) as error:  # since a moment ago
                log.warning("%s cannot be read: %s", entry.run_id, str(error).splitlines()[0])


def numbered(record: RunRecord, home: Path) -> RunRecord:
    """The record of a run that begins, with a number above all others under `home`: the clock may
    say anything."""
    from rekindle.report.ledger import ledger

    number = 1 + max((entry.number for entry in ledger(home).entries), default=0)
    return record.model_copy(update={"number": number, "home": str(home.absolute())})


def read_run(home: Path, run_id: str) -> RunRecord:
    """The record of the run with exactly this id."""
    return RunRecord.read(home / "runs" / run_id / "run.json")


def find_run(home: Path, wanted: str) -> RunRecord:
    """The run whose id is `wanted`, starts with it, or is the latest; raises RequestError."""
    from rekindle.report.ledger import ledger

    ids = [entry.run_id for entry in ledger(home).entries]
    if wanted == "latest" and ids:
        return read_run(home, ids[-1])
    found = [run_id for run_id in ids if run_id == wanted]
    found = found or [run_id for run_id in ids if run_id.startswith(wanted)]
    if len(found) == 1:
        return read_run(home, found[0])
    if found:
        names = ", ".join(found[:5])
        raise RequestError(f"`{wanted}` fits {len(found)} runs: {names}", fix="give more of its id")
    if not ids:
        raise RequestError(
            f"there are no runs under {home}", fix="`rekindle run CONFIG`, or name another --home"
        )
    raise RequestError(
        f"there is no run `{wanted}` under {home}",
        fix=f"the latest is {ids[-1]}; `rekindle runs` lists all that `rekindle gc` left",
    )
