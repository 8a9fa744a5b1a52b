"""A run that goes on or is over: its steps, its logs, and how to stop it."""

import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import click

from rekindle.app.follow import (
    log_of,
    refresh_from_platform,
    request_cancel,
    step_with_log,
    steps_with_a_log,
)
from rekindle.app.runs import find_run, read_run
from rekindle.cli.options import answer, shared, tell, unasked
from rekindle.errors import RequestError
from rekindle.masking import plain, plain_but_colour
from rekindle.outputs import LogText
from rekindle.platforms.local.store import is_alive
from rekindle.platforms.snapshot import ENDED_RUN, first_failed
from rekindle.records import RunRecord, StepRecord
from rekindle.report.readable_log import Line, Reader, merged, shown

_TAIL_LINES = 10
_PAUSE_SECONDS = 0.5
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


@click.command("status")
@click.argument("run", default="latest")
@shared
def status(run: str, home: Path, as_json: bool) -> None:
    """The step table of RUN (default: the latest). Of a run that failed, the end of the
    log of the first step that failed follows; a run that was killed is shown as such."""
    record = find_run(home, run)
    if record.platform != "local":
        record = refresh_from_platform(record, home)
    # its process was killed before it could close the record
    elif record.status == "running" and not is_alive(home, record.run_id):
        update = {"status": "cancelled", "error": "killed; the same command resumes"}
        record = record.model_copy(update=update)
    if as_json:
        answer(record)
    else:
        show(record)


def show(record: RunRecord) -> None:
    """The run for people, on stdout."""
    from rich.console import Console

    from rekindle.app.progress import step_table
    from rekindle.report.timeline import last_lines

    console = Console()
    platform = "" if record.platform == "local" else f" on {record.platform}"
    console.print(f"{record.run_id}  {record.status}{platform}", highlight=False)
    if record.steps:
        console.print(step_table(record, console.width))
    if record.submission and record.submission.url:
        click.echo(plain(record.submission.url))
    if record.error:
        console.print(plain(record.error), markup=False, highlight=False)
    failed = first_failed(record.steps)
    if failed is None:
        return
    log = Path(failed.failed_log or failed.log)
    if log.is_file():
        click.echo(plain(f"the end of what `{failed.name}` printed:"))
        text, _ = last_lines(log)
        for line in text.split("\n")[-_TAIL_LINES:]:
            click.echo(f"  {line}")


@click.command("cancel")
@click.argument("run", default="latest")
@unasked
@shared
def cancel(run: str, home: Path, as_json: bool) -> None:
    """Stop RUN (default: the latest): its steps save what they can and end. A finished
    run is not changed. `rekindle resume` continues a stopped run."""
    before = find_run(home, run)
    record = request_cancel(before, home)
    if before.status in ENDED_RUN:
        remark = ": already over, nothing changed"
    elif record.status in ENDED_RUN:
        remark = ""
    else:
        remark = ", asked to stop"
    tell(record, f"{record.run_id}  {record.status}{remark}", as_json)


