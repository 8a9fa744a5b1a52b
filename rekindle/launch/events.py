"""Events that a step's process reports to its watcher, each a line on stdout: `::rekindle
{json}`.

They are `progress` (step, steps, loss, samples_per_second, eta_seconds) and `notice`
(text), each with `at`, when it was, in seconds since 1970. Standard library only: it runs
in any container.

And the reason of a failure, read back out of a log: the last exception's type and whole
message, without its traceback, torchrun's prefixes (`[rank0]:`) and the error that it
raises itself because a worker died."""

import json
import re
import sys
import time
from collections.abc import Callable
from typing import Any

from rekindle.protojson import Json

MARK = "::rekindle "
_OPTIONAL = ("loss", "samples_per_second", "eta_seconds")
_LARGEST = 1e12  # what people and clocks can read; no NaN is smaller
_LONGEST = 1 << 16  # of a line; ours are shorter, and others are not worth parsing


def emit(event: str, **fields: Any) -> None:
    """Print one event; a single write, so that lines of several processes do not mix."""
    message = {"event": event, **fields, "at": round(time.time(), 1)}
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def parse(line: str) -> Json | None:
    """The well-formed event in a line of a log, whatever prefix a launcher put there, or
    None."""
    start = line.find(MARK)
    if start < 0 or len(line) > _LONGEST:
        return None
    try:
        event = json.loads(line[start + len(MARK) :])
    except (ValueError, RecursionError):
        return None
    if isinstance(event, dict) and _is_well_formed(event):
        return event
    return None


def _is_well_formed(event: Json) -> bool:
    if event.get("event") == "notice":
        return isinstance(event.get("text"), str)
    if event.get("event") != "progress" or not isinstance(event.get("unit", ""), str):
        return False
    numbers = [event.get("step"), event.get("steps")]
    numbers += [event[name] for name in _OPTIONAL if event.get(name) is not None]
    return all(map(_is_readable, numbers))


def _is_readable(number: object) -> bool:
    return isinstance(number, int | float) and abs(number) < _LARGEST


_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"(?:\[[^\]\s]*\]:\s?)*")
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?::\s?(?P<message>.*))?")
_AFTERWARDS = re.compile(
    r"""::rekindle\ |={5,}|-{20,}|[EWIF]\d{4}\ \d\d:|\[?\d{4}-\d\d-\d\d[\ T]|\[KFP\ Executor
      |(?:ERROR|WARNING|INFO|DEBUG)\b
      |During\ handling\ of\ the\ above|The\ above\ exception\ was""",
    re.VERBOSE,
)
# Raised by a parent because its child failed: the child's own exception, further up, is
# the reason.
_MESSENGERS = ("ChildFailedError", "CalledProcessError")
# What we say of a rank that ended without a word to us, as scripts of others do, and what
# torchrun printed when it saw that: the script's own words stand before it.
_EXIT = re.compile(r"rank (\d+) ended with exit code \d+")
_RESTARTS = "; restarting all ranks ("
_TORCHRUN = re.compile(r"[EWIF]\d{4} \d\d:")
_SEEN = re.compile(r"multiprocessing/api\.py:\d+\] failed \(exitcode")


def error_in_log(text: str) -> tuple[str, str]:
    """Type name (without its module) and message of the last exception in `text`; message
    lines stay lines. A log without a traceback gives `("", its last lines that are not
    empty)`."""
    lines = text.splitlines()
    starts = _numbers_of(lines, lambda line: _bare(line) == _TRACEBACK)
    failures = []
    for start in starts:
        failure = _read_traceback(lines, start)
        if failure:
            failures.append(failure)
    if not failures:
        return "", "\n".join(_without_noise(lines)[-5:])
    reasons = [failure for failure in failures if failure[0] not in _MESSENGERS]
    kind, message = (reasons or failures)[-1]
    silent_exit = _EXIT.match(message)
    if silent_exit:
        own_error = _error_of_script(lines, starts, silent_exit[1])
        if own_error:
            message = f"{silent_exit[0]}: {own_error}{message[silent_exit.end() :]}"
    return kind, message


def _error_of_script(lines: list[str], starts: list[int], rank: str) -> str:
    """What a script of the user's printed in its last attempt before torchrun saw it end;
    "" where nothing of that is an error."""
    seen_by_torchrun = _numbers_of(lines, lambda line: bool(_SEEN.search(line)))
    end = (seen_by_torchrun or starts)[-1]
    restarts = _numbers_of(lines[:end], lambda line: _RESTARTS in line)
    begin = restarts[-1] + 1 if restarts else 0
    attempt = lines[begin:end]
    # torch prefixes a traceback with its rank where ranks have met; peers fail after it
    own_lines = [line for line in attempt if line.startswith(f"[rank{rank}]:")]
    if not own_lines:
        own_lines = [line for line in attempt if not _TORCHRUN.match(line)]
    kind, message = error_in_log("\n".join(own_lines))
    if kind:
        return f"{kind}: {message}"
    # mpirun, which torchrun's line does not end, has many words of its own
    return message.rpartition("\n")[2] if seen_by_torchrun else ""


def _numbers_of(lines: list[str], condition: Callable[[str], bool]) -> list[int]:
    """The numbers of the lines for which the condition holds, from 0."""
    return [number for number, line in enumerate(lines) if condition(line)]


def _without_noise(lines: list[str]) -> list[str]:
    """Lines without our events and without what KFP's executor says of itself, its input
    dumped."""
    own_lines: list[str] = []
    is_in_dump = False
    for line in lines:
        is_noise = line.startswith(("::rekindle ", "[KFP Executor "))
        if line.strip() and not is_noise and not is_in_dump:
            own_lines.append(line)
        if line.endswith("Got executor_input:"):
            is_in_dump = True
        elif line == "}":  # its last line
            is_in_dump = False
    return own_lines


def _bare(line: str) -> str:
    return _PREFIX.sub("", line, count=1)


def _read_traceback(lines: list[str], start: int) -> tuple[str, str] | None:
    """The exception that ends the traceback at `start`; lines of other ranks are
    skipped."""
    prefix = lines[start].removesuffix(_TRACEBACK)
    own = [line[len(prefix) :] for line in lines[start + 1 :] if line.startswith(prefix)]
    # frames are indented, what ends them is not
    ends = _numbers_of(own, lambda line: bool(line) and not line[0].isspace())
    if not ends:
        return None
    exception = _EXCEPTION.fullmatch(own[ends[0]])
    if exception is None:
        return None
    message = [exception["message"] or ""]
    for line in own[ends[0] + 1 :]:
        if _AFTERWARDS.match(line) or _bare(line) == _TRACEBACK:
            break
        message.append(line)
    return exception["type"].rsplit(".", 1)[-1], "\n".join(message).strip()
