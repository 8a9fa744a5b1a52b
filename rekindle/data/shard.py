"""Examples become shards: what the ranks read, with a manifest that vouches for every byte.

The task learns what it must from the training split (`fit`), worker processes encode the batches of
each split, and this process cuts them into Arrow files of at most `data.shard_rows` rows, which are
not compressed, because they are memory-mapped. The bytes depend on examples, task and settings
only. `manifest.json` is written last and is the commit.

A worker, `python -m rekindle.data.shard`, encodes every n-th batch: its order is one line of JSON
on stdin, its answer an Arrow stream on stdout (what a task prints goes to stderr). As a program of
its own it imports neither the parent's main module nor torch. A full pipe holds a fast worker back,
so memory is bounded."""

import contextlib
import hashlib
import json
import logging
import os
import queue
import shutil
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from rekindle.data.examples import (
    CONTENT,
    SPLITS,
    ExamplesFile,
    ExamplesSummary,
    open_examples,
    read_summary,
)
from rekindle.data.manifest import ASSETS, MANIFEST, folder_fingerprint, row_tokens
from rekindle.errors import DataError, StepError
from rekindle.records import ShardFile, ShardManifest
from rekindle.spec.model import DataSpec, ModelSpec
from rekindle.tasks import Task, load_task
from rekindle.tasks.base import Settings

log = logging.getLogger(__name__)

_BATCHES_A_WORKER = 8
_AHEAD = 2
_MODULE = "rekindle.data.shard"


