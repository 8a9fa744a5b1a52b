"""The runs of a home in the order in which they began, with what lists show of each; and
the turns of `rekindle watch`.

Reading ten thousand records takes seconds, so `runs/.index.jsonl` keeps a row a run,
beside the size, times and inode of the `run.json` that it was made from. A row is taken
only while these are as noted and its checksum is right; else it is made again from the
record. So the index may be deleted, cut or damaged at any time, and two who write it at
once do no harm."""

import contextlib
import dataclasses
import json
import logging
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

import rekindle
from rekindle import formats
from rekindle.catalog.prices import PriceBook
from rekindle.errors import first_line
from rekindle.outputs import Cost, Costs
from rekindle.records import Monitored, RunRecord, Turn, write_atomically
from rekindle.report import costs, verdicts
from rekindle.report.collect import collect, summarised

log = logging.getLogger(__name__)

R = TypeVar("R", Turn, Monitored)

INDEX = ".index.jsonl"
# the head of an index; rows of another form or version are made again
_FORMAT = [7, rekindle.__version__]


class Entry(NamedTuple):
    """A run as lists show it: what all of them need, and `body`, JSON that few read."""

    number: int
    moment: str
    run_id: str
    name: str
    platform: str
    status: str
    started_at: str
    seconds: float
    version: str
    is_champion: bool
    promoted: bool
    headline: verdicts.Headline | None
    body: bytes

    @classmethod
    def of(cls, record: RunRecord) -> Self:
        """What the record and those of its steps say."""
        findings = collect(record, history=False)
        moment = formats.instant(record.started_at)
        registration = findings.registration
        verdict = verdicts.verdict(record, findings)
        summary = json.loads(summarised(record, findings).to_json())
        stays = list(costs.stays(record, findings.training))
        return cls(
            number=record.number,
            moment=moment.isoformat() if moment else record.started_at,
            run_id=record.run_id,
            name=record.name,
            platform=record.platform,
            status=record.status,
            started_at=record.started_at,
            seconds=record.seconds,
            version=registration.version if registration else "",
            is_champion=registration is not None and "champion" in registration.aliases,
            promoted=verdict.word == "promoted",
            headline=verdicts.headline(record, findings),
            body=json.dumps([summary, dataclasses.asdict(verdict), stays]).encode(),
        )

    @property
    def summary(self) -> dict[str, Any]:
        """The fields of a RunSummary but for the card's path."""
        fields: dict[str, Any] = json.loads(self.body)[0]
        return fields

    @property
    def verdict(self) -> verdicts.CardVerdict:
        """What came of it."""
        return verdicts.CardVerdict(**json.loads(self.body)[1])

    def cost(self, prices: PriceBook) -> Cost:
        """What a run on a platform cost."""
        stays = (costs.Stay(*fields) for fields in json.loads(self.body)[2])
        return costs.cost_of(self.run_id, self.platform, self.started_at, stays, prices)


@dataclasses.dataclass(frozen=True)
class Ledger:
    """All runs of a home, oldest first;
    `unreadable` are ids of those whose record is damaged."""

    entries: tuple[Entry, ...]
    unreadable: tuple[str, ...] = ()

    def paid(self, prices: PriceBook, name: str = "") -> Costs:
        """What the runs on platforms cost, or those of a name."""
        paid = []
        for entry in self.entries:
            if entry.platform != "local" and name in ("", entry.name):
                paid.append(entry.cost(prices))
        return costs.costs(paid)


