"""The log of predictions: Parquet files `ROOT/MODEL/date=D/hour=H/*`, by a thread.

A row is an instance that was answered: `id` (the column `data.columns.key` of the
instance, "" for none), `time` (UTC), `version`, `model` (the digest of its files),
`seconds` its request took, its signals (`Modality.signals`), of classes `label` and
`probability`, `hash` of the content, and `text` where it is wanted. The rows that prove a
deployment are left out. A file appears whole, the first after `FLUSH_SECONDS`, later ones
after up to `MOST_SECONDS`; a server that is killed loses what waits. Up to `MOST_ROWS`
wait; further rows are dropped and counted, as they are when the storage does not take
any: no request waits for the log. So are rows beyond `MOST_BYTES` of contents."""

import datetime as dt
import hashlib
import json
import logging
import secrets
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rekindle.data.signals import LOGGED, words_of
from rekindle.modalities.base import Modality
from rekindle.records import Evidence
from rekindle.serve.messages import LogTo, ServedModel
from rekindle.serve.work import Prediction
from rekindle.storage import about, storage_of

log = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0
MOST_SECONDS = 300.0
MOST_ROWS = 20_000
FILE_ROWS = 5_000
MOST_BYTES = 128 << 20  # of contents that wait


class _LoggedRow(NamedTuple):
    time: dt.datetime
    id: str
    content: Any
    prediction: Prediction
    seconds: float


class PredictionLog:
    """`dropped` counts rows that are not in the log; `proofs` are the contents that prove a
    deployment."""

    def __init__(
        self,
        to: LogTo,
        model: ServedModel,
        modality: Modality[Any, Any],
        proofs: Iterable[object] = (),
    ) -> None:
        self.to = to
        self._modality = modality
        self.dropped = 0
        self._version = {"version": model.version, "model": model.digest}
        self._words = frozenset[int]()
        # by hash, as contents are logged: the evidence has them as text, images as base64
        self._proofs = {_hash_of(content) for content in proofs}
        evidence = Evidence.read(model.evidence) if model.evidence else None
        if evidence and evidence.reference:
            self._words = words_of(evidence.reference)
        root = f"{to.root.rstrip('/')}/{model.name}"
        self._storage = storage_of(root, about("the log of predictions"))
        self._rows = deque[_LoggedRow]()
        self._bytes = 0
        # of `_rows` and `_bytes`, which requests and the thread change
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._full = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True)
        self._thread.start()

    def put(
        self,
        ids: Sequence[str],
        contents: Sequence[object],
        predictions: Sequence[Prediction],
        seconds: float,
    ) -> None:
        """Have the instances of a request logged; returns at once."""
        now = dt.datetime.now(dt.UTC)
        row_ids = ids or [""] * len(contents)
        with self._lock:
            for row_id, content, prediction in zip(row_ids, contents, predictions, strict=True):
                size = _size_of(content)
                if len(self._rows) >= MOST_ROWS or self._bytes + size > MOST_BYTES:
                    self.dropped += 1
                else:
                    self._rows.append(_LoggedRow(now, row_id, content, prediction, seconds))
                    self._bytes += size
        # a full file is not waited for
        if len(self._rows) >= FILE_ROWS or self._bytes > MOST_BYTES // 2:
            self._full.set()

    def close(self, seconds: float = 10.0) -> None:
        """Write what still waits; returns after so many seconds at most."""
        self._ends.set()
        self._full.set()
        self._thread.join(seconds)

    def _write_on(self) -> None:
        has_warned = False
        seconds = FLUSH_SECONDS
        while not (self._ends.is_set() and not self._rows):
            # at the end what waits is written at once
            self._full.wait(0 if self._ends.is_set() else seconds)
            self._full.clear()
            rows = [self._rows[i] for i in range(min(FILE_ROWS, len(self._rows)))]
            try:
                if rows:
                    self._write(rows)
            except Exception as error:  # noqa: BLE001 - whatever a store's client raises: it serves on
                if not has_warned:
                    log.warning("predictions cannot be logged at %s: %s", self.to.root, error)
                has_warned = True
                if self._ends.is_set():
                    return
                continue
            has_warned = False
            if rows:  # few files while requests come steadily, soon a first one to look at
                seconds = min(MOST_SECONDS, seconds * 2)
            # removed once they are written: until then
            # a failure leaves them where they were
            with self._lock:
                for _ in rows:
                    self._bytes -= _size_of(self._rows.popleft().content)

    def _write(self, rows: list[_LoggedRow]) -> None:
        table = list[dict[str, object]]()
        for row in rows:
            content_hash = _hash_of(row.content)
            if content_hash not in self._proofs:
                table.append(self._logged(row, content_hash))
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(table, LOGGED), sink, compression="zstd")
        first = rows[0].time
        # a random end: several servers of a version write into one folder
        name = f"date={first:%Y-%m-%d}/hour={first:%H}/{secrets.token_hex(8)}.parquet"
        self._storage.put_new(name, sink.getvalue().to_pybytes())

    def _logged(self, row: _LoggedRow, content_hash: str) -> dict[str, object]:
        return {
            "id": row.id,
            "time": row.time,
            **self._version,
            "seconds": row.seconds,
            "label": row.prediction.get("label"),
            "probability": row.prediction.get("probability"),
            "value": row.prediction.get("value"),
            **self._modality.signals(row.content, self._words),
            "hash": content_hash,
            "text": _text_of(row.content) if self.to.text else None,
        }


def _size_of(content: Any) -> int:
    """About how many bytes of memory it takes."""
    return content.nbytes if isinstance(content, np.ndarray) else len(_text_of(content))


def _hash_of(content: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(content, np.ndarray):
        digest.update(content.tobytes())
    else:
        digest.update(_text_of(content).encode())
    return digest.hexdigest()[:32]


def _text_of(content: Any) -> str:
    """Texts as they are, words and turns as JSON; of pixels nothing."""
    if isinstance(content, np.ndarray):
        return ""
    if isinstance(content, str):
        return content
    return json.dumps(content, ensure_ascii=False)
