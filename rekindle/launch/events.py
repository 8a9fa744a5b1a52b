"""Events that a process inside a step reports to its watcher.

An event is one line on stdout: `::rekindle {json}`.

Events are `progress` (step, steps, loss, samples_per_second, eta_seconds) and `notice` (text), each
with `at`, when it was, in seconds since 1970. Standard library only: the code that emits runs in
any container. The lines stay in the step's log like all other output."""

from __future__ import annotations

import json
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
    """The event in a line of a log, wherever in the line a launcher's prefix left it; None if there
    is none that is well-formed: a step may print what it likes."""
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