def ledger(home: Path) -> Ledger:
    """The runs under `home`; a record that cannot be read is left out, with a warning."""
    folder = home / "runs"
    indexed = _indexed_rows(folder / INDEX)
    lines: dict[str, bytes] = {}
    entries: list[Entry] = []
    unreadable: list[str] = []
    for run_id, stamp in _records(folder):
        row = indexed.get(run_id)
        if row is not None and row.stamp == stamp:
            entry = row.entry
            line = row.line
        else:
            try:
                entry = Entry.of(record_in(folder, run_id))
            except (OSError, ValueError) as error:
                path = folder / run_id / "run.json"
                log.warning("%s cannot be read and is left out: %s", path, first_line(error))
                unreadable.append(run_id)
                continue
            # a record that is written now gets another stamp, and is read again next time
            line = _index_line(stamp, entry)
        entries.append(entry)
        lines[run_id] = line
    if lines != {run_id: row.line for run_id, row in indexed.items()}:
        # ids in order, so that two who write the same runs write the same bytes
        with contextlib.suppress(OSError):  # a home that is read only, or a full disk
            text = b"\n".join(lines[run_id] for run_id in sorted(lines)).decode()
            write_atomically(folder / INDEX, f"{json.dumps(_FORMAT)}\n{text}\n")
    entries.sort(key=lambda entry: (entry.number, entry.moment, entry.run_id))
    return Ledger(tuple(entries), tuple(sorted(unreadable)))


class _IndexedRow(NamedTuple):
    """A line of the index, and what it says: the stamp of the record, and its entry."""

    line: bytes
    stamp: list[int]
    entry: Entry


def _index_line(stamp: list[int], entry: Entry) -> bytes:
    """A checksum, then as JSON the stamp and what all lists need, then what few read."""
    content = json.dumps([stamp, *entry[:-1]]).encode() + b"\t" + entry.body
    return b"%08x " % zlib.crc32(content) + content


def path_of(home: Path, slug: str) -> Path:
    """The file of the turns of a name."""
    return home / "watch" / f"{slug}.jsonl"


def turns(path: Path) -> list[Turn]:
    """The turns in such a file, the oldest first, each as it ended;
    none where there is no file."""
    # a turn is written when it begins and when it ends
    return list({turn.turn: turn for turn in _read(path, Turn)}.values())


def checks(home: Path) -> dict[str, list[Monitored]]:
    """What monitors found under `home`, the oldest first, by the name of the config."""
    checks_by_name: dict[str, list[Monitored]] = {}
    for path in sorted((home / "monitored").glob("*.jsonl")):
        with contextlib.suppress(OSError):
            for check in _read(path, Monitored):
                checks_by_name.setdefault(check.name, []).append(check)
    return checks_by_name


def _read(path: Path, kind: type[R]) -> Iterator[R]:
    """The records in the lines of a file, if it is there; damaged ones are left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # cut short, or of another version
                yield kind.model_validate_json(line)


def record_in(folder: Path, run_id: str) -> RunRecord:
    """The record of a run in the folder of all runs;
    ValueError where it calls itself another."""
    record = RunRecord.read(folder / run_id / "run.json")
    if record.run_id != run_id:
        raise ValueError(f"the record of {run_id} calls itself {record.run_id!r}")
    return record


def _records(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """The id of each run that has a record, and what changes when that is written."""
    with (
        contextlib.suppress(FileNotFoundError, NotADirectoryError),
        os.scandir(folder) as runs,
    ):
        for run in runs:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                status = os.stat(f"{run.path}/run.json")  # noqa: PTH116 - thousands of them
                # the inode changes with each record, because it is replaced as a whole
                stamp = [
                    status.st_size,
                    status.st_mtime_ns,
                    status.st_ctime_ns,
                    status.st_ino,
                ]
                yield run.name, stamp


def _indexed_rows(path: Path) -> dict[str, _IndexedRow]:
    """The sound rows of an index by run; none of another version."""
    try:
        head, *lines = path.read_bytes().splitlines()
        if json.loads(head) != _FORMAT:
            return {}
    except (OSError, ValueError):
        return {}
    indexed = {}
    for line in lines:
        checksum = line[:8]
        content = line[9:]
        if checksum != b"%08x" % zlib.crc32(content):
            continue
        # only what lists need is parsed: the body of thousands of runs is not read
        listed, _, body = content.partition(b"\t")
        with contextlib.suppress(ValueError, TypeError):  # written by other code
            stamp, *fields, metric = json.loads(listed)
            headline = metric and verdicts.Headline(*metric)
            entry = Entry._make((*fields, headline, body))
            indexed[entry.run_id] = _IndexedRow(line, stamp, entry)
    return indexed
