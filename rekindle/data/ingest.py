"""A source becomes examples: read, window, normalise, split, validate; in bounded memory.

The source is cut into pieces (pieces.py), an executor has them read, and their files and
counts are put together here: `summary.json` is last. The same source gives the same bytes
with every executor. Anything unfit makes `ingest` raise a single DataError. A split by
time needs the times of all records first: pieces are kept undivided until the cuts are
known."""

import collections
import dataclasses
import itertools
import logging
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rekindle.data import examples
from rekindle.data.duplicates import drop_copies, find_leaks
from rekindle.data.examples import SPLITS, SUMMARY, ExamplesPart, ExamplesSummary, ExamplesWriter
from rekindle.data.executor import WORTH_BYTES, Executor, Local, Order, code, executor_of
from rekindle.data.files import combined
from rekindle.data.hub import HubSource
from rekindle.data.normalise import Normaliser, label_order
from rekindle.data.pieces import check_versions, cut, source_of
from rekindle.data.quarantine import leave_out
from rekindle.data.records import RecordsHash, Span, before, inside, read_times
from rekindle.data.roles import reads_images, time_column, wanted_columns
from rekindle.data.source import FileSource, open_source
from rekindle.data.split import Times, digit_counts, hash_splits, time_cuts, time_splits
from rekindle.data.store import Entry, PieceStore, made_once
from rekindle.data.validate import check_splits
from rekindle.data.window import Window, parse_window
from rekindle.errors import DataError, RequestError
from rekindle.launch.events import emit
from rekindle.launch.rendezvous import Rendezvous
from rekindle.modalities import load_modality
from rekindle.modalities.base import Shape
from rekindle.rows.columns import Source
from rekindle.rows.findings import Findings
from rekindle.spec.checks import RESERVED
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

_TIME = "_rekindle_time"  # the column of times of an undivided piece
_TIMES = "times.npy"
_UNDIVIDED = "all"
_AFTERWARDS = ("on_bad_rows", "max_bad_rows", "duplicates")  # judged once all is read


def ingest(
    data: DataSpec, modality: str, window: str, out: Path, *, source: str = "", store: str = ""
) -> ExamplesSummary | None:
    """Write the examples of a source, or of a mixture, into `out`; returns, and writes,
    their summary. `window`: the text of a resolved window, "" for all; `source`: a
    fingerprint to carry along; `store`: a path or URI that keeps pieces for the next
    time, and which all workers reach. On several nodes all but the first return None.
    Raises DataError with everything that is wrong with the source, and where what was
    read has another fingerprint."""
    reserved = [name for name in data.slices if name in RESERVED]
    if reserved:
        raise RequestError(
            f"`{reserved[0]}` cannot be a slice",
            where="data.slices",
            fix=f"rename the column; {', '.join(reserved)} means something else in the examples",
        )
    out.mkdir(parents=True, exist_ok=True)
    # first: a folder without its summary is not complete
    (out / SUMMARY).unlink(missing_ok=True)
    for file in out.glob("*.arrow"):
        file.unlink()
    # within the output, so that files can be linked to where they belong
    with tempfile.TemporaryDirectory(prefix=".pieces-", dir=out) as scratch:
        ingestion = _Ingestion(data, modality, window, source, scratch)
        if ingestion.in_pieces and store:
            ingestion.store = PieceStore(store)
        # what is not in pieces the first node reads alone
        if Rendezvous.current().node_rank and not ingestion.in_pieces:
            return None
        ingestion.run(out)
        if Rendezvous.current().node_rank:
            return None
        summary = ingestion.summarise(out)
    summary.write(out / SUMMARY)
    counts = ", ".join(f"{split} {rows:,}" for split, rows in summary.rows.items())
    classes = f"; {len(summary.labels)} classes" if summary.labels else ""
    log.info("examples: %s%s", counts, classes)
    return summary


