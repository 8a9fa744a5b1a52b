"""A source becomes examples: read, window, normalise, split, validate; in bounded memory.

`ingest` writes one Arrow file a split and, last, `summary.json`; the same source gives the same
bytes. Anything unfit makes it raise a single DataError. A split by time takes a second pass over
the examples, which wait in a scratch file until the cuts are known."""

import collections
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rekindle.data import examples
from rekindle.data.duplicates import drop_copies
from rekindle.data.examples import SPLITS, SUMMARY, ExamplesFile, ExamplesSummary, ExamplesWriter
from rekindle.data.normalise import Normaliser, label_order
from rekindle.data.quarantine import leave_out
from rekindle.data.records import RecordsHash, Span, Times, before, inside, read_times
from rekindle.data.roles import time_column, wanted_columns
from rekindle.data.source import open_source
from rekindle.data.split import find_leaks, hash_splits, time_cuts, time_splits
from rekindle.data.validate import Findings, check_splits
from rekindle.data.window import parse_window
from rekindle.errors import DataError, RequestError
from rekindle.spec.checks import RESERVED
from rekindle.spec.identity import digest, file_sha256
from rekindle.spec.model import DataSpec

log = logging.getLogger(__name__)

_TIME = "_rekindle_time"


def ingest(
    data: DataSpec, modality: str, window: str, out: Path, *, source: str = ""
) -> ExamplesSummary:
    """Write the examples of `data.source` into `out`; returns, and writes, their summary. `window`:
    the text of a resolved window, "" for all; `source`: a fingerprint to carry along. Raises
    DataError with everything that is wrong with the source, and where what was read has another
    fingerprint."""
    if taken := [name for name in data.slices if name in RESERVED]:
        fix = f"rename the column; {', '.join(taken)} means something else in the examples"
        raise RequestError(f"`{taken[0]}` cannot be a slice", where="data.slices", fix=fix)
    out.mkdir(parents=True, exist_ok=True)
    (out / SUMMARY).unlink(missing_ok=True)
    work = _Ingestion(data, modality, window, out)
    work.write()
    summary = work.validated(source)
    summary.write(out / SUMMARY)
    counts = ", ".join(f"{split} {rows:,}" for split, rows in summary.rows.items())
    classes = f"; {len(summary.labels)} classes" if summary.labels else ""
    log.info("examples: %s%s", counts, classes)
    return summary


