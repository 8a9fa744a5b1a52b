"""The rows of a log of predictions that count for one model and one window."""

import collections
import dataclasses
import datetime as dt
import zlib
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rekindle.data.signals import LOGGED
from rekindle.errors import DataError
from rekindle.storage import Storage, about, storage_of

MOST_ROWS = 50_000
"""Of more than these a fair draw is taken."""
_AHEAD = dt.timedelta(hours=1)  # clocks of servers may be so far ahead

_Draw = tuple[np.ndarray, pa.Table]
"""Rows, and the number that each drew by chance."""


@dataclasses.dataclass(frozen=True)
class LoggedRows:
    """What a log holds of one model."""

    rows: pa.Table
    total: int
    """How many rows there are, of which `rows` are a draw."""
    left_out: Mapping[str, int]
    """Other rows, by why they do not count."""


def read_log(root: str, name: str, model: str, start: dt.datetime, end: dt.datetime) -> LoggedRows:
    """What is logged below `root` of the predictions of a model, from `start` to `end` (UTC).

    `name` is the model's, `model` the digest of its files. There is nothing where there
    is no log; DataError for a file that cannot be read."""
    storage = storage_of(f"{root.rstrip('/')}/{name}", about("the log of predictions"))
    partitions = _partitions(start, end)
    left_out = collections.Counter[str]()
    total = 0
    draws: list[_Draw] = []
    for path in sorted(storage.files()):
        if not path.endswith(".parquet") or not partitions.intersection(path.split("/")):
            continue
        table = _read_file(storage, path)
        time = table.column("time")
        table = table.filter(pc.and_(pc.greater_equal(time, start), pc.less(time, end + _AHEAD)))
        of_model = table.filter(pc.equal(table.column("model"), model))
        left_out["of another version"] += len(table) - len(of_model)
        in_time = of_model.filter(pc.less(of_model.column("time"), end))
        left_out["from the future"] += len(of_model) - len(in_time)
        total += len(in_time)
        # by the file's name: the same log gives the same draw
        generator = np.random.default_rng(zlib.crc32(path.rpartition("/")[2].encode()))
        draws.append((generator.random(len(in_time)), in_time))
        if sum(len(rows) for _, rows in draws) > 2 * MOST_ROWS:
            draws = [_fewest(draws)]
    rows = pa.table({})
    if draws:
        _, drawn_rows = _fewest(draws)
        rows = drawn_rows.sort_by("time")
    return LoggedRows(rows, total, dict(+left_out))  # `+` leaves counts of 0 out


def _partitions(start: dt.datetime, end: dt.datetime) -> set[str]:
    """The folders of a log that may hold rows of the window.

    A file lies where its first row does, and its last may be of the next day."""
    days = range(-1, (end - start).days + 2)
    return {f"date={start.date() + dt.timedelta(days=day)}" for day in days}


def _read_file(storage: Storage, path: str) -> pa.Table:
    try:
        with storage.reader(path) as file:
            stream = pa.PythonFile(file, "r")
            return pq.read_table(stream, schema=LOGGED)  # of an earlier release, too
    except (pa.ArrowException, OSError) as error:
        fix = "remove it if it was cut short: servers write files whole"
        message = f"a file of the log of predictions cannot be read: {error}"
        raise DataError(message, where=f"{storage.root}/{path}", fix=fix) from None


def _fewest(draws: list[_Draw]) -> _Draw:
    """Those with the smallest of the numbers that each row drew: a fair draw of all."""
    numbers = np.concatenate([drawn for drawn, _ in draws])
    places = np.sort(np.argsort(numbers, kind="stable")[:MOST_ROWS])
    rows = pa.concat_tables([table for _, table in draws])
    return numbers[places], rows.take(pa.array(places))
