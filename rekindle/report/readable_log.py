"""Logs as a person reads them: what steps printed, without the launcher's own lines.

Events of ours (launch/events.py) become sentences with a time; of progress a terminal
sees one line that moves, a pipe one every `PROGRESS_SECONDS`, and the last before other
lines. Lines of several nodes are merged by the time of the last event before them, each
with the name of its node."""

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
# what KFP's executor logs, in its own format
_EXECUTOR = re.compile(r"^\[KFP Executor (?P<time>[\d-]+ [\d:]+),\d+ \w+\]: (?P<text>.*)")
_PLACE = re.compile(r"(\[(?:node |algo-)\d+\] )?(.*)", re.DOTALL)  # as platforms name a node
# what it says of its own work, which is nothing of the step's
_PLUMBING = (
    "Looking for component",
    "Loading KFP component",
    "Wrote executor output",
    "Did not write output file",
)
_INPUT = "Got executor_input:"  # JSON over many lines, the last of which is a brace
_REWRITE = "\r\x1b[2K"  # back to the beginning of the line, and erase it

Kind = Literal["text", "event", "progress", "pause"]


@dataclasses.dataclass(frozen=True, order=True)
class Line:
    """A line of a log: seconds since 1970 of the last event up to it (0 for none), and
    the node. `text` has no time of its own, and a `pause` says that all printed until
    then was read."""

    at: float
    node: int
    text: str = dataclasses.field(compare=False)
    kind: Kind = dataclasses.field(default="text", compare=False)


class Reader:
    """Takes in a node's log piece by piece,
    and gives each readable line once it is complete."""

    def __init__(self, node: int = 0) -> None:
        self._node = node
        self._at = 0.0  # of the last event
        self._unfinished = ""  # the line whose end has not come
        # places whose lines are left out, until the executor's input ends
        self._skipping: set[str] = set()

    def feed(self, piece: str) -> Iterator[Line]:
        """The lines that end in this piece."""
        *lines, self._unfinished = (self._unfinished + piece).split("\n")
        for line in lines:
            yield from self._read(line.removesuffix("\r"))

    def rest(self) -> Iterator[Line]:
        """What follows the last end of a line."""
        line = self._unfinished
        self._unfinished = ""
        if line:
            yield from self._read(line)

    def _read(self, line: str) -> Iterator[Line]:
        """What a person reads of a line: nothing of the launcher's own."""
        parts = _PLACE.fullmatch(line)
        assert parts is not None
        place, text = parts.groups("")
        if place in self._skipping:
            if text == "}":
                self._skipping.remove(place)
            return
        event = events.parse(text)
        if event:
            yield from self._event_lines(place, event)
            return
        logged = _EXECUTOR.match(text)
        if logged is None:
            yield Line(self._at, self._node, line)
        elif logged["text"].startswith(_INPUT):
            self._skipping.add(place)
        elif not logged["text"].startswith(_PLUMBING):
            clock = logged["time"].rpartition(" ")[2]
            yield Line(self._at, self._node, f"{place}{clock} {logged['text']}")

    def _event_lines(self, place: str, event: Mapping[str, Any]) -> Iterator[Line]:
        """An event in words, with its time."""
        at = event.get("at")
        # a time in the past, or beyond any clock's, is not believed
        if isinstance(at, int | float) and self._at < at < 1e10:
            self._at = float(at)
        begin = place
        if self._at:
            begin += f"{datetime.datetime.fromtimestamp(self._at):%H:%M:%S} "
        kind: Kind = "progress" if event["event"] == "progress" else "event"
        if event["event"] == "notice":
            sentences = str(event["text"]).split("\n")
        else:
            sentences = [progress_text(event)]
        for sentence in sentences:
            yield Line(self._at, self._node, begin + sentence, kind)


def lines_of(pieces: Iterable[str], node: int = 0) -> Iterator[Line]:
    """The lines in the pieces of a node's log."""
    reader = Reader(node)
    for piece in pieces:
        yield from reader.feed(piece)
    yield from reader.rest()


def merged(logs: Mapping[int, Iterable[str]]) -> Iterator[Line]:
    """The lines of several nodes' logs in the order of their times,
    of each in their own."""
    return heapq.merge(*(lines_of(pieces, node) for node, pieces in logs.items()))


def shown(
    lines: Iterable[Line], *, live: bool, names: Mapping[int, str], since: float = 0.0
) -> Iterator[str]:
    """What is written for the lines from the time `since` on: each with the name of its
    node from `names`, if it has one there. `live`: to a terminal, which is steered by
    nothing but colours, and on which a line of progress is written over."""
    is_moving = False  # the terminal's last line is one of progress
    # of each node its last line of progress that was not written, and when one was
    waiting: dict[int, str] = {}
    written_at: dict[int, float] = {}
    for line in _recent(lines, since):
        text = names.get(line.node, "")
        text += plain_but_colour(line.text) if live else line.text
        if line.kind == "progress" and live:
            yield _REWRITE + text
            is_moving = True
            continue
        if is_moving:
            yield "\n"
            is_moving = False
        if line.kind == "progress":
            next_at = written_at.get(line.node, 0.0) + PROGRESS_SECONDS
            if 0 < line.at < next_at:
                waiting[line.node] = text
                continue
            written_at[line.node] = line.at
            waiting.pop(line.node, None)
        elif line.node in waiting:
            yield f"{waiting.pop(line.node)}\n"
        yield f"{text}\n"
    if is_moving:
        yield "\n"
        return
    for node in sorted(waiting):
        yield f"{waiting[node]}\n"


def _recent(lines: Iterable[Line], since: float) -> Iterator[Line]:
    """The lines from the time `since` on, each as new as the next that has a time."""
    undated: dict[int, list[Line]] = {}
    for line in lines:
        if line.kind == "text" and line.at < since:
            undated.setdefault(line.node, []).append(line)
            continue
        before = undated.pop(line.node, [])
        if line.at >= since:
            yield from before
            if line.kind != "pause":
                yield line
    for node in sorted(undated):
        yield from undated[node]


def progress_text(event: Mapping[str, Any]) -> str:
    """A progress event as one line:
    `step 42/84  loss 0.0054  683 samples/s  00:00:02 left`."""
    parts = [f"{event.get('unit', 'step')} {event['step']}/{event['steps']}"]
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.4f}")
    if event.get("samples_per_second"):
        parts.append(f"{formats.count(event['samples_per_second'])} samples/s")
    if event.get("eta_seconds") and event["step"] < event["steps"]:
        minutes, seconds = divmod(int(event["eta_seconds"]), 60)
        parts.append(f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02} left")
    return "  ".join(parts)