class _Ingestion:
    def __init__(self, data: DataSpec, modality: str, window: str, out: Path) -> None:
        self.data, self.modality, self.window, self.out = data, modality, parse_window(window), out
        self.partitioned = "{window" in data.source
        self.findings = Findings()
        self.normaliser = Normaliser(data, modality, self.findings)
        self.schema = examples.schema_of(modality, data.slices)
        self.span = Span()
        self.seen = ""
        self.labelled = "label" in self.schema.names
        self.rows = collections.Counter(dict.fromkeys(SPLITS, 0))
        self.left_out = collections.Counter[str]()
        self.class_rows = {split: collections.Counter[str]() for split in SPLITS}

    def write(self) -> None:
        if self.data.split.by == "time":
            self._write_by_time()
            return
        with ExamplesWriter(self.out, self.schema) as writer:
            for table, _, own_split in self._examples():
                if self.data.split.by == "source":
                    indices = np.full(len(table), SPLITS.index(own_split or "train"), np.int8)
                else:
                    indices = hash_splits(self.normaliser.split_hashes(table), self.data.split)
                self._distribute(writer, table, indices)

    def validated(self, source: str) -> ExamplesSummary:
        """The summary of what was written; raises DataError if any of it is unfit."""
        data, findings = self.data, self.findings
        bad_rows = leave_out(data, findings, sum(self.rows.values()), self.out)
        if data.duplicates != "keep" and not findings:
            copies = drop_copies(self.out, self.rows, self.class_rows, data.duplicates)
            self.left_out["duplicate"] = copies
        # with findings, what was read may not be all
        if not findings and source and source != self.seen:
            what = "the data changed between `fingerprint` and `ingest`"
            fix = "run the same command again; who writes files aside and renames them changes them"
            raise DataError(what, where=data.source, fix=f"{fix} in one instant")
        rows, counted = dict(self.rows), SPLITS if self.labelled else ()
        found = {label for counts in self.class_rows.values() for label in counts}
        labels = label_order(data.labels, found) if self.labelled else ()
        if not sum(rows.values()):
            if self.window is not None and self.span.rows:
                what = f"the window {self.window} selects none of {self.span.rows:,} records"
                fix = "move data.window.end, or lower data.window.offset"
                findings.note(what, where=f"they span {self.span}", fix=fix)
            elif not findings:
                what = "the source holds no records"
                findings.note(what, where=data.source, fix="check data.source")
        else:
            by_key = (data.columns.group or data.columns.key) is not None
            if by_key or data.split.by != "hash":  # else copies are together
                find_leaks(self.out, rows, findings)
            # a rare tag is in few texts, and need not be in those of every split
            complete = ("train",) if self.modality == "words" else SPLITS
            if not findings:  # rows that were refused are missing from every split
                # a source's own splits may lack validation
                lacks = data.split.by == "source" or data.split.validation == 0
                required = ("train", "test") if lacks else SPLITS
                check_splits(rows, self.class_rows, labels, required, complete, findings)
        findings.raise_if_any()
        return ExamplesSummary(
            modality=self.modality, window=str(self.window or ""), labels=labels, rows=rows,
            source=source or digest([file_sha256(self.out / f"{split}.arrow") for split in SPLITS]),
            slices=data.slices, image_shape=self.normaliser.image_shape,
            class_rows={s: {label: self.class_rows[s][label] for label in labels} for s in counted},
            bad_rows=bad_rows, left_out={k: count for k, count in self.left_out.items() if count},
        )  # fmt: skip

    def _examples(self) -> Iterator[tuple[pa.Table, Times, str]]:
        """Tables of examples in the window, their times (or zeros), and the source's own split."""
        column = time_column(self.data)
        reader = open_source(self.data, self.modality, self.window)
        columns = wanted_columns(self.data, self.modality)
        by_column = self.window is not None and not self.partitioned
        records = RecordsHash(columns)
        for raw in reader.read(columns, self.findings):
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
        self.seen = records.digest() if by_column else reader.seen()

    def _distribute(self, writer: ExamplesWriter, table: pa.Table, indices: Any) -> None:
        names = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(SPLITS))
        table = table.append_column("split", names.cast(pa.string()))
        for index, split in enumerate(SPLITS):
            mine = indices == index
            if mine.any():
                part = table if mine.all() else table.filter(pa.array(mine))
                writer.write(split, part)
                self.rows[split] += len(part)
                self.class_rows[split].update(examples.label_counts(part))

    def _write_by_time(self) -> None:
        without = self.schema.remove(self.schema.get_field_index("split"))
        staged = without.append(pa.field(_TIME, pa.int64()))
        with tempfile.TemporaryDirectory(prefix=".staged-", dir=self.out) as scratch:
            path = Path(scratch, "all.arrow")
            with ExamplesWriter(path.parent, staged, ("all",)) as writer:
                for table, times, _ in self._examples():
                    writer.write("all", table.append_column(_TIME, pa.array(times)))

            def blocks() -> Iterator[Times]:
                return (np.asarray(batch.column(_TIME)) for batch in ExamplesFile(path, (_TIME,)))

            with ExamplesWriter(self.out, self.schema) as writer:
                if any(True for _ in blocks()):
                    cuts, gap = time_cuts(blocks, self.data.split), self.data.split.gap
                    gaps = [before(cut, gap) for cut in cuts] if gap else []
                    for batch in ExamplesFile(path):
                        splits = time_splits(np.asarray(batch.column(_TIME)), cuts, gaps)
                        kept = splits >= 0
                        self.left_out["gap"] += int(np.count_nonzero(~kept))
                        table = pa.table(batch).filter(pa.array(kept))
                        self._distribute(writer, table, splits[kept])
