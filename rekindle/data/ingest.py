"""A source becomes examples: read, window, normalise, split, validate; in bounded memory.

The source is cut into pieces (pieces.py), an executor has them read, and their files and counts are
put together here: `summary.json` is last. The same source gives the same bytes with every executor.
Anything unfit makes `ingest` raise a single DataError. A split by time needs the times of all
records first: pieces are kept undivided until the cuts are known."""

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
import pyarrow as pa

from rekindle.data import examples
from rekindle.data.duplicates import drop_copies, find_leaks
from rekindle.data.examples import SPLITS, SUMMARY, ExamplesPart, ExamplesSummary, ExamplesWriter
from rekindle.data.executor import WORTH_BYTES, Executor, Local, Order, code, executor_of
from rekindle.data.files import combined
from rekindle.data.hub import HubSource
from rekindle.data.normalise import Normaliser, Shape, label_order
from rekindle.data.pieces import check_versions, cut, source_of
from rekindle.data.quarantine import leave_out
from rekindle.data.records import RecordsHash, Span, before, inside, read_times
from rekindle.data.roles import time_column, wanted_columns
from rekindle.data.source import FileSource, open_source
from rekindle.data.split import Times, digit_counts, hash_splits, time_cuts, time_splits
from rekindle.data.store import Entry, Store, kept
from rekindle.data.validate import Findings, check_splits
from rekindle.data.window import Window, parse_window
from rekindle.errors import DataError, RequestError
from rekindle.launch.events import emit
from rekindle.launch.rendezvous import Rendezvous
from rekindle.spec.checks import RESERVED
from rekindle.spec.identity import digest
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

_TIME, _TIMES, _UNDIVIDED = "_rekindle_time", "times.npy", "all"
_AFTERWARDS = ("on_bad_rows", "max_bad_rows", "duplicates")  # judged once all is read


def ingest(
    data: DataSpec, modality: str, window: str, out: Path, *, source: str = "", store: str = ""
) -> ExamplesSummary | None:
    """Write the examples of a source, or of a mixture, into `out`; returns, and writes, their
    summary. `window`: the text of a resolved window, "" for all; `source`: a fingerprint to carry
    along; `store`: a path or URI that keeps pieces for the next time, and which all workers reach.
    On several nodes all but the first return None. Raises DataError with everything that is wrong
    with the source, and where what was read has another fingerprint."""
    if taken := [name for name in data.slices if name in RESERVED]:
        fix = f"rename the column; {', '.join(taken)} means something else in the examples"
        raise RequestError(f"`{taken[0]}` cannot be a slice", where="data.slices", fix=fix)
    out.mkdir(parents=True, exist_ok=True)
    (out / SUMMARY).unlink(missing_ok=True)
    for file in out.glob("*.arrow"):
        file.unlink()
    with tempfile.TemporaryDirectory(prefix=".pieces-", dir=out) as scratch:
        work = _Ingestion(data, modality, window, source, scratch)
        if work.in_pieces and store:
            work.store = Store(store)
        if Rendezvous.current().node_rank and not work.in_pieces:
            return None
        work.run(out)
        if Rendezvous.current().node_rank:
            return None
        summary = work.validated(out)
    summary.write(out / SUMMARY)
    counts = ", ".join(f"{split} {rows:,}" for split, rows in summary.rows.items())
    classes = f"; {len(summary.labels)} classes" if summary.labels else ""
    log.info("examples: %s%s", counts, classes)
    return summary


