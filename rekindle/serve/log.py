"""The log of predictions: Parquet files below `ROOT/MODEL/date=D/hour=H/`, written by a thread.

A row is an instance that was answered: `id` (the column `data.columns.key` of the instance, "" for
none), `time` (UTC), `version`, `model` (the digest of its files), `seconds` its request took, its
signals (data/signals.py), of classes `label` and `probability`, `hash` of the content, and `text`
where it is wanted. The rows that prove a deployment are left out. A file appears whole, the first
after `FLUSH_SECONDS`, later ones after up to `MOST_SECONDS`; a server that is killed loses what
waits. Up to `MOST_ROWS` wait; further rows are dropped and counted, as they are when the storage
does not take any: no request waits for the log. So are rows beyond `MOST_BYTES` of contents."""

import datetime as dt
import hashlib
import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.data.signals import LOGGED, signals, words_of
from rekindle.records import Evidence
from rekindle.serve.messages import LogTo, ServedModel
from rekindle.serve.work import Prediction
from rekindle.train.storage import storage_of

log = logging.getLogger(__name__)

FLUSH_SECONDS, MOST_SECONDS = 5.0, 300.0
MOST_ROWS, FILE_ROWS = 20_000, 5_000
MOST_BYTES = 128 << 20  # of contents that wait


class PredictionLog:
    """`dropped` counts rows that are not in the log."""

    def __init__(self, to: LogTo, model: ServedModel) -> None:
        self.to, self.dropped = to, 0
        self._same = {"version": model.version, "model": model.digest}
        evidence = Evidence.read(model.evidence) if model.evidence else None
        reference = evidence.reference if evidence else None
        self._words = words_of(reference) if reference else frozenset[int]()
        proofs = evidence.smoke.rows if evidence and evidence.smoke else ()
        self._proofs = {row.content for row in proofs}
        self._storage = storage_of(f"{to.root.rstrip('/')}/{model.name}")
        self._rows = deque[tuple[dt.datetime, str, Any, Prediction, float]]()
        self._bytes, self._counts = 0, threading.Lock()
        self._ends, self._full = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        self._thread.start()

    def put(
        self,
        ids: Sequence[str],
        contents: Sequence[Any],
        found: Sequence[Prediction],
        seconds: float,
    ) -> None:
        """Have the instances of a request logged; returns at once."""
        now = dt.datetime.now(dt.UTC)
        with self._counts:
            for row in zip(ids or [""] * len(contents), contents, found, strict=True):
                size = _size_of(row[1])
                if len(self._rows) >= MOST_ROWS or self._bytes + size > MOST_BYTES:
                    self.dropped += 1
                else:
                    self._rows.append((now, *row, seconds))
                    self._bytes += size
        if len(self._rows) >= FILE_ROWS or self._bytes > MOST_BYTES // 2:
            self._full.set()

    def close(self, seconds: float = 10.0) -> None:
        """Write what is left; waits so long at most."""
        self._ends.set()
        self._full.set()
        self._thread.join(seconds)

    def _write_on(self) -> None:
        told, seconds = False, FLUSH_SECONDS
        while not (self._ends.is_set() and not self._rows):
            self._full.wait(0 if self._ends.is_set() else seconds)
            self._full.clear()
            rows = [self._rows[i] for i in range(min(FILE_ROWS, len(self._rows)))]
            try:
                if rows:
                    self._write(rows)
            except Exception as error:  # noqa: BLE001 - whatever a store's client raises: it serves on
                if not told:
                    log.warning("predictions cannot be logged at %s: %s", self.to.root, error)
                told = True
                if self._ends.is_set():
                    return
                continue
            told, seconds = False, min(MOST_SECONDS, seconds * 2) if rows else seconds
            with self._counts:
                for _ in rows:
                    self._bytes -= _size_of(self._rows.popleft()[2])

    def _write(self, rows: list[tuple[dt.datetime, str, Any, Prediction, float]]) -> None:
        table = [
            {
                "id": name,
                "time": time,
                **self._same,
                "seconds": seconds,
                "label": found.get("label"),
                "probability": found.get("probability"),
                "value": found.get("value"),
                **signals(content, self._words),
                "hash": _hash_of(content),
                "text": _text_of(content) if self.to.text else None,
            }
            for time, name, content, found, seconds in rows
            if _text_of(content) not in self._proofs
        ]
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(table, LOGGED), sink, compression="zstd")
        name = f"date={rows[0][0]:%Y-%m-%d}/hour={rows[0][0]:%H}/{secrets.token_hex(8)}.parquet"
        self._storage.put_new(name, sink.getvalue().to_pybytes())


def _size_of(content: Any) -> int:
    """About how many bytes of memory it takes."""
    return content.nbytes if isinstance(content, np.ndarray) else len(_text_of(content))


def _hash_of(content: Any) -> str:
    whole = content.tobytes() if isinstance(content, np.ndarray) else _text_of(content).encode()
    return hashlib.sha256(whole).hexdigest()[:32]


def _text_of(content: Any) -> str:
    """Texts as they are, words and turns as JSON; of pixels nothing."""
    if isinstance(content, np.ndarray):
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
