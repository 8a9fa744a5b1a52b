"""The runs of a home in the order in which they began, with what lists show of each.

Reading ten thousand records takes seconds, so `runs/.index.jsonl` keeps a row a run, beside the
size, times and inode of the `run.json` that it was made from. A row is taken only while these are
as noted and its checksum is right; else it is made again from the record. So the index may be
deleted, cut or damaged at any time, and two who write it at once do no harm."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import rekindle
from rekindle.records import RunRecord, write_atomically
from rekindle.report import outcome, words
from rekindle.report.collect import collect
from rekindle.report.summary import summarised

log = logging.getLogger(__name__)

INDEX = ".index.jsonl"
_FORMAT = [1, rekindle.__version__]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A run as lists show it. `summary` holds the fields of a RunSummary but for the card's path;
    `verdict`, `headline` and `model` are what the index page shows."""

    number: int
    moment: str
    run_id: str
    name: str
    platform: str
    status: str
    started_at: str
    seconds: float
    summary: Mapping[str, Any]
    verdict: outcome.Verdict
    headline: outcome.Headline | None
    version: str
    is_champion: bool

    @classmethod
    def of(cls, record: RunRecord) -> Entry:
        found = collect(record, history=False)
        moment, registration = words.instant(record.started_at), found.registration
        return cls(
            number=record.number,
            moment=moment.isoformat() if moment else record.started_at,
            run_id=record.run_id,
            name=record.name,
            platform=record.platform,
            status=record.status,
            started_at=record.started_at,
            seconds=record.seconds,
            summary=json.loads(summarised(record, found).to_json()),
            verdict=outcome.verdict(record, found),
            headline=outcome.headline(record, found),
            version=registration.version if registration else "",
            is_champion=bool(registration and "champion" in registration.aliases),
        )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Entry:
        """From JSON, as `dataclasses.asdict` has it."""
        headline = fields["headline"] and outcome.Headline(**fields["headline"])
        known = {**fields, "verdict": outcome.Verdict(**fields["verdict"]), "headline": headline}
        return cls(**known)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All runs of a home, oldest first; `unreadable` are ids of those whose record is damaged."""

    entries: tuple[Entry, ...]
    unreadable: tuple[str, ...] = ()


def ledger(home: Path) -> Ledger:
    """The runs under `home`; a record that cannot be read is left out, with a warning."""
    folder = home / "runs"
    known, lines = _lines(folder / INDEX), dict[str, str]()
    entries, unreadable = list[Entry](), list[str]()
    for run_id, stamp in _records(folder):
        line, entry = known.get(run_id, ("", None, None))[0], None
        if line and known[run_id][1] == stamp:
            with contextlib.suppress(TypeError, KeyError, AttributeError):
                entry = Entry.read(known[run_id][2])
        if entry is None:
            try:
                entry = Entry.of(RunRecord.read(folder / run_id / "run.json"))
            except (OSError, ValueError) as error:
                path, why = folder / run_id / "run.json", str(error).splitlines()[0]
                log.warning("%s cannot be read and is left out: %s", path, why)
                unreadable.append(run_id)
                continue
            line = _line(stamp, entry)
        entries.append(entry)
        lines[run_id] = line
    if lines != {run_id: line for run_id, (line, _, _) in known.items()}:
        with contextlib.suppress(OSError):  # a home that is read only, or a full disk
            text = "".join(f"{lines[run_id]}\n" for run_id in sorted(lines))
            write_atomically(folder / INDEX, json.dumps(_FORMAT) + "\n" + text)
    entries.sort(key=lambda entry: (entry.number, entry.moment, entry.run_id))
    return Ledger(tuple(entries), tuple(sorted(unreadable)))


def _records(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """The id of each run that has a record, and what changes when that is written."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                now = os.stat(f"{entry.path}/run.json")  # noqa: PTH116 - thousands of them
                stamp = [now.st_size, now.st_mtime_ns, now.st_ctime_ns, now.st_ino]
                yield entry.name, stamp


def _line(stamp: list[int], entry: Entry) -> str:
    text = json.dumps([stamp, dataclasses.asdict(entry)])
    return f"{zlib.crc32(text.encode()):08x} {text}"


def _lines(path: Path) -> dict[str, tuple[str, Any, Any]]:
    """The sound lines of an index by run, with their stamp and fields; none of another version."""
    try:
        head, *lines = path.read_text(encoding="utf-8").splitlines()
        if json.loads(head) != _FORMAT:
            return {}
    except (OSError, ValueError):
        return {}
    found = {}
    for line in lines:
        if line[:8] == f"{zlib.crc32(line[9:].encode()):08x}":
            with contextlib.suppress(ValueError, KeyError, TypeError):
                stamp, fields = json.loads(line[9:])
                found[fields["run_id"]] = (line, stamp, fields)
    return found
