"""A source becomes examples: read, window, normalise, split, validate; in bounded memory.

The source is cut into pieces (pieces.py), workers (executor.py) read them
(piece_examples.py), and their files and counts are put together here; `summary.json` is
written last. The same source gives the same bytes with every executor. All that is unfit
in a source is in one DataError.

Workers write a piece into one file a split. A split by time takes two rounds: pieces are
written undivided, and divided when the times of all records have said where."""

import collections
import itertools
import logging
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data.duplicates import drop_copies, find_leaks
from rekindle.data.examples import SPLITS, SUMMARY, ExamplesPart, ExamplesSummary
from rekindle.data.executor import WORTH_BYTES, Executor, Local, Order, code, executor_of
from rekindle.data.files import combined
from rekindle.data.hub import HubSource
from rekindle.data.normalise import label_order
from rekindle.data.piece_examples import UNDIVIDED, Piece, filters_rows, shape_of
from rekindle.data.pieces import cut, source_of
from rekindle.data.quarantine import leave_out
from rekindle.data.records import Span, before
from rekindle.data.roles import reads_images
from rekindle.data.source import FileSource, open_source
from rekindle.data.split import Times, time_cuts
from rekindle.data.store import Entry, PieceStore
from rekindle.data.validate import check_splits
from rekindle.data.window import Window, parse_window
from rekindle.errors import DataError, RequestError
from rekindle.launch.events import emit
from rekindle.launch.rendezvous import Rendezvous
from rekindle.modalities import load_modality
from rekindle.modalities.base import Shape
from rekindle.rows.findings import Findings
from rekindle.spec.checks import RESERVED
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

_WORKER = "rekindle.data.piece_examples"
# settings that are applied once all pieces are read, so no piece depends on them
_APPLIED_AFTER_READING = ("on_bad_rows", "max_bad_rows", "duplicates")


def ingest(
    data: DataSpec, modality: str, window: str, out: Path, *, source: str = "", store: str = ""
) -> ExamplesSummary | None:
    """Write the examples of a source, or of a mixture, and their summary into `out`;
    returns the summary, on several nodes only on the first.

    `window` is the text of a resolved window, or "" for all records. `source` is the
    fingerprint that the data have to have; "" for any. `store` is a path or URI that all
    workers reach, and which keeps pieces for the next time; "" for neither. Raises
    DataError with everything that is wrong with the source, or where its fingerprint is
    another."""
    reserved = [name for name in data.slices if name in RESERVED]
    if reserved:
        raise RequestError(
            f"`{reserved[0]}` cannot be a slice",
            where="data.slices",
            fix=f"rename the column; {', '.join(reserved)} means something else in the examples",
        )
    out.mkdir(parents=True, exist_ok=True)
    # the summary goes first: without it what an interrupted run leaves is not complete
    (out / SUMMARY).unlink(missing_ok=True)
    for file in out.glob("*.arrow"):
        file.unlink()
    is_first_node = Rendezvous.current().node_rank == 0
    # in the folder of the output, hence on its disk: files get there by hard links
    with tempfile.TemporaryDirectory(prefix=".pieces-", dir=out) as scratch:
        ingestion = _Ingestion(data, modality, window, source, scratch)
        if ingestion.can_be_cut and store:
            ingestion.store = PieceStore(store)
        # the first node reads alone what cannot be cut
        if not is_first_node and not ingestion.can_be_cut:
            return None
        ingestion.run(out)
        if not is_first_node:
            return None
        summary = ingestion.summarise(out)
    summary.write(out / SUMMARY)
    counts = ", ".join(f"{split} {rows:,}" for split, rows in summary.rows.items())
    classes = f"; {len(summary.labels)} classes" if summary.labels else ""
    log.info("examples: %s%s", counts, classes)
    return summary


