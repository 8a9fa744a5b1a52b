"""Logs as a person reads them: what steps printed, without the launcher's own lines.

Events of ours (launch/events.py) become sentences with a time; of progress a terminal sees one line
that moves, a pipe one every `PROGRESS_SECONDS`, and the last before other lines. Lines of several
nodes are merged by the time of the last event before them, each with the name of its node."""

import dataclasses
import datetime
import heapq
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from rekindle import formats
from rekindle.launch import events
from rekindle.masking import plain_but_colour

PROGRESS_SECONDS = 5.0
_EXECUTOR = re.compile(r"^\[KFP Executor (?P<time>[\d-]+ [\d:]+),\d+ \w+\]: (?P<text>.*)")
_PLACE = re.compile(r"(\[(?:node |algo-)\d+\] )?(.*)", re.DOTALL)  # as platforms name a node
_PLUMBING = (
    "Looking for component",
    "Loading KFP component",
    "Wrote executor output",
    "Did not write output file",
)
_INPUT = "Got executor_input:"
_REWRITE = "\r\x1b[2K"

Kind = Literal["text", "event", "progress", "pause"]


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """A line of a log: seconds since 1970 of the last event up to it (0 for none), and the node.
    `text` has no time of its own, and a `pause` says that all printed until then was read."""

    at: float
    node: int
    text: str = dataclasses.field(compare=False)
    kind: Kind = dataclasses.field(default="text", compare=False)


class Reader:
    """Takes in a node's log piece by piece, and gives each readable line once it is complete."""

    def __init__(self, node: int = 0) -> None:
        self._node, self._at = node, 0.0
        self._rest, self._skipping = "", set[str]()

    def feed(self, piece: str) -> Iterator[Line]:
        """The lines that end in this piece."""
        *whole, self._rest = (self._rest + piece).split("\n")
        for text in whole:
            yield from self._read(text.removesuffix("\r"))

    def rest(self) -> Iterator[Line]:
        """What follows the last end of a line."""
        text, self._rest = self._rest, ""
        yield from self._read(text) if text else ()

    def _read(self, line: str) -> Iterator[Line]:
        found = _PLACE.fullmatch(line)
        assert found is not None
        place, text = found.groups("")
        if place in self._skipping:
            self._skipping -= {place} if text == "}" else set()
        elif event := events.parse(text):
            at = event.get("at")
            if isinstance(at, int | float) and self._at < at < 1e10:
                self._at = float(at)
            kind: Kind = "progress" if event["event"] == "progress" else "event"
            notice = event["event"] == "notice"
            moment = datetime.datetime.fromtimestamp(self._at)
            begin = f"{place}{moment:%H:%M:%S} " if self._at else place
            for sentence in str(event["text"]).split("\n") if notice else [progress_text(event)]:
                yield Line(self._at, self._node, begin + sentence, kind)
        elif (found := _EXECUTOR.match(text)) is None:
            yield Line(self._at, self._node, line)
        elif found["text"].startswith(_INPUT):
            self._skipping.add(place)
        elif not found["text"].startswith(_PLUMBING):
            clock = found["time"].rpartition(" ")[2]
            yield Line(self._at, self._node, f"{place}{clock} {found['text']}")


def lines_of(pieces: Iterable[str], node: int = 0) -> Iterator[Line]:
    """The lines in the pieces of a node's log."""
    reader = Reader(node)
    for piece in pieces:
        yield from reader.feed(piece)
    yield from reader.rest()


def merged(logs: Mapping[int, Iterable[str]]) -> Iterator[Line]:
    """The lines of several nodes' logs in the order of their times, of each in their own."""
    return heapq.merge(*(lines_of(pieces, node) for node, pieces in logs.items()))


def shown(
    lines: Iterable[Line], *, live: bool, names: Mapping[int, str], since: float = 0.0
) -> Iterator[str]:
    """What is written for the lines from the time `since` on: each with the name of its node from
    `names`, if it has one there. `live`: to a terminal, which is steered by nothing but colours,
    and on which a line of progress is written over."""
    moving, held, last = False, dict[int, str](), dict[int, float]()
    for line in _recent(lines, since):
        text = names.get(line.node, "") + (plain_but_colour(line.text) if live else line.text)
        if line.kind == "progress" and live:
            yield _REWRITE + text
            moving = True
            continue
        if moving:
            yield "\n"
            moving = False
        if line.kind == "progress" and 0 < line.at < last.get(line.node, 0.0) + PROGRESS_SECONDS:
            held[line.node] = text
            continue
        if line.kind == "progress":
            last[line.node] = line.at
            held.pop(line.node, None)
        elif line.node in held:
            yield f"{held.pop(line.node)}\n"
        yield f"{text}\n"
    yield from ["\n"] if moving else (f"{held[node]}\n" for node in sorted(held))


def _recent(lines: Iterable[Line], since: float) -> Iterator[Line]:
    """The lines from the time `since` on, each as new as the next that has a time."""
    held: dict[int, list[Line]] = {}
    for line in lines:
        if line.kind == "text" and line.at < since:
            held.setdefault(line.node, []).append(line)
            continue
        undated = held.pop(line.node, [])
        if line.at >= since:
            yield from undated
            yield from [line] if line.kind != "pause" else []
    for node in sorted(held):
        yield from held[node]


def progress_text(event: Mapping[str, Any]) -> str:
    """A progress event as one line: `step 42/84  loss 0.0054  683 samples/s  00:00:02 left`."""
    parts = [f"{event.get('unit', 'step')} {event['step']}/{event['steps']}"]
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.4f}")
    if event.get("samples_per_second"):
        parts.append(f"{formats.count(event['samples_per_second'])} samples/s")
    if event.get("eta_seconds") and event["step"] < event["steps"]:
        minutes, seconds = divmod(int(event["eta_seconds"]), 60)
        parts.append(f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02} left")
    return "  ".join(parts)