def _since(_context: click.Context, _option: click.Parameter, value: str | None) -> float | None:
    """A length of time such as `90s`, `10m`, `2h` or `1d`, as the time that long ago."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a length of time; write 90s, 10m, 2h or 1d")
    return time.time() - int(match[1]) * _UNIT_SECONDS[match[2]]


@click.command("logs")
@click.argument("run", default="latest")
@click.option(
    "--step",
    help="Name of the step; default: the first that failed, or the one that runs or took longest.",
)
@click.option(
    "--node",
    type=click.IntRange(min=0),
    metavar="N",
    help="The log of one node only; default: those of all, merged by time.",
)
@click.option(
    "--since",
    callback=_since,
    metavar="TIME",
    help="What was printed in the last 90s, 10m, 2h or 1d.",
)
@click.option(
    "--raw",
    is_flag=True,
    help="The log as it is, node after node, with all that launchers print.",
)
@click.option("-f", "--follow", is_flag=True, help="Continue until the step ends.")
@shared
def logs(
    run: str,
    step: str | None,
    node: int | None,
    since: float | None,
    raw: bool,
    follow: bool,
    home: Path,
    as_json: bool,
) -> None:
    """Print the log of one step of RUN (default: the latest)."""
    record = refresh_from_platform(find_run(home, run), home)
    step_record = step_with_log(record, step)
    if since is not None and (raw or as_json):
        raise RequestError(
            "only lines of the readable log have times",
            where="--since",
            fix="leave out --raw and --json",
        )
    texts = _logs(record, step_record, home, node, follow)
    if raw and follow and len(texts) > 1:
        raise RequestError(
            "the raw logs of several nodes cannot be followed at once",
            where="--raw",
            fix="name one: --node 0",
        )
    node_after_node = itertools.chain.from_iterable(texts.values())
    if as_json:  # what a program reads is not merged
        text = "".join(node_after_node)
        answer(LogText(run_id=record.run_id, step=step_record.name, text=text))
        return
    is_terminal = sys.stdout.isatty()
    if raw:
        _print_raw(node_after_node, is_terminal)
        return
    names: dict[int, str] = {}
    if len(texts) > 1:
        names = _node_names(list(texts), is_terminal)
    lines = _as_they_come(texts) if follow else merged(texts)
    piece = ""
    for piece in shown(lines, live=is_terminal, names=names, since=since or 0.0):
        sys.stdout.write(piece)
        sys.stdout.flush()
    if not piece:
        when = "" if since is None else " since then"
        hint = "--raw shows what its launcher printed"
        click.echo(
            f"the step {step_record.name} printed nothing of its own{when}; {hint}",
            err=True,
        )


def _print_raw(pieces: Iterable[str], is_terminal: bool) -> None:
    for piece in pieces:
        if is_terminal:
            # a step may print what moves the cursor or renames the window
            piece = plain_but_colour(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()


def _logs(
    record: RunRecord, step: StepRecord, home: Path, node: int | None, follow: bool
) -> dict[int, Iterator[str]]:
    """The text of each node's log, in pieces; RequestError where there is none."""
    while follow and not Path(step.log).is_file() and _is_running(home, record.run_id, step.name):
        time.sleep(_PAUSE_SECONDS)  # it waits for another run that does the same
        step = read_run(home, record.run_id).step(step.name)
    if Path(step.log).is_file():
        files = _log_files(step, node)
        return {n: _of_file(record, step, path, home, follow) for n, path in files.items()}
    if record.platform == "local":
        reason = f": {step.reason}" if step.reason else ""
        raise RequestError(
            f"the step {step.name} has no log{reason}", fix=steps_with_a_log(record, step)
        )
    if node is not None:
        raise RequestError(
            f"{record.platform} gives the logs of all nodes of a step together",
            where="--node",
            fix="leave it out",
        )
    return {0: log_of(record, step, home, follow)}


def _log_files(step: StepRecord, node: int | None) -> dict[int, Path]:
    """The files of a step's log by node, or that of one node.

    RequestError where the step has no such node."""
    files = {0: Path(step.log)}
    for path in Path(step.log).parent.glob("node-*/log.txt"):
        files[int(path.parent.name.removeprefix("node-"))] = path
    if node is None:
        return dict(sorted(files.items()))
    if node not in files:
        raise RequestError(
            f"the step {step.name} has no log of a node {node}",
            where="--node",
            fix=f"its nodes are {', '.join(map(str, sorted(files)))}",
        )
    return {node: files[node]}


def _of_file(
    record: RunRecord, step: StepRecord, path: Path, home: Path, follow: bool
) -> Iterator[str]:
    """The text of a local log; with `follow`, "" while there is no more."""
    is_over = not follow or record.platform != "local"
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            while text := file.read(1 << 16):
                yield text
            if is_over:
                return
            # once it is over the file is read once more: it may have grown until then
            is_over = not _is_running(home, record.run_id, step.name)
            if not is_over:
                yield ""
                time.sleep(_PAUSE_SECONDS)


def _as_they_come(logs: Mapping[int, Iterator[str]]) -> Iterator[Line]:
    """The lines of logs that grow, those of each node as far as it has come."""
    readers = {node: Reader(node) for node in logs}
    open_logs = dict(logs)
    while open_logs:
        for node in list(open_logs):
            reader = readers[node]
            for piece in open_logs[node]:
                yield from reader.feed(piece)
                if not piece:  # there is no more now: the next node's turn
                    yield Line(time.time(), node, "", "pause")
                    break
            else:
                yield from reader.rest()
                del open_logs[node]


def _node_names(nodes: list[int], coloured: bool) -> dict[int, str]:
    """What stands before the lines of each node."""
    names = {node: f"node {node} | " for node in nodes}
    if not coloured or os.environ.get("NO_COLOR"):
        return names
    for node in nodes:
        names[node] = click.style(names[node], fg=_COLOURS[node % len(_COLOURS)])
    return names


def _is_running(home: Path, run_id: str, step: str) -> bool:
    return is_alive(home, run_id) and read_run(home, run_id).step(step).status == "running"