def shard(
    examples: Path, data: DataSpec, model: ModelSpec, task_name: str, out: Path,
    workers: int | None = None,
) -> ShardManifest:  # fmt: skip
    """Write the shards of a folder of examples into `out`; returns, and writes, their manifest.
    `workers` encode, by default one a core. Raises DataError for incomplete examples, StepError if
    one fails."""
    summary = read_summary(examples)
    task = load_task(task_name)
    if task.modality != summary.modality:
        what = f"{task_name} reads {task.modality}, the examples hold {summary.modality}"
        raise DataError(what, where=str(examples), fix="run the step `ingest` again for this task")
    assets = out / ASSETS  # nothing is left of an earlier attempt; the manifest goes first
    (out / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(assets, ignore_errors=True)
    for file in out.glob("*.arrow"):
        file.unlink()
    assets.mkdir(parents=True)
    fitted = task.fit(lambda: iter(open_examples(examples, "train")), data, model, assets)
    shape = {"image_shape": list(summary.image_shape)} if summary.image_shape else {}
    settings: dict[str, Any] = {**shape, **fitted}
    if not workers:
        batches = sum(len(open_examples(examples, split)) for split in SPLITS)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        workers = max(1, min(cores or 1, batches // _BATCHES_A_WORKER))
    files = {split: examples / f"{split}.arrow" for split in SPLITS}
    writer = _ShardWriter(out, data.shard_rows)
    rows = encoded(files, task_name, summary.labels, settings, assets, workers)
    with contextlib.closing(rows), contextlib.closing(writer):
        for split, batch in rows:
            writer.write(split, batch)
    manifest = ShardManifest(
        task=task_name, source=summary.source, window=summary.window,
        tokenizer=folder_fingerprint(assets), examples=writer.hashes.hexdigest()[:32],
        labels=summary.labels, slices=summary.slices, rows=writer.rows,
        dropped=_dropped(summary, writer, data.max_length), class_rows=summary.class_rows,
        bad_rows=summary.bad_rows, left_out=summary.left_out,
        settings=settings, shards=tuple(writer.files),
    )  # fmt: skip
    manifest.write(out / MANIFEST)
    total = sum(file.bytes for file in writer.files)
    log.info("%d shards, %s bytes, %d workers", len(writer.files), f"{total:,}", workers)
    return manifest


class _HashingFile:
    """A file that knows the hash and the length of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.sha256 = hashlib.sha256()
        self.bytes = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self.closed = True


class _OpenShard:
    def __init__(self, path: Path, split: str, schema: pa.Schema) -> None:
        self.path, self.split, self.sink = path, split, _HashingFile(path)
        self.writer = pa.ipc.new_file(pa.PythonFile(self.sink, mode="w"), schema)
        self.rows = self.tokens = 0

    def append(self, batch: pa.RecordBatch) -> None:
        self.writer.write_batch(batch)
        self.rows += len(batch)
        if "input_ids" in batch.schema.names:
            self.tokens += int(np.sum(row_tokens(pa.table(batch))))

    def close(self) -> ShardFile:
        self.writer.close()
        self.sink.close()
        return ShardFile(
            path=self.path.name, split=self.split, rows=self.rows, tokens=self.tokens,
            bytes=self.sink.bytes, sha256=self.sink.sha256.hexdigest(),
        )  # fmt: skip


class _ShardWriter:
    """Cuts encoded batches into files of at most `shard_rows` rows."""

    def __init__(self, folder: Path, shard_rows: int) -> None:
        self._folder, self._shard_rows = folder, shard_rows
        self.files: list[ShardFile] = []
        self.hashes = hashlib.sha256()
        self.encoded = dict.fromkeys(SPLITS, 0)
        self.rows = dict.fromkeys(SPLITS, 0)
        self._open: _OpenShard | None = None

    def write(self, split: str, batch: pa.RecordBatch) -> None:
        """Append a batch to the split, without null rows; splits come one after the other."""
        self.encoded[split] += len(batch)
        if "input_ids" in batch.schema.names and batch.column("input_ids").null_count:
            batch = batch.filter(batch.column("input_ids").is_valid())
        self.rows[split] += len(batch)
        self.hashes.update(b"".join(batch.column("hash").to_pylist()))
        while len(batch):
            file = self._file(split, batch.schema)
            part = batch.slice(0, self._shard_rows - file.rows)
            file.append(part)
            batch = batch.slice(len(part))

    def close(self) -> None:
        if self._open is not None:
            self.files.append(self._open.close())
            self._open = None

    def _file(self, split: str, schema: pa.Schema) -> _OpenShard:
        if self._open and (self._open.split != split or self._open.rows == self._shard_rows):
            self.close()
        if self._open is None:
            path = self._folder / f"{split}-{len(self.files):05}.arrow"
            self._open = _OpenShard(path, split, schema)
        return self._open


def _dropped(summary: ExamplesSummary, writer: _ShardWriter, max_length: int) -> dict[str, int]:
    """Examples of each split without a target; DataError if others are lost, or none is left."""
    if writer.encoded != dict(summary.rows):
        what = f"the examples promised {dict(summary.rows)} rows and hold {writer.encoded}"
        raise DataError(what, fix="run `ingest` again")
    dropped = {split: writer.encoded[split] - writer.rows[split] for split in SPLITS}
    if not any(dropped.values()):
        return {}
    counts = ", ".join(f"{split} {count:,}" for split, count in dropped.items() if count)
    what = f"no token to predict within data.max_length ({max_length} tokens)"
    if not writer.rows["train"]:
        fix = "raise data.max_length: the prompts alone are longer"
        raise DataError(f"no text of the split train has a {what[3:]}", where=counts, fix=fix)
    log.warning("texts with %s were left out: %s", what, counts)
    return dropped


def encode_batch(
    task: Task, batch: pa.RecordBatch, labels: dict[str, int], settings: Settings, assets: Path
) -> pa.RecordBatch:
    """Id, hash, label as class index (or indices) if any, slices, and what the task encodes."""
    names = [name for name in batch.schema.names if name not in ("split", *CONTENT)]
    columns: dict[str, Any] = {name: batch.column(name) for name in names}
    if "label" in columns:
        rows, kind = columns["label"].to_pylist(), pa.int32()
        if pa.types.is_list(columns["label"].type):
            indices = [[labels[label] for label in row] for row in rows]
            columns["label"] = pa.array(indices, pa.list_(kind))
        else:
            columns["label"] = pa.array([labels[label] for label in rows], kind)
    encoded = task.encode(batch, settings, assets)
    if clash := sorted(set(encoded) & set(columns)):
        raise ValueError(f"encode returned a column `{clash[0]}`, which the shard already has")
    return pa.record_batch({**columns, **encoded})


def encoded(
    files: Mapping[str, Path], task: str, labels: tuple[str, ...], settings: Settings, assets: Path,
    workers: int,
) -> Generator[tuple[str, pa.RecordBatch], None, None]:  # fmt: skip
    """Each batch with its file's name, in order, encoded by so many processes, or here by one."""
    batches = [name for name, path in files.items() for _ in range(len(ExamplesFile(path)))]
    order = {"task": task, "labels": list(labels), "settings": dict(settings),
             "assets": str(assets), "paths": [str(path) for path in files.values()]}  # fmt: skip
    workers = min(workers, len(batches))
    if workers <= 1:
        yield from zip(batches, _encoded({**order, "start": 0, "every": 1}), strict=True)
        return
    with contextlib.ExitStack() as stack:
        orders = [{**order, "start": start, "every": workers} for start in range(workers)]
        team = [stack.enter_context(_Worker(order)) for order in orders]
        for number, name in enumerate(batches):
            yield name, team[number % workers].next()


class _Worker:
    """One process, and a thread that reads `_AHEAD` batches ahead; leaving it ends both."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = json.dumps(order)
        self._batches: queue.Queue[pa.RecordBatch | Exception] = queue.Queue(_AHEAD)
        self._stopped = threading.Event()

    def __enter__(self) -> Self:
        path = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
        alone = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        environment = {**os.environ, **alone}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def next(self) -> pa.RecordBatch:
        """The next batch; raises what went wrong in the process."""
        item = self._batches.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _read(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            with self._process.stdin as orders:
                orders.write(self._order.encode() + b"\n")
            with self._process.stdout as pipe:
                for batch in pa.ipc.open_stream(pipe):
                    self._put(batch)
            raise EOFError
        except (EOFError, OSError, ValueError):
            code, fix = self._process.wait(), "see its traceback above"
            how = f"failed (exit {code})"
            if code < 0:
                how = f"was killed by signal {-code}"
                fix = "use fewer workers, or smaller texts" if code == -9 else ""
            self._put(StepError(f"a worker that encodes examples {how}", fix=fix))

    def _put(self, item: pa.RecordBatch | Exception) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._batches.put(item, timeout=0.1)
                return


def _encoded(order: dict[str, Any]) -> Iterator[pa.RecordBatch]:
    task, assets = load_task(order["task"]), Path(order["assets"])
    labels = {label: index for index, label in enumerate(order["labels"])}
    files = [ExamplesFile(Path(path)) for path in order["paths"]]
    batches = [(file, index) for file in files for index in range(len(file))]
    for file, index in batches[order["start"] :: order["every"]]:
        yield encode_batch(task, file[index], labels, order["settings"], assets)


def _main() -> int:
    """Serve one order; exit 1, with a traceback on stderr, if the task fails."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    order = json.loads(sys.stdin.buffer.readline())
    writer = None
    try:
        with os.fdopen(pipe, "wb") as stream:
            for batch in _encoded(order):
                writer = writer or pa.ipc.new_stream(stream, batch.schema)
                writer.write_batch(batch)
            if writer is not None:
                writer.close()
    except BrokenPipeError:
        return 1
    except Exception:  # noqa: BLE001 - whatever a task raises belongs in the log of the step
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
