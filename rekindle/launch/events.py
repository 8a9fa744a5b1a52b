"""Events that a step's process reports to its watcher, each a line on stdout: `::rekindle {json}`.

They are `progress` (step, steps, loss, samples_per_second, eta_seconds) and `notice` (text), each
with `at`, when it was, in seconds since 1970. Standard library only: it runs in any container.

And the reason of a failure, read back out of a log: the last exception's type and whole message,
without its traceback, torchrun's prefixes (`[rank0]:`) and the error that it raises itself because
a worker died."""

import json
import re
import sys
import time
from typing import Any

MARK = "::rekindle "
_OPTIONAL = ("loss", "samples_per_second", "eta_seconds")
_LARGEST = 1e12  # what people and clocks can read; no NaN is smaller
_LONGEST = 1 << 16


def emit(event: str, **fields: Any) -> None:
    """Print one event; a single write, so that lines of several processes do not mix."""
    said = {"event": event, **fields, "at": round(time.time(), 1)}
    sys.stdout.write(f"{MARK}{json.dumps(said)}\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """The well-formed event in a line of a log, whatever prefix a launcher put there, or None."""
    start = line.find(MARK)
    if start < 0 or len(line) > _LONGEST:
        return None
    try:
        event = json.loads(line[start + len(MARK) :])
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and _is_well_formed(event) else None


def _is_well_formed(event: dict[str, Any]) -> bool:
    if event.get("event") == "notice":
        return isinstance(event.get("text"), str)
    numbers = [event.get("step"), event.get("steps")]
    numbers += [event[name] for name in _OPTIONAL if event.get(name) is not None]
    return (
        event.get("event") == "progress"
        and isinstance(event.get("unit", ""), str)
        and all(isinstance(n, int | float) and abs(n) < _LARGEST for n in numbers)
    )


_TRACEBACK = "Traceback (most recent call last):"
_PREFIX = re.compile(r"(?:\[[^\]\s]*\]:\s?)*")
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?::\s?(?P<message>.*))?")
_AFTERWARDS = re.compile(
    r"""::rekindle\ |={5,}|-{20,}|[EWIF]\d{4}\ \d\d:|\[?\d{4}-\d\d-\d\d[\ T]|\[KFP\ Executor
      |(?:ERROR|WARNING|INFO|DEBUG)\b
      |During\ handling\ of\ the\ above|The\ above\ exception\ was""",
    re.VERBOSE,
)
# Raised by a parent because its child failed: the child's own exception, further up, is the reason.
_MESSENGERS = ("ChildFailedError", "CalledProcessError")
# What we say of a rank that ended without a word to us, as scripts of others do, and what torchrun
# printed when it saw that: the script's own words stand before it.
_EXIT = re.compile(r"rank (\d+) ended with exit code \d+")
_RESTARTS = "; restarting all ranks ("
_TORCHRUN = re.compile(r"[EWIF]\d{4} \d\d:")
_SEEN = re.compile(r"multiprocessing/api\.py:\d+\] failed \(exitcode")


def error_in_log(text: str) -> tuple[str, str]:
    """Type name (without its module) and message of the last exception in `text`; message lines
    stay lines. A log without a traceback gives `("", its last lines that are not empty)`."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if _bare(line) == _TRACEBACK]
    found = [failure for start in starts if (failure := _read_traceback(lines, start))]
    told = [failure for failure in found if failure[0] not in _MESSENGERS]
    if told or found:
        kind, message = (told or found)[-1]
        if exit_code := _EXIT.match(message):
            seen = [i for i, line in enumerate(lines) if _SEEN.search(line)]
            end = (seen or starts)[-1]
            again = [i for i, line in enumerate(lines[:end]) if _RESTARTS in line]
            last = lines[again[-1] + 1 if again else 0 : end]  # the last attempt's own
            # torch prefixes a traceback with its rank where ranks have met; peers fail after it
            mine = [line for line in last if line.startswith(f"[rank{exit_code[1]}]:")]
            own, said = error_in_log("\n".join(mine or [x for x in last if not _TORCHRUN.match(x)]))
            # mpirun, which torchrun's line does not end, has many words of its own
            said = f"{own}: {said}" if own else said.rpartition("\n")[2] if seen else ""
            message = f"{exit_code[0]}: {said}{message[exit_code.end() :]}" if said else message
        return kind, message
    return "", "\n".join(_spoken(lines)[-5:])


def _spoken(lines: list[str]) -> list[str]:
    """Lines without our events and without what KFP's executor says of itself, its input dumped."""
    spoken: list[str] = []
    in_dump = False
    for line in lines:
        noise = line.startswith(("::rekindle ", "[KFP Executor "))
        if line.strip() and not noise and not in_dump:
            spoken.append(line)
        in_dump = line.endswith("Got executor_input:") or (in_dump and line != "}")
    return spoken


def _bare(line: str) -> str:
    return _PREFIX.sub("", line, count=1)


def _read_traceback(lines: list[str], start: int) -> tuple[str, str] | None:
    """The exception that ends the traceback at `start`; lines of other ranks are skipped."""
    prefix = lines[start].removesuffix(_TRACEBACK)
    own = [line[len(prefix) :] for line in lines[start + 1 :] if line.startswith(prefix)]
    end = next((i for i, line in enumerate(own) if line and not line[0].isspace()), len(own))
    match = _EXCEPTION.fullmatch(own[end]) if end < len(own) else None
    if match is None:
        return None
    message = [match["message"] or ""]
    for line in own[end + 1 :]:
        if _AFTERWARDS.match(line) or _bare(line) == _TRACEBACK:
            break
        message.append(line)
    return match["type"].rsplit(".", 1)[-1], "\n".join(message).strip()