class _Part:
    """One of the sources, its pieces, and what came of them; uncut, it is one piece."""

    def __init__(self, data: DataSpec, modality: str, window: Window | None, number: int) -> None:
        self.data = data
        self.modality = modality
        self.window = window if data.window else None
        self.items: list[dict[str, Any]] = [{"key": f"whole-{number}"}]
        self.executor: Executor = Local(1)
        self.entries: list[Entry] = []
        self.opened = open_source(data, modality, self.window)
        self.by_column = _by_column(data, self.window)
        self.in_pieces = isinstance(self.opened, FileSource | HubSource)
        self.contents: dict[str, str] = {}

    def cut(self, order: dict[str, Any], store: PieceStore, source: str) -> None:
        """Have the source measured: its pieces become the items,
        and `order` is for them."""
        _, size_bytes = self.opened.extent()
        self.executor = executor_of(self.data, store, size_bytes // WORTH_BYTES)
        pieces, self.contents, location = cut(self.opened, self.data, self.executor)
        order |= location
        # workers that read apart have to agree on it
        has_images = reads_images(self.data, self.modality)
        if has_images and order["shape"] is None and len(pieces) > 1:
            order["shape"] = self._first_shape(order, [piece.item() for piece in pieces])
        # of no effect on a piece, or of one that its content shows
        ignored = {
            "source",
            "window",
            "shard_rows",
            "shuffle_gb",
            *_AFTERWARDS,
            *DataSpec.EXECUTION,
        }
        settings = [
            self.data.model_dump(mode="json", exclude=ignored),
            self.modality,
            order["shape"],
        ]
        if self.by_column:
            settings.append(order["window"])
        if self.opened.names_files:  # and what they hold is not known before
            settings.append(source)
        # other code may make other examples of the same bytes
        made_of = [settings, code()]
        self.items = [piece.item(made_of) for piece in pieces]

    def fingerprint_as_read(self) -> str:
        """The fingerprint of what the pieces read."""
        hashes = [entry["seen"] for entry in self.entries if entry["seen"]]
        rows = combined(hashes) if hashes else ""
        if self.by_column:
            return rows
        if isinstance(self.opened, FileSource):
            return self.opened.fingerprint_of(self.contents, rows)
        return self.opened.fingerprint()

    def _first_shape(self, order: Order, items: Sequence[Entry]) -> Shape | None:
        """The shape of the first image of the
        source, which decides for all that follow."""
        for item in items:
            shape = self._shape_in(order, item)
            if shape:
                return shape
        return None

    def _shape_in(self, order: Order, item: Entry) -> Shape | None:
        """The shape of the first image of a piece."""
        piece = _Piece(self.data, self.modality, self.window, None)
        for _ in piece.examples(source_of(order, item, self.data, self.modality)):
            if piece.normaliser.image_shape:
                break
        return piece.normaliser.image_shape


class _Ingestion:
    """One run of `ingest`: the parts of the source, and what came of all of them."""

    def __init__(self, data: DataSpec, modality: str, window: str, source: str, root: str) -> None:
        self.data = data
        self.modality = modality
        self.window = parse_window(window)
        self.source = source
        self.store = PieceStore(root)
        self.parts = [
            _Part(part, modality, self.window, number) for number, part in enumerate(data.parts)
        ]
        self.in_pieces = all(part.in_pieces for part in self.parts)
        self.findings = Findings()
        self.span = Span()
        self.seen = ""  # the fingerprint of what was read
        self.pieces = ""  # how many are new, in words
        self.bad_rows: dict[str, int] = {}
        self.left_out = collections.Counter[str]()
        self.shape: Shape | None = None
        self.items: list[dict[str, Any]] = []
        self.entries: list[Entry] = []
        self.files: list[ExamplesPart] = []  # whose paths are entries of the store
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def run(self, out: Path) -> None:
        """Have all pieces read, divided and compared;
        `out` gets a list of rows left out."""
        order = self._read_parts()
        self.seen = combined([part.fingerprint_as_read() for part in self.parts])
        if self.in_pieces and len(self.items) > 1:
            new = sum(entry["new"] for entry in self.entries)
            self.pieces = f"{new} of {len(self.items)} new"
            log.info("%d pieces of the source, %d of them new", len(self.items), new)
        read_rows = sum(self._rows(name) for name in (_UNDIVIDED, *SPLITS))
        self.bad_rows = leave_out(self.data, self.findings, read_rows, out)
        if self.data.split.by == "time" and not self.findings and self._rows(_UNDIVIDED):
            self._divide(order, self.parts[0].executor)
        self.files = self._files_in_store()
        for entry in self.entries:
            for split, counts in entry["class_rows"].items():
                self.class_rows[split].update(counts)
        self._find_copies(self.parts[0].executor)

    def _read_parts(self) -> Order:
        """Have the pieces of all parts read; returns the order of the last part."""
        order: dict[str, Any] = {}
        for number, part in enumerate(self.parts):
            order = {
                "data": part.data.model_dump(mode="json"),
                "modality": self.modality,
                "window": str(part.window or ""),
                "store": self.store.root,
                "shape": self.shape,
            }
            if self.in_pieces:
                part.cut(order, self.store, self.source)
                # whose fingerprint is known before rows are read
                if len(self.parts) == 1 and not (part.by_column or part.opened.names_files):
                    self._check_unchanged(part.fingerprint_as_read())
            work = digest([order, part.items])
            part.entries = part.executor.map(f"{__name__}:ingest_piece", order, part.items, work)
            for entry in part.entries:
                findings = Findings.of_json(entry["findings"])
                self.findings.include(findings, findings.rows)
                self.span.join(Span(*entry["span"]))
                if self.shape is None:
                    self.shape = _shape_of(entry["shape"])
            self.items += [{**item, "source": number} for item in part.items]
            self.entries += part.entries
        return order

    def _find_copies(self, executor: Executor) -> None:
        """Have all workers look for copies, which are left out,
        or noted if in two splits."""
        data = self.data
        if data.duplicates != "keep":
            if not self.findings:
                rows = _count(self.files)
                self.files, dropped = drop_copies(self.store, self.files, data.duplicates, executor)
                for split, counts in dropped.items():
                    self.class_rows[split] -= counts
                self.left_out["duplicate"] = rows - _count(self.files)
            return
        by_key = any(part.columns.group or part.columns.key for part in data.parts)
        if by_key or data.split.by != "hash":  # else copies are together
            self.findings.include(find_leaks(self.store, self.files, executor), 0)

    def _divide(self, order: Order, executor: Executor) -> None:
        """Have all pieces divided by time, at the cuts that all of them together have."""
        # one cut for all pieces, found by counts of digits: no worker sends its times
        keys = [{"key": item["key"]} for item in self.items]

        def counts(prefix: int, bits: int) -> Times:
            question = {"store": self.store.root, "prefix": prefix, "bits": bits}
            work = digest([question, keys])
            total = np.zeros(1 << 16, np.int64)
            for digits, times in executor.map(f"{__name__}:count_times", question, keys, work):
                total[digits] += np.asarray(times, np.int64)
            return total

        cuts = time_cuts(counts, self._rows(_UNDIVIDED), self.data.split)
        gap = self.data.split.gap
        gaps = [before(cut, gap) for cut in cuts] if gap else []
        divided_items = []
        for item in self.items:
            key = digest([item["key"], cuts, gaps])
            divided_items.append({"key": key, "from": item["key"], "source": item["source"]})
        self.items = divided_items
        order = {**order, "cuts": cuts, "gaps": gaps}
        work = digest(self.items)
        self.entries = executor.map(f"{__name__}:divide_piece", order, self.items, work)
        self.left_out["gap"] = sum(entry["gap"] for entry in self.entries)

    def _check_unchanged(self, seen: str) -> None:
        """Raise DataError where what was read has another fingerprint than this run's."""
        if self.source and self.source != seen:
            raise DataError(
                "the data changed between `fingerprint` and `ingest`",
                where=self.data.named,
                fix="run the same command again; who writes files aside and renames them "
                "changes them in one instant",
            )

    def _rows(self, name: str) -> int:
        """The rows of a split, or of `_UNDIVIDED`, in all pieces."""
        return sum(sum(entry["batches"].get(name, [])) for entry in self.entries)

    def summarise(self, out: Path) -> ExamplesSummary:
        """Take the files to `out`; returns their summary.
        Raises DataError if any is unfit."""
        data = self.data
        if not self.findings:  # else what was read may not be all
            self._check_unchanged(self.seen)
        files = self._take_files(out)
        label_type = load_modality(self.modality).label_type
        is_labelled = label_type is not None and not data.is_numeric
        rows = dict.fromkeys(SPLITS, 0)
        for file in files:
            rows[file.split] += sum(file.batches)
        labels: tuple[str, ...] = ()
        if is_labelled:
            labels = label_order(data.labels, set[str]().union(*self.class_rows.values()))
        # a spelling is no fault, but two classes of one are seldom meant
        alike = _alike(labels)
        if alike and not data.labels:
            emit("notice", text=f"{alike} may be one class: correct them, or set data.labels")
        left_out = {kind: count for kind, count in self.left_out.items() if count}
        self._check_rows(rows, labels, left_out)
        self.findings.raise_if_any()
        class_rows = {}
        for split in SPLITS if is_labelled else ():
            counts = self.class_rows[split]
            class_rows[split] = {label: counts[label] for label in labels}
        return ExamplesSummary(
            modality=self.modality,
            window=str(self.window or ""),
            labels=labels,
            rows=rows,
            source=self.source or digest([file.sha256 for file in files]),
            slices=data.slices,
            image_shape=self.shape,
            files=tuple(files),
            bad_rows=self.bad_rows,
            pieces=self.pieces,
            faulty=self.findings.rows if self.bad_rows else 0,
            left_out=left_out,
            class_rows=class_rows,
        )

    def _check_rows(
        self, rows: Mapping[str, int], labels: Sequence[str], left_out: Mapping[str, int]
    ) -> None:
        """Note that there are no rows, or what the splits lack."""
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
        elif not self.findings:  # rows that were refused are missing from every split
            # where each part of a content has a label, a rare one is in few rows, and need not
            # be in those of every split
            label_type = load_modality(self.modality).label_type
            has_lists = label_type is not None and pa.types.is_list(label_type)
            complete = ("train",) if has_lists else SPLITS
            # a source's own splits may lack validation
            may_lack_validation = data.split.by == "source" or data.split.validation == 0
            required = ("train", "test") if may_lack_validation else SPLITS
            check_splits(rows, self.class_rows, labels, required, complete, self.findings, left_out)

    def _files_in_store(self) -> list[ExamplesPart]:
        """The files of all pieces, as in the store;
        the first piece's also where empty."""
        files = []
        for split in SPLITS:
            name = f"{split}.arrow"
            for number, (item, entry) in enumerate(zip(self.items, self.entries, strict=True)):
                batches = entry["batches"].get(split, [])
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
        """The files, taken from the store to `out`."""
        numbers = {split: itertools.count() for split in SPLITS}
        taken_files = []
        for file in self.files:
            path = f"{file.split}-{next(numbers[file.split]):05}.arrow"
            self.store.take(file.path, f"{file.split}.arrow", file.sha256, out / path)
            taken_files.append(file.model_copy(update={"path": path}))
        return taken_files


def _shape_of(values: Sequence[int] | None) -> Shape | None:
    """The shape that JSON holds as a list."""
    if not values:
        return None
    height, width, channels = values
    return height, width, channels


def _count(files: Iterable[ExamplesPart]) -> int:
    return sum(sum(file.batches) for file in files)


@made_once
def ingest_piece(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """Of a piece of the source, or of all of it. Raises DataError where files are not
    those that were measured."""
    data = DataSpec.model_validate(order["data"])
    window = parse_window(order["window"])
    source = source_of(order, item, data, order["modality"])
    piece = _Piece(data, order["modality"], window, order["shape"])
    check_versions(source)
    # checked before and behind: no file may change while it is read
    piece.write(source, folder)
    check_versions(source)
    if isinstance(source, FileSource) and not _by_column(data, window):
        piece.seen = source.named
    return piece.to_json()


def _by_column(data: DataSpec, window: Window | None) -> bool:
    """Whether a column says which records lie in the window."""
    return window is not None and "{window" not in data.source


class _Splits:
    """Writes tables into a file a split, and counts."""

    def __init__(self, writer: ExamplesWriter) -> None:
        self.writer = writer
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def add(self, table: pa.Table, split_N: npt.NDArray[np.int8]) -> None:
        """Write the rows, each into the split with its number."""
        names = pa.DictionaryArray.from_arrays(pa.array(split_N), pa.array(SPLITS))
        table = table.append_column("split", names.cast(pa.string()))
        for number, split in enumerate(SPLITS):
            is_in_N = split_N == number
            if is_in_N.any():
                part = table if is_in_N.all() else table.filter(pa.array(is_in_N))
                self.writer.write(split, part)
                self.class_rows[split].update(examples.label_counts(part))


class _Piece:
    """One reading of rows into files, and what is known of it."""

    def __init__(
        self, data: DataSpec, modality: str, window: Window | None, shape: Sequence[int] | None
    ) -> None:
        self.data = data
        self.modality = modality
        self.window = window
        self.findings = Findings()
        self.span = Span()
        self.seen = ""
        self.normaliser = Normaliser(data, modality, self.findings, _shape_of(shape))
        self.batches: dict[str, list[int]] = {}
        self.class_rows: Mapping[str, Mapping[str, int]] = {}

    def write(self, source: Source, folder: Path) -> None:
        """Write the examples that `source` gives: divided, or with their times."""
        schema = examples.schema_of(self.modality, self.data.slices, self.data.is_numeric)
        if self.data.split.by == "time":
            self._write_undivided(source, folder, schema)
            return
        with ExamplesWriter(folder, schema) as writer:
            splits = _Splits(writer)
            for table, _, own_split in self.examples(source):
                if self.data.split.by == "source":
                    split_N = np.full(len(table), SPLITS.index(own_split or "train"), np.int8)
                else:
                    split_N = hash_splits(self.normaliser.split_hashes(table), self.data.split)
                splits.add(table, split_N)
        self.batches = writer.batches()
        self.class_rows = splits.class_rows

    def _write_undivided(self, source: Source, folder: Path, schema: pa.Schema) -> None:
        """Write the examples with their times, for `divide_piece` to divide."""
        without_split = schema.remove(schema.get_field_index("split"))
        timed = without_split.append(pa.field(_TIME, pa.int64()))
        all_times = [np.zeros(0, np.int64)]
        with ExamplesWriter(folder, timed, (_UNDIVIDED,)) as writer:
            for table, times, _ in self.examples(source):
                writer.write(_UNDIVIDED, table.append_column(_TIME, pa.array(times)))
                all_times.append(times)
        np.save(folder / _TIMES, np.concatenate(all_times))
        self.batches = writer.batches()

    def to_json(self) -> dict[str, Any]:
        """All that is known of the piece but the files."""
        return {
            "findings": self.findings.to_json(),
            "span": dataclasses.astuple(self.span),
            "shape": self.normaliser.image_shape,
            "seen": self.seen,
            "batches": self.batches,
            "class_rows": self.class_rows,
        }

    def examples(self, source: Source) -> Iterator[tuple[pa.Table, Times, str]]:
        """Tables of examples in the window, their times or zeros,
        and the source's own split."""
        column = time_column(self.data)
        columns = wanted_columns(self.data, self.modality)
        by_column = _by_column(self.data, self.window)
        records = RecordsHash(columns)
        for raw in source.read(columns, self.findings):
            times = np.zeros(len(raw), np.int64)
            if column is not None:
                times, keep = read_times(raw, column, self.findings)
                self.span.include(times[keep])
                if by_column:
                    assert self.window is not None
                    keep &= inside(times, self.window)
                raw = raw.filter(keep)
                times = times[keep]
            if by_column:
                records.update(raw)
            if len(raw):
                table, is_example = self.normaliser(raw)
                yield table, times[is_example], raw.split
        self.seen = records.digest() if records.rows else ""


def count_times(order: Order, item: Entry) -> list[list[int]]:
    """How often the times of an undivided piece have each digit (see `digit_counts`)."""
    with PieceStore(order["store"]).reading(item["key"], _TIMES) as path:
        total = digit_counts(np.load(path), order["prefix"], order["bits"])
    # most of the 65,536 digits do not occur
    (digits,) = np.nonzero(total)
    return [digits.tolist(), total[digits].tolist()]


@made_once
def divide_piece(order: Order, item: Entry, store: PieceStore, folder: Path) -> dict[str, Any]:
    """Of an undivided piece, divided by the cuts."""
    data = DataSpec.model_validate(order["data"])
    schema = examples.schema_of(order["modality"], data.slices, data.is_numeric)
    cuts = tuple(order["cuts"])
    undivided = store.reading(item["from"], f"{_UNDIVIDED}.arrow")
    with undivided as path, ExamplesWriter(folder, schema) as writer:
        splits = _Splits(writer)
        gap_rows = 0
        for batch in examples.ExamplesFile(path):
            split_N = time_splits(np.asarray(batch.column(_TIME)), cuts, order["gaps"])
            is_inside_N = split_N >= 0
            gap_rows += int(np.count_nonzero(~is_inside_N))
            table = pa.table(batch).filter(pa.array(is_inside_N))
            splits.add(table, split_N[is_inside_N])
    return {"batches": writer.batches(), "class_rows": splits.class_rows, "gap": gap_rows}


def _alike(labels: Sequence[str]) -> str:
    """The first that differ in capitals, spaces around or a `.0` alone; "" for none."""
    by_word = collections.defaultdict[str, list[str]](list)
    for label in labels:
        by_word[re.sub(r"(?<=\d)\.0+$", "", label.strip().casefold())].append(label)
    for spellings in by_word.values():
        if len(spellings) > 1:
            return " and ".join(repr(label) for label in spellings)
    return ""
