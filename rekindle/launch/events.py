"""What a process inside a step tells whoever watches it: one line on stdout an event, `::rekindle
{json}`.

Events are `progress` (step, steps, loss, samples_per_second, eta_seconds) and `notice` (text).
Standard library only: the code that emits runs in any container. The lines stay in the step's log
like all other output.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MARK = "::rekindle "


def emit(event: str, **fields: Any) -> None:
    """Print one event; a single write, so that lines of several processes do not mix."""
    sys.stdout.write(f"{MARK}{json.dumps({'event': event, **fields})}\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """The event in a line of a log, wherever in the line a launcher's prefix left it; None if there
    is none."""
    start = line.find(MARK)
    if start < 0:
        return None
    try:
        event = json.loads(line[start + len(MARK) :])
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
