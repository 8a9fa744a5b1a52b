"""Encoding in parallel: light processes, each of which encodes every n-th batch.

`python -m rekindle.data.encode` is such a process: its order is one line of JSON on stdin, its
answer an Arrow stream on stdout (what a task prints goes to stderr). It is a program of its own and
not a forked or spawned copy of the parent, so it imports neither the parent's main module nor
torch. A full pipe is what holds a fast worker back, so memory is bounded; batches arrive in their
order, so the result does not depend on the number of workers."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from rekindle.data.examples import CONTENT, ExamplesFile
from rekindle.errors import StepError
from rekindle.tasks import Task, load_task
from rekindle.tasks.base import Settings

_AHEAD = 2
_MODULE = "rekindle.data.encode"


def encode_batch(
    task: Task, batch: pa.RecordBatch, labels: dict[str, int], settings: Settings, assets: Path
) -> pa.RecordBatch:
    """Shard rows of a batch: id, hash, label as class index (or indices) if there is one, slices,
    and what the task encodes."""
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
    """Each batch of files of examples with its file's name, in order, as the task encodes it; by so
    many processes, or here if one will do."""
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

    def __enter__(self) -> _Worker:
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
        except (EOFError, OSError, ValueError) as error:
            self._put(self._failure(error))

    def _put(self, item: pa.RecordBatch | Exception) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._batches.put(item, timeout=0.1)
                return

    def _failure(self, error: Exception) -> StepError:
        code = self._process.wait()
        if code < 0:
            fix = "use fewer workers, or smaller texts" if code == -9 else ""
            what = f"a worker that encodes examples was killed by signal {-code}"
            return StepError(what, fix=fix)
        what = f"a worker that encodes examples failed (exit {code})"
        return StepError(what, fix="see its traceback above")


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