class _Part:
    """One of the sources, its pieces, and what came of them; one piece where it is not cut."""

    def __init__(self, data: DataSpec, modality: str, window: Window | None, number: int) -> None:
        self.data, self.modality, self.window = data, modality, window if data.window else None
        self.items: list[dict[str, Any]] = [{"key": f"whole-{number}"}]
        self.executor: Executor = Local(1)
        self.entries: list[Entry] = []
        self.opened = open_source(data, modality, self.window)
        self.by_column = _by_column(data, self.window)
        self.in_pieces = isinstance(self.opened, FileSource | HubSource)
        self.contents: dict[str, str] = {}

    def cut(self, order: dict[str, Any], store: Store, source: str) -> None:
        """Have the source measured; its pieces are the items then, and `order` is one for them."""
        self.executor = executor_of(self.data, store, self.opened.extent()[1] // WORTH_BYTES)
        found, self.contents, cuts = cut(self.opened, self.data, self.executor)
        order |= cuts
        if self.modality == "image" and order["shape"] is None and len(found) > 1:
            shapes = (self._shape(order, one.item()) for one in found)
            order["shape"] = next(filter(None, shapes), None)
        aside = {"source", "window", "shard_rows", "shuffle_gb", *_AFTERWARDS, *DataSpec.EXECUTION}
        settings = [self.data.model_dump(mode="json", exclude=aside), self.modality, order["shape"]]
        if self.by_column:
            settings.append(order["window"])
        if self.opened.names_files:  # and what they hold is not known before
            settings.append(source)
        self.items = [one.item([settings, code()]) for one in found]

    def seen(self) -> str:
        """The fingerprint of what was read."""
        seen = [entry["seen"] for entry in self.entries if entry["seen"]]
        rows = combined(seen) if seen else ""
        if self.by_column:
            return rows
        if isinstance(self.opened, FileSource):
            return self.opened.fingerprint_of(self.contents, rows)
        return self.opened.fingerprint()

    def _shape(self, order: Order, first: Entry) -> Shape | None:
        """The shape of the first image of a piece, which decides for all that follow."""
        piece = _Piece(self.data, self.modality, self.window, None)
        for _ in piece.examples(source_of(order, first, self.data, self.modality)):
            if piece.normaliser.image_shape:
                break
        return piece.normaliser.image_shape


class _Ingestion:
    def __init__(self, data: DataSpec, modality: str, window: str, source: str, root: str) -> None:
        self.data, self.modality, self.window = data, modality, parse_window(window)
        self.source, self.store = source, Store(root)
        self.parts = [_Part(part, modality, self.window, n) for n, part in enumerate(data.parts)]
        self.in_pieces = all(part.in_pieces for part in self.parts)
        self.findings, self.span, self.seen, self.pieces = Findings(), Span(), "", ""
        self.bad_rows: dict[str, int] = {}
        self.left_out = collections.Counter[str]()
        self.shape: Shape | None = None
        self.items: list[dict[str, Any]] = []
        self.entries: list[Entry] = []
        self.files: list[ExamplesPart] = []  # whose paths are entries of the store
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def run(self, out: Path) -> None:
        """Have all pieces read, divided and compared; `out` gets a list of the rows left out."""
        order: dict[str, Any] = {}
        for part in self.parts:
            order = {
                "data": part.data.model_dump(mode="json"),
                "modality": self.modality,
                "window": str(part.window or ""),
                "store": self.store.root,
                "shape": self.shape,
            }
            if self.in_pieces:
                part.cut(order, self.store, self.source)
                if len(self.parts) == 1 and not (part.by_column or part.opened.names_files):
                    self._check(part.seen())
            work = digest([order, part.items])
            part.entries = part.executor.map(f"{__name__}:ingest_piece", order, part.items, work)
            for entry in part.entries:
                found = Findings.of_json(entry["findings"])
                self.findings.include(found, found.rows)
                self.span.join(Span(*entry["span"]))
                self.shape = self.shape or (entry["shape"] and tuple(entry["shape"]))
            self.items += [{**item, "source": self.parts.index(part)} for item in part.items]
            self.entries += part.entries
        self.seen = combined([part.seen() for part in self.parts])
        if self.in_pieces and len(self.items) > 1:
            new = sum(entry["new"] for entry in self.entries)
            self.pieces = f"{new} of {len(self.items)} new"
            log.info("%d pieces of the source, %d of them new", len(self.items), new)
        read = sum(self._rows(name) for name in (_UNDIVIDED, *SPLITS))
        self.bad_rows = leave_out(self.data, self.findings, read, out)
        if self.data.split.by == "time" and not self.findings and self._rows(_UNDIVIDED):
            self._divide(order, self.parts[0].executor)
        self.files = [*self._kept()]
        for entry in self.entries:
            for split, counted in entry["class_rows"].items():
                self.class_rows[split].update(counted)
        self._compare(self.parts[0].executor)

    def _compare(self, executor: Executor) -> None:
        """Have copies found by all workers: left out, or noted where they are in two splits."""
        data, total = self.data, _count(self.files)
        if data.duplicates != "keep":
            if not self.findings:
                self.files, dropped = drop_copies(self.store, self.files, data.duplicates, executor)
                for split, counted in dropped.items():
                    self.class_rows[split] -= counted
                self.left_out["duplicate"] = total - _count(self.files)
            return
        by_key = any(part.columns.group or part.columns.key for part in data.parts)
        if by_key or data.split.by != "hash":  # else copies are together
            self.findings.include(find_leaks(self.store, self.files, executor), 0)

    def _divide(self, order: Order, executor: Executor) -> None:
        """Have all pieces divided by time, at the cuts that all of them together have."""
        keys = [{"key": item["key"]} for item in self.items]

        def counts(prefix: int, bits: int) -> Times:
            asked = {"store": self.store.root, "prefix": prefix, "bits": bits}
            found = executor.map(f"{__name__}:count_times", asked, keys, digest([asked, keys]))
            total = np.zeros(1 << 16, np.int64)
            for digits, times in found:
                total[digits] += np.asarray(times, np.int64)
            return total

        cuts = time_cuts(counts, self._rows(_UNDIVIDED), self.data.split)
        gap = self.data.split.gap
        gaps = [before(cut, gap) for cut in cuts] if gap else []
        self.items = [
            {"key": digest([key["key"], cuts, gaps]), "from": key["key"], "source": item["source"]}
            for key, item in zip(keys, self.items, strict=True)
        ]
        order = {**order, "cuts": cuts, "gaps": gaps}
        work = digest(self.items)
        self.entries = executor.map(f"{__name__}:divide_piece", order, self.items, work)
        self.left_out["gap"] = sum(entry["gap"] for entry in self.entries)

    def _check(self, seen: str) -> None:
        if self.source and self.source != seen:
            raise DataError(
                "the data changed between `fingerprint` and `ingest`",
                where=self.data.named,
                fix="run the same command again; who writes files aside and renames them "
                "changes them in one instant",
            )

    def _rows(self, name: str) -> int:
        return sum(sum(entry["batches"].get(name, [])) for entry in self.entries)

    def validated(self, out: Path) -> ExamplesSummary:
        """The summary of what was read, its files being in `out`; DataError if any is unfit."""
        data, findings = self.data, self.findings
        if not findings:  # else what was read may not be all
            self._check(self.seen)
        files, class_rows = [*self._taken(out)], self.class_rows
        labelled = self.modality != "document" and not data.is_numeric
        rows = {split: _count(f for f in files if f.split == split) for split in SPLITS}
        found = {label for counts in class_rows.values() for label in counts}
        labels = label_order(data.labels, found) if labelled else ()
        if (alike := _alike(labels)) and not data.labels:
            text = f"{alike} may be one class: correct them, or set data.labels"
            emit("notice", text=text)
        left_out = {kind: count for kind, count in self.left_out.items() if count}
        if not sum(rows.values()):
            if self.window is not None and self.span.rows:
                findings.note(
                    f"the window {self.window} selects none of {self.span.rows:,} records",
                    where=f"they span {self.span}",
                    fix="move data.window.end, or lower data.window.offset",
                )
            elif not findings:
                findings.note(
                    "the source holds no records", where=data.named, fix="check data.source"
                )
        elif not findings:  # rows that were refused are missing from every split
            # a rare tag is in few texts, and need not be in those of every split
            complete = ("train",) if self.modality == "words" else SPLITS
            # a source's own splits may lack validation
            lacks = data.split.by == "source" or data.split.validation == 0
            required = ("train", "test") if lacks else SPLITS
            check_splits(rows, class_rows, labels, required, complete, findings, left_out)
        findings.raise_if_any()
        counted = SPLITS if labelled else ()
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
            faulty=findings.rows if self.bad_rows else 0,
            left_out=left_out,
            class_rows={s: {label: class_rows[s][label] for label in labels} for s in counted},
        )

    def _kept(self) -> Iterator[ExamplesPart]:
        """The files of all pieces, as they are in the store; the first one's also where empty."""
        for split in SPLITS:
            for number, (item, entry) in enumerate(zip(self.items, self.entries, strict=True)):
                batches, name = entry["batches"].get(split, []), f"{split}.arrow"
                if name in entry["files"] and (batches or not number):
                    yield ExamplesPart(
                        path=item["key"],
                        split=split,
                        batches=tuple(batches),
                        sha256=entry["files"][name],
                        source=item["source"],
                    )

    def _taken(self, out: Path) -> Iterator[ExamplesPart]:
        """The files, taken from the store."""
        numbers = {split: itertools.count() for split in SPLITS}
        for file in self.files:
            path = f"{file.split}-{next(numbers[file.split]):05}.arrow"
            self.store.take(file.path, f"{file.split}.arrow", file.sha256, out / path)
            yield file.model_copy(update={"path": path})


