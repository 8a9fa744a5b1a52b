"""What a step printed, read from a platform piece by piece.

Two kinds of logs are read here alike: those with a file or stream for each machine, of
which a position is known (SageMaker, Azure ML). Kubeflow gives one text, whole each time,
and Vertex AI gives entries of all machines in the order of their times; each has its own
position."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Position = TypeVar("Position", int, str)


@dataclasses.dataclass(frozen=True)
class LogPiece:
    """A piece of a step's log, and where the next one begins."""

    text: str
    cursor: str


def read_streams(
    machines: Mapping[str, str],
    cursor: str,
    start: Position,
    read_since: Callable[[str, Position], tuple[Iterable[str], Position]],
) -> LogPiece:
    """What streams hold since the cursor, which has a position in each of them.

    `machines` has what the lines of each stream begin with, if there are several.
    `read_since` gives a stream's lines after a position, at first `start`, and the next
    position."""
    positions: dict[str, Position] = json.loads(cursor or "{}")
    text = ""
    for stream, machine in machines.items():
        lines, positions[stream] = read_since(stream, positions.get(stream, start))
        prefix = f"[{machine}] " if len(machines) > 1 else ""
        text += "".join(f"{prefix}{line}\n" for line in lines)
    return LogPiece(text, json.dumps(positions))
