"""The rows of a log of predictions that a check judges, and the labels that arrived for them."""

import collections
import dataclasses
import datetime as dt
import zlib
from collections.abc import Mapping

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rekindle.data.columns import texts
from rekindle.data.roles import wanted_columns
from rekindle.data.source import open_source
from rekindle.data.validate import Findings
from rekindle.spec.model import DataSpec, SplitSpec

MOST_ROWS = 50_000  # a fair draw of more
_AHEAD = dt.timedelta(hours=1)  # clocks of servers may be so far ahead


@dataclasses.dataclass(frozen=True)
class Seen:
    """`rows` of one model; `total` of which they are a draw; `left_out` rows by why they do not
    count."""

    rows: pa.Table
    total: int
    left_out: Mapping[str, int]


def seen(root: str, name: str, model: str, start: dt.datetime, end: dt.datetime) -> Seen:
    """What is logged below `root` of the predictions of the model of this name whose files have the
    digest `model`, from `start` to `end` (UTC); nothing where there is no log."""
    fs, folder = fsspec.core.url_to_fs(f"{root.rstrip('/')}/{name}")
    found = fs.find(folder)
    days = {f"date={start.date() + dt.timedelta(days=i)}" for i in range((end - start).days + 2)}
    left_out, total = collections.Counter[str](), 0
    drawn = list[tuple[np.ndarray, pa.Table]]()
    for path in sorted(path for path in found if path.endswith(".parquet")):
        if not days.intersection(path.split("/")):
            continue
        with fs.open(path) as file:
            table = pq.read_table(file)
        time = table.column("time")
        table = table.filter(pc.and_(pc.greater_equal(time, start), pc.less(time, end + _AHEAD)))
        ours = table.filter(pc.equal(table.column("model"), model))
        left_out["of another version"] += len(table) - len(ours)
        table = ours.filter(pc.less(ours.column("time"), end))
        left_out["from the future"] += len(ours) - len(table)
        total += len(table)
        generator = np.random.default_rng(zlib.crc32(path.rpartition("/")[2].encode()))
        drawn.append((generator.random(len(table)), table))
        if sum(len(each) for _, each in drawn) > 2 * MOST_ROWS:
            drawn = [_fewer(drawn)]
    _, rows = _fewer(drawn) if drawn else (None, pa.table({}))
    return Seen(rows, total, {why: number for why, number in left_out.items() if number})


def _fewer(drawn: list[tuple[np.ndarray, pa.Table]]) -> tuple[np.ndarray, pa.Table]:
    """Those with the smallest of the numbers that each row drew: a fair draw of all."""
    numbers = np.concatenate([each for each, _ in drawn])
    kept = np.sort(np.argsort(numbers, kind="stable")[:MOST_ROWS])
    return numbers[kept], pa.concat_tables([table for _, table in drawn]).take(pa.array(kept))


def labels(data: DataSpec, modality: str, source: str) -> dict[str, str]:
    """The label of each key in `source`, the last one of several; a row without one has
    yet to get it. Raises DataError for rows that cannot be read."""
    plain = {"format": "auto", "split": SplitSpec(), "window": None, "slices": ()}
    data = data.model_copy(update={**plain, "source": source})
    findings, kinds = Findings(), wanted_columns(data, modality)
    names = data.columns
    assert names.key
    found = dict[str, str]()
    wanted = {name: kinds[name] for name in (names.key, names.label)}
    for raw in open_source(data, modality).read(wanted, findings):
        keys = texts(raw, names.key, "scalar", findings).values.to_pylist()
        values = texts(raw, names.label, "scalar", findings).values.to_pylist()
        found.update((key, one) for key, one in zip(keys, values, strict=True) if key and one)
    findings.raise_if_any()
    return found