def _count(files: Iterable[ExamplesPart]) -> int:
    return sum(sum(file.batches) for file in files)


@kept
def ingest_piece(order: Order, item: Entry, store: Store, folder: Path) -> dict[str, Any]:
    """Of a piece of the source, or of all of it. Raises DataError where files are not those that
    were measured."""
    data, window = DataSpec.model_validate(order["data"]), parse_window(order["window"])
    source = source_of(order, item, data, order["modality"])
    piece = _Piece(data, order["modality"], window, order["shape"])
    check_versions(source)
    piece.write(source, folder)
    check_versions(source)
    if isinstance(source, FileSource) and not _by_column(data, window):
        piece.seen = source.named
    return piece.known()


def _by_column(data: DataSpec, window: Window | None) -> bool:
    """Whether a column says which records lie in the window."""
    return window is not None and "{window" not in data.source


class _Splits:
    """Writes tables into a file a split, and counts."""

    def __init__(self, writer: ExamplesWriter) -> None:
        self.writer = writer
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def add(self, table: pa.Table, indices: Any) -> None:
        names = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(SPLITS))
        table = table.append_column("split", names.cast(pa.string()))
        for index, split in enumerate(SPLITS):
            mine = indices == index
            if mine.any():
                part = table if mine.all() else table.filter(pa.array(mine))
                self.writer.write(split, part)
                self.class_rows[split].update(examples.label_counts(part))