class _Part:
    """One source of the data, of which a mixture has several: its pieces, and what
    workers made of them. A source that cannot be cut is one piece."""

    items: list[dict[str, Any]]
    """What workers get, an item a piece; `key` names its entry in the store."""
    entries: list[Entry]
    """What workers return, an entry a piece (`Piece.to_json`)."""
    hashes: dict[str, str]
    """The hash of each file, by path."""

    def __init__(self, data: DataSpec, modality: str, window: Window | None, number: int) -> None:
        self.data = data
        self.modality = modality
        self.window = window if data.window else None
        self.items = [{"key": f"whole-{number}"}]
        self.executor: Executor = Local(1)
        self.entries = []
        self.opened = open_source(data, modality, self.window)
        self.filters_rows = filters_rows(data, self.window)
        self.can_be_cut = isinstance(self.opened, FileSource | HubSource)
        self.hashes = {}

    def cut(self, order: Order, store: PieceStore, expected: str) -> Order:
        """Cut the source into pieces, which become the items; returns the order with what
        workers need for them. `expected` is the fingerprint that the data have to
        have."""
        _, size_bytes = self.opened.extent()
        self.executor = executor_of(self.data, store, size_bytes // WORTH_BYTES)
        pieces, self.hashes, location = cut(self.opened, self.data, self.executor)
        order = {**order, **location}
        # all images get the shape of the first, on which workers of several pieces have
        # to agree
        has_images = reads_images(self.data, self.modality)
        if has_images and order["shape"] is None and len(pieces) > 1:
            shape = self._first_shape(order, [piece.item() for piece in pieces])
            order = {**order, "shape": shape}
        # An entry of the store is found by a hash of all that its bytes depend on. Left
        # out are settings that change no piece, or only which pieces there are.
        ignored = {
            "source",
            "window",
            "shard_rows",
            "shuffle_gb",
            *_APPLIED_AFTER_READING,
            *DataSpec.EXECUTION,
        }
        settings = [
            self.data.model_dump(mode="json", exclude=ignored),
            self.modality,
            order["shape"],
        ]
        if self.filters_rows:
            settings.append(order["window"])
        # Hashes of pieces do not cover files that their rows name. The fingerprint of the
        # data does.
        if self.opened.names_files:
            settings.append(expected)
        # other code may make other examples of the same bytes
        depends_on = [settings, code()]
        self.items = [piece.item(depends_on) for piece in pieces]
        return order

    def fingerprint_as_read(self) -> str:
        """The fingerprint of the data that workers read, made as `fingerprint` makes it."""
        hashes = [entry["seen"] for entry in self.entries if entry["seen"]]
        hash_of_rows = combined(hashes) if hashes else ""
        if self.filters_rows:
            return hash_of_rows
        if isinstance(self.opened, FileSource):
            return self.opened.fingerprint_of(self.hashes, hash_of_rows)
        return self.opened.fingerprint()

    def _first_shape(self, order: Order, items: Sequence[Entry]) -> Shape | None:
        """The shape of the first image of the source; None where it has no image."""
        for item in items:
            shape = self._shape_in(order, item)
            if shape:
                return shape
        return None

    def _shape_in(self, order: Order, item: Entry) -> Shape | None:
        """The shape of the first image of a piece."""
        piece = Piece(self.data, self.modality, self.window, None)
        for _ in piece.examples(source_of(order, item, self.data, self.modality)):
            if piece.normaliser.image_shape:
                break
        return piece.normaliser.image_shape


class _Ingestion:
    """One call of `ingest`: all sources, and what workers made of all their pieces.

    `expected` is the fingerprint that the data have to have, or ""."""

    new_pieces: str
    """How many pieces were not in the store yet, in words; "" for a single piece."""
    left_out: collections.Counter[str]
    """Rows in no split that are no fault, by reason: `duplicate`, `gap`."""
    shape: Shape | None
    """The shape of the first image."""
    files: list[ExamplesPart]
    """Files of examples whose paths are, until `_take_files`, keys of the store."""

    def __init__(
        self, data: DataSpec, modality: str, window: str, expected: str, root: str
    ) -> None:
        self.data = data
        self.modality = modality
        self.window = parse_window(window)
        self.expected = expected
        self.store = PieceStore(root)
        self.parts: list[_Part] = []
        for number, part in enumerate(data.parts):
            self.parts.append(_Part(part, modality, self.window, number))
        self.can_be_cut = all(part.can_be_cut for part in self.parts)
        self.findings = Findings()
        self.span = Span()
        self.fingerprint_as_read = ""
        self.new_pieces = ""
        self.bad_rows: dict[str, int] = {}
        self.left_out = collections.Counter()
        self.shape = None
        self.items: list[dict[str, Any]] = []
        self.entries: list[Entry] = []
        self.files = []
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def run(self, out: Path) -> None:
        """Have all pieces read, divided by time if need be, and searched for copies;
        writes a list of the bad rows that are left out into `out`."""
        order = self._read_parts()
        self.fingerprint_as_read = combined([part.fingerprint_as_read() for part in self.parts])
        if self.can_be_cut and len(self.items) > 1:
            new = sum(entry["new"] for entry in self.entries)
            self.new_pieces = f"{new} of {len(self.items)} new"
            log.info("%d pieces of the source, %d of them new", len(self.items), new)
        read_rows = sum(self._rows(name) for name in (UNDIVIDED, *SPLITS))
        self.bad_rows = leave_out(self.data, self.findings, read_rows, out)
        if self.data.split.by == "time" and not self.findings and self._rows(UNDIVIDED):
            self._divide(order, self.parts[0].executor)
        self.files = self._files_in_store()
        for entry in self.entries:
            for split, counts in entry["class_rows"].items():
                self.class_rows[split].update(counts)
        self._find_copies(self.parts[0].executor)

    def _read_parts(self) -> Order:
        """Have the pieces of all parts read; returns the order of the last part, which of
        a split by time is the only one."""
        order: Order = {}
        for number, part in enumerate(self.parts):
            order = {
                "data": part.data.model_dump(mode="json"),
                "modality": self.modality,
                "window": str(part.window or ""),
                "store": self.store.root,
                "shape": self.shape,
            }
            if self.can_be_cut:
                order = part.cut(order, self.store, self.expected)
                # Cutting has hashed the files. Where nothing else is in the fingerprint,
                # changed data are refused before they are read.
                is_known = not (part.filters_rows or part.opened.names_files)
                if len(self.parts) == 1 and is_known:
                    self._check_unchanged(part.fingerprint_as_read())
            work = digest([order, part.items])
            part.entries = part.executor.map(f"{_WORKER}:ingest_piece", order, part.items, work)
            for entry in part.entries:
                findings = Findings.of_json(entry["findings"])
                self.findings.include(findings, findings.rows)
                self.span.join(Span(*entry["span"]))
                if self.shape is None:
                    self.shape = shape_of(entry["shape"])
            self.items += [{**item, "source": number} for item in part.items]
            self.entries += part.entries
        return order

    def _find_copies(self, executor: Executor) -> None:
        """Leave copies of examples out, as `data.duplicates` asks; where it keeps them,
        note those that lie in two splits."""
        data = self.data
        if data.duplicates != "keep":
            if not self.findings:
                rows = _count(self.files)
                self.files, dropped = drop_copies(self.store, self.files, data.duplicates, executor)
                for split, counts in dropped.items():
                    self.class_rows[split] -= counts
                self.left_out["duplicate"] = rows - _count(self.files)
            return
        # a split by the hash of the content puts copies into one split, any other may not
        by_key = any(part.columns.group or part.columns.key for part in data.parts)
        if by_key or data.split.by != "hash":
            self.findings.include(find_leaks(self.store, self.files, executor), 0)

    def _divide(self, order: Order, executor: Executor) -> None:
        """Find the times at which the splits of all pieces together begin, and have each
        piece divided there."""
        keys = [{"key": item["key"]} for item in self.items]

        # The cuts are found digit by digit (`order_statistic`), by counts that workers
        # make of their own pieces, so no worker has to send its times.
        def counts(prefix: int, bits: int) -> Times:
            question = {"store": self.store.root, "prefix": prefix, "bits": bits}
            work = digest([question, keys])
            total = np.zeros(1 << 16, np.int64)
            for digits, occurrences in executor.map(f"{_WORKER}:count_times", question, keys, work):
                total[digits] += np.asarray(occurrences, np.int64)
            return total

        cuts = time_cuts(counts, self._rows(UNDIVIDED), self.data.split)
        gap = self.data.split.gap
        gaps = []
        if gap:
            gaps = [before(cut, gap) for cut in cuts]
        divided_items = []
        for item in self.items:
            key = digest([item["key"], cuts, gaps])
            divided_items.append({"key": key, "from": item["key"], "source": item["source"]})
        self.items = divided_items
        order = {**order, "cuts": cuts, "gaps": gaps}
        work = digest(self.items)
        self.entries = executor.map(f"{_WORKER}:divide_piece", order, self.items, work)
        self.left_out["gap"] = sum(entry["gap"] for entry in self.entries)

    def _check_unchanged(self, fingerprint_as_read: str) -> None:
        """Raise DataError where the data have another fingerprint than this run's."""
        if self.expected and self.expected != fingerprint_as_read:
            raise DataError(
                "the data changed between `fingerprint` and `ingest`",
                where=self.data.named,
                fix="run the same command again; who writes files aside and renames them "
                "changes them in one instant",
            )

    def _rows(self, name: str) -> int:
        """The rows of a split, or of `UNDIVIDED`, in all pieces."""
        return sum(sum(entry["batches"].get(name, [])) for entry in self.entries)

    def summarise(self, out: Path) -> ExamplesSummary:
        """Put the files into `out`; returns their summary. Raises DataError with all that
        is wrong with the source."""
        data = self.data
        # with findings a reader may have stopped early, and the fingerprint is of a part
        if not self.findings:
            self._check_unchanged(self.fingerprint_as_read)
        files = self._take_files(out)
        label_type = load_modality(self.modality).label_type
        is_labelled = label_type is not None and not data.is_numeric
        rows = dict.fromkeys(SPLITS, 0)
        for file in files:
            rows[file.split] += sum(file.batches)
        labels: tuple[str, ...] = ()
        if is_labelled:
            labels = label_order(data.labels, set[str]().union(*self.class_rows.values()))
        # two spellings may be meant as two classes, so this is a notice and not an error
        alike = _alike(labels)
        if alike and not data.labels:
            emit("notice", text=f"{alike} may be one class: correct them, or set data.labels")
        left_out = {kind: count for kind, count in self.left_out.items() if count}
        self._check_rows(rows, labels, left_out)
        self.findings.raise_if_any()
        class_rows = {}
        if is_labelled:
            for split in SPLITS:
                counts = self.class_rows[split]
                class_rows[split] = {label: counts[label] for label in labels}
        return ExamplesSummary(
            modality=self.modality,
            window=str(self.window or ""),
            labels=labels,
            rows=rows,
            source=self.expected or digest([file.sha256 for file in files]),
            slices=data.slices,
            image_shape=self.shape,
            files=tuple(files),
            bad_rows=self.bad_rows,
            pieces=self.new_pieces,
            faulty=self.findings.rows if self.bad_rows else 0,
            left_out=left_out,
            class_rows=class_rows,
        )

    def _check_rows(
        self, rows: Mapping[str, int], labels: Sequence[str], left_out: Mapping[str, int]
    ) -> None:
        """Add a finding where there are no rows, or a split lacks rows or classes."""
        data = self.data
        if not sum(rows.values()):
            if self.window is not None and self.span.rows:
                self.findings.note(
                    f"the window {self.window} selects none of {self.span.rows:,} records",
                    where=f"they span {self.span}",
                    fix="move data.window.end, or lower data.window.offset",
                )
            elif not self.findings:
                self.findings.note(
                    "the source holds no records", where=data.named, fix="check data.source"
                )
        # with findings, what a split lacks may be among the rows that were refused
        elif not self.findings:
            # Where each word of a text has a label, a rare label is in few rows: only the
            # training split has to have all of them.
            label_type = load_modality(self.modality).label_type
            has_lists = label_type is not None and pa.types.is_list(label_type)
            complete = ("train",) if has_lists else SPLITS
            # a source's own splits may lack validation
            may_lack_validation = data.split.by == "source" or data.split.validation == 0
            required = ("train", "test") if may_lack_validation else SPLITS
            check_splits(rows, self.class_rows, labels, required, complete, self.findings, left_out)

    def _files_in_store(self) -> list[ExamplesPart]:
        """The files of all pieces, still in the store."""
        files = []
        for split in SPLITS:
            name = f"{split}.arrow"
            for number, (item, entry) in enumerate(zip(self.items, self.entries, strict=True)):
                batches = entry["batches"].get(split, [])
                # every split has at least one file, though it may be empty
                if name in entry["files"] and (batches or number == 0):
                    file = ExamplesPart(
                        path=item["key"],
                        split=split,
                        batches=tuple(batches),
                        sha256=entry["files"][name],
                        source=item["source"],
                    )
                    files.append(file)
        return files

    def _take_files(self, out: Path) -> list[ExamplesPart]:
        """Put the files of the store into `out`; returns them with their paths there."""
        numbers = {split: itertools.count() for split in SPLITS}
        taken_files = []
        for file in self.files:
            path = f"{file.split}-{next(numbers[file.split]):05}.arrow"
            self.store.take(file.path, f"{file.split}.arrow", file.sha256, out / path)
            taken_files.append(file.model_copy(update={"path": path}))
        return taken_files


def _count(files: Iterable[ExamplesPart]) -> int:
    return sum(sum(file.batches) for file in files)


def _alike(labels: Sequence[str]) -> str:
    """The first labels that differ only in capitals, in spaces around them or in a final
    `.0`, in words; "" for none."""
    by_spelling = collections.defaultdict[str, list[str]](list)
    for label in labels:
        normalised = re.sub(r"(?<=\d)\.0+$", "", label.strip().casefold())
        by_spelling[normalised].append(label)
    for spellings in by_spelling.values():
        if len(spellings) > 1:
            return " and ".join(repr(label) for label in spellings)
    return ""