class _Piece:
    """One reading of rows into files, and what is known of it."""

    def __init__(
        self, data: DataSpec, modality: str, window: Window | None, shape: Sequence[int] | None
    ) -> None:
        self.data, self.modality, self.window = data, modality, window
        self.findings, self.span, self.seen = Findings(), Span(), ""
        first = (shape[0], shape[1], shape[2]) if shape else None
        self.normaliser = Normaliser(data, modality, self.findings, first)
        self.batches: dict[str, list[int]] = {}
        self.class_rows: Mapping[str, Mapping[str, int]] = {}

    def write(self, source: Any, folder: Path) -> None:
        """Write the examples that `source` gives: divided, or with their times."""
        schema = examples.schema_of(self.modality, self.data.slices, self.data.is_numeric)
        if self.data.split.by == "time":
            without = schema.remove(schema.get_field_index("split"))
            timed = without.append(pa.field(_TIME, pa.int64()))
            every = [np.zeros(0, np.int64)]
            with ExamplesWriter(folder, timed, (_UNDIVIDED,)) as writer:
                for table, times, _ in self.examples(source):
                    writer.write(_UNDIVIDED, table.append_column(_TIME, pa.array(times)))
                    every.append(times)
            np.save(folder / _TIMES, np.concatenate(every))
            self.batches = writer.batches()
            return
        with ExamplesWriter(folder, schema) as writer:
            splits = _Splits(writer)
            for table, _, own_split in self.examples(source):
                if self.data.split.by == "source":
                    indices = np.full(len(table), SPLITS.index(own_split or "train"), np.int8)
                else:
                    indices = hash_splits(self.normaliser.split_hashes(table), self.data.split)
                splits.add(table, indices)
        self.batches, self.class_rows = writer.batches(), splits.class_rows

    def known(self) -> dict[str, Any]:
        """All of it but the files, as JSON."""
        return {
            "findings": self.findings.to_json(),
            "span": dataclasses.astuple(self.span),
            "shape": self.normaliser.image_shape,
            "seen": self.seen,
            "batches": self.batches,
            "class_rows": self.class_rows,
        }

    def examples(self, source: Any) -> Iterator[tuple[pa.Table, Times, str]]:
        """Tables of examples in the window, their times (or zeros), and the source's own split."""
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
                raw, times = raw.filter(keep), times[keep]
            if by_column:
                records.update(raw)
            if len(raw):
                table, keep = self.normaliser(raw)
                yield table, times[keep], raw.split
        self.seen = records.digest() if records.rows else ""


def count_times(order: Order, item: Entry) -> list[list[int]]:
    """Which digits the times of an undivided piece have, and how often (see `digit_counts`)."""
    with Store(order["store"]).reading(item["key"], _TIMES) as path:
        total = digit_counts(np.load(path), order["prefix"], order["bits"])
    (digits,) = np.nonzero(total)
    return [digits.tolist(), total[digits].tolist()]


@kept
def divide_piece(order: Order, item: Entry, store: Store, folder: Path) -> dict[str, Any]:
    """Of an undivided piece, divided by the cuts."""
    data = DataSpec.model_validate(order["data"])
    schema = examples.schema_of(order["modality"], data.slices, data.is_numeric)
    undivided = store.reading(item["from"], f"{_UNDIVIDED}.arrow")
    with undivided as path, ExamplesWriter(folder, schema) as writer:
        splits, gap, cuts = _Splits(writer), 0, tuple(order["cuts"])
        for batch in examples.ExamplesFile(path):
            indices = time_splits(np.asarray(batch.column(_TIME)), cuts, order["gaps"])
            inside_N = indices >= 0
            gap += int(np.count_nonzero(~inside_N))
            splits.add(pa.table(batch).filter(pa.array(inside_N)), indices[inside_N])
    return {"batches": writer.batches(), "class_rows": splits.class_rows, "gap": gap}


def _alike(labels: Sequence[str]) -> str:
    """The first that differ in capitals, spaces around or a `.0` alone; "" for none."""
    by_word = collections.defaultdict[str, list[str]](list)
    for label in labels:
        by_word[re.sub(r"(?<=\d)\.0+$", "", label.strip().casefold())].append(label)
    return next((" and ".join(map(repr, each)) for each in by_word.values() if len(each) > 1), "")
