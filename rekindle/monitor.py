"""Whether what a model is given, and how it answers, is still like what it was judged on: the rows
of a log of predictions, the labels that arrived for them, and what they say.

A test a signal, against the model's held-out rows: unknown words by the one-sided test of Mann and
Whitney (more of them), other numbers by that of Kolmogorov and Smirnov, predicted classes by
chi-squared, live accuracy, also of slices, by one-sided proportions (less of it); latency, which
nothing measured at training, against the window before by Mann and Whitney (slower). Holm's steps
(1979) bound the chance of any false alarm of a check by `false_alarms`; besides, the effect must
reach a floor, so that a million rows do not alarm about nothing. Too few rows never say "no drift".

The tests take rows for independent, and repeats are not: retries, popular texts, an uptime probe.
So one row a content counts for inputs and predictions, there as in the reference; a request for
latency; an id for accuracy. N rows now."""

import collections
import dataclasses
import datetime as dt
import logging
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rekindle.data.columns import as_python, number_of, texts
from rekindle.data.roles import wanted_columns
from rekindle.data.signals import LOGGED
from rekindle.data.source import asked_for_by, open_source
from rekindle.data.validate import Findings
from rekindle.errors import DataError, first_line
from rekindle.evaluate.evaluate import holm
from rekindle.records import Evidence, Signal
from rekindle.spec.model import DataSpec, SplitSpec

log = logging.getLogger(__name__)

MOST_ROWS = 50_000  # a fair draw of more
MOST_SLICES = 20  # the most frequent values
_AHEAD = dt.timedelta(hours=1)  # clocks of servers may be so far ahead
_POWER = 0.8
_POINTS = {"unknown": 0.02, "accuracy": 0.03, "r2": 0.03}  # of a share
_WEIGHTS = {"unknown": 4.0}  # what changes first where texts do, and 1 for each other signal
_DISTANCE = 0.1  # of two distributions, between 0 and 1
_SLOWER, _LATER = 0.5, 0.005  # of the median latency before, and in seconds
_LEAST_EXPECTED = 5.0  # of a class; rarer ones are joined


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
    # a file lies where its first row does, and its last may be of the next day
    around = range(-1, (end - start).days + 2)
    days = {f"date={start.date() + dt.timedelta(days=i)}" for i in around}
    left_out, total = collections.Counter[str](), 0
    drawn = list[tuple[np.ndarray, pa.Table]]()
    for path in sorted(path for path in fs.find(folder) if path.endswith(".parquet")):
        if not days.intersection(path.split("/")):
            continue
        try:
            with fs.open(path) as file:
                table = pq.read_table(file, schema=LOGGED)  # of an earlier release, too
        except (pa.ArrowException, OSError) as error:
            fix = "remove it if it was cut short: servers write files whole"
            what = f"a file of the log of predictions cannot be read: {error}"
            raise DataError(what, where=path, fix=fix) from None
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
    rows = _fewer(drawn)[1].sort_by("time") if drawn else pa.table({})
    return Seen(rows, total, {why: number for why, number in left_out.items() if number})


def _fewer(drawn: list[tuple[np.ndarray, pa.Table]]) -> tuple[np.ndarray, pa.Table]:
    """Those with the smallest of the numbers that each row drew: a fair draw of all."""
    numbers = np.concatenate([each for each, _ in drawn])
    kept = np.sort(np.argsort(numbers, kind="stable")[:MOST_ROWS])
    return numbers[kept], pa.concat_tables([table for _, table in drawn]).take(pa.array(kept))


class Label(NamedTuple):
    """The class that arrived for a key, and the (column, value) of each slice its row is in."""

    value: str
    slices: tuple[tuple[str, str], ...] = ()


@asked_for_by("monitor.labels")
def labels(data: DataSpec, modality: str, source: str, ids: Collection[str]) -> dict[str, Label]:
    """The label of each key of `ids` in `source`, the last one of several, with the slices of that
    row; a row without one has yet to get it. Where columns of `data.slices` are missing, there are
    no slices, which is logged. Raises DataError for rows that cannot be read."""
    plain = {"format": "auto", "split": SplitSpec(), "window": None, "source": source}
    data = data.model_copy(update=plain)
    findings, kinds = Findings(), wanted_columns(data, modality)
    names, slices = data.columns, data.slices
    assert names.key
    found = dict[str, Label]()
    answer = names.target or names.label
    wanted = {name: kinds[name] for name in (names.key, answer, *slices)}
    for raw in open_source(data, modality).read(wanted, findings):
        keys = texts(raw, names.key, "scalar", findings).values.to_pylist()
        if names.target is None:
            values = texts(raw, answer, "scalar", findings).values.to_pylist()
        else:
            given = list(map(as_python, raw.columns[answer]))
            values = [
                None if value in (None, b"", "") else str(number_of(value)) for value in given
            ]
        # a value that cannot be text puts its row into no slice, as a missing one does
        parts = [texts(raw, one, "scalar", Findings()).values.to_pylist() for one in slices]
        for key, value, *part in zip(keys, values, *parts, strict=True):
            if key and value and key in ids:
                known = zip(slices, part, strict=True)
                found[key] = Label(value, tuple((name, one) for name, one in known if one))
    if bad := sum(one.value == "nan" for one in found.values()):
        log.warning("%d of the numbers that arrived in %s are none", bad, source)
    try:
        findings.raise_if_any()
    except DataError as error:
        if not slices:
            raise
        found = labels(data.model_copy(update={"slices": ()}), modality, source, ids)
        log.warning("accuracy of slices is not compared: %s", first_line(error))
    return found


def judge(
    evidence: Evidence,
    rows: pa.Table,
    labels: Mapping[str, Label],
    min_rows: int,
    level: float,
    earlier: pa.Table | None = None,
) -> tuple[Signal, ...]:
    """Each signal of which both sides have `min_rows`; all together raise a false alarm with
    probability `level`. `labels` by the `id` of rows; `earlier` rows of the same log, of the window
    before, are what latency is compared with."""
    once = distinct(rows)
    found = [*_inputs(evidence, once, min_rows, level), *_predictions(evidence, once, min_rows)]
    found += _accuracy(evidence, rows, labels, min_rows, level)
    found += _latency(earlier, rows, min_rows) if earlier is not None else ()
    weights = [_WEIGHTS.get(one.name, 1.0) for one in found]
    sure = holm([one.p_value for one in found], level, weights)
    return tuple(
        one.model_copy(update={"alarm": is_sure and one.effect >= _floor(one)})
        for one, is_sure in zip(found, sure, strict=True)
    )


def distinct(rows: pa.Table) -> pa.Table:
    """The first row of each content; those that do not tell theirs all stay."""
    if "hash" not in rows.column_names:
        return rows
    seen, first_N = set[str](), np.ones(len(rows), bool)
    for row, content in enumerate(rows.column("hash").to_pylist()):
        first_N[row] = not content or content not in seen
        seen.add(content)
    return rows.filter(pa.array(first_N))


def _floor(one: Signal) -> float:
    """The least effect of a signal that is an alarm."""
    if one.name == "latency":
        return max(_LATER, _SLOWER * one.before)
    return _POINTS.get(one.name.partition(":")[0], _DISTANCE)


def expected_accuracy(evidence: Evidence, rows: pa.Table) -> float | None:
    """What accuracy the confidence of answers lets expect, by how right as confident ones were on
    the test split (where none were, by itself): an estimate, blind to what moves confidence."""
    sure_N = np.minimum(_numbers(rows, "probability"), 1.0)  # sums of float32 may pass it
    bins = evidence.calibration
    if not len(sure_N) or not bins:
        return None
    lower_B, upper_B, right_B = np.array([(b.lower, b.upper, b.accuracy) for b in bins]).T
    at_N = np.clip(np.searchsorted(upper_B, sure_N), 0, len(bins) - 1)
    is_in_N = (lower_B[at_N] <= sure_N) & (sure_N <= upper_B[at_N])
    return float(np.where(is_in_N, right_B[at_N], sure_N).mean())


def _inputs(evidence: Evidence, rows: pa.Table, least: int, level: float) -> Iterator[Signal]:
    from scipy.stats import ks_2samp

    assert evidence.reference is not None
    sure = {"confidence": evidence.reference.confidence}
    for name, values in {**evidence.reference.inputs, **sure}.items():
        before_M = np.array(values)
        now_N = _numbers(rows, "probability" if name == "confidence" else name)
        if name != "value":  # a reference of 4 digits; more would tell equals apart
            now_N = np.round(now_N, 4)
        if min(len(before_M), len(now_N)) < least:
            continue
        means = float(before_M.mean()), float(now_N.mean())
        if name == "unknown":
            effect, p_value = means[1] - means[0], _greater(now_N, before_M)
        else:
            effect, p_value = ks_2samp(before_M, now_N, method="asymp")
        deviation = float(before_M.std()) * math.sqrt(1 / len(before_M) + 1 / len(now_N))
        yield Signal(
            name=name,
            before=means[0],
            now=means[1],
            effect=float(effect),
            rows=len(now_N),
            p_value=_finite(p_value),
            detectable=_z(level) * deviation,
        )


def _latency(earlier: pa.Table, rows: pa.Table, least: int) -> Iterator[Signal]:
    """The medians of the seconds that requests took. The instances of a request share its time and
    seconds, and are one measurement: counted one by one they would alarm by themselves."""
    if not len(earlier) or not len(rows):
        return
    requests = (each.group_by(["time", "seconds"]).aggregate([]) for each in (earlier, rows))
    before_M, now_N = (_numbers(each, "seconds") for each in requests)
    if min(len(before_M), len(now_N)) >= least:
        before, now = float(np.median(before_M)), float(np.median(now_N))
        yield Signal(
            name="latency",
            before=before,
            now=now,
            effect=now - before,
            rows=len(now_N),
            p_value=_finite(_greater(now_N, before_M)),
        )


def _greater(now_N: np.ndarray, before_M: np.ndarray) -> float:
    """The one-sided p-value of Mann and Whitney: numbers now are not greater than before."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(now_N, before_M, alternative="greater", method="asymptotic")[1])


def _predictions(evidence: Evidence, rows: pa.Table, least: int) -> Iterator[Signal]:
    """The classes that were answered; `before` and `now` are the share of the most frequent one."""
    from scipy.stats import chi2_contingency

    counts = {one.label: one.predicted for one in evidence.classes}
    if evidence.reference is not None and evidence.reference.predicted:
        counts = dict(evidence.reference.predicted)
    answered = rows.column("label").drop_null().to_pylist() if "label" in rows.column_names else []
    if len(counts) < 2 or min(len(answered), sum(counts.values())) < least:
        return
    index = {name: i for i, name in enumerate(counts)}
    now_C = np.bincount([index.get(one, len(index)) for one in answered], minlength=len(index) + 1)
    table_2C = np.array([[*counts.values(), 0], now_C], np.float64)
    shares_2C = table_2C / table_2C.sum(1, keepdims=True)
    top = int(shares_2C[0].argmax())
    joined_2C = _joined(table_2C)
    chance = chi2_contingency(joined_2C)[1] if joined_2C.shape[1] > 1 else 1.0
    yield Signal(
        name="prediction",
        before=float(shares_2C[0, top]),
        now=float(shares_2C[1, top]),
        effect=float(np.abs(shares_2C[0] - shares_2C[1]).sum() / 2),
        rows=len(answered),
        p_value=_finite(chance),
    )


def _joined(table_2C: np.ndarray) -> np.ndarray:
    """The columns whose expected counts suffice for the test, and the others as one."""
    expected_C = table_2C.sum(0) * table_2C.sum(1).min() / table_2C.sum()
    rare_C = expected_C < _LEAST_EXPECTED
    table = np.column_stack([table_2C[:, ~rare_C], table_2C[:, rare_C].sum(1)])
    return table[:, table.sum(0) > 0]


def _accuracy(
    evidence: Evidence, rows: pa.Table, labels: Mapping[str, Label], least: int, level: float
) -> Iterator[Signal]:
    """Accuracy over all rows with a label, and of each slice that both sides know; of numbers R²,
    in parts of the variance of the test split."""
    metrics = evidence.metrics
    metric, column = ("r2", "value") if "r2" in metrics else ("accuracy", "label")
    variance = metrics["rmse"] ** 2 / max(1 - metrics["r2"], 1e-12) if "r2" in metrics else None
    right, parts = list[float](), collections.defaultdict[tuple[str, str], list[float]](list)
    answered = rows.select(["id", column]).to_pylist() if labels and len(rows) else []
    # the last one that was answered to each id
    last = {row["id"]: row[column] for row in answered if row[column] is not None}
    for label, answer in ((labels[key], answer) for key, answer in last.items() if key in labels):
        right.append(_rightness(answer, label.value, variance))
        for part in label.slices:
            parts[part].append(right[-1])
    yield from _fall(metric, metrics.get(metric), evidence.rows, right, least, level)
    known = {(one.column, one.value): one for one in evidence.slices if one.rows >= least}
    for part in sorted(known.keys() & parts, key=lambda one: (-len(parts[one]), one))[:MOST_SLICES]:
        name, one = f"{metric}:{part[0]}={part[1]}", known[part]
        yield from _fall(name, one.candidate.get(metric), one.rows, parts[part], least, level)


def _rightness(answer: Any, label: str, variance: float | None) -> float:
    """1 for the right class, else 0; of a number 1 less its squared error in parts of the variance;
    NaN for a label that is none."""
    if variance is None:
        return float(answer == label)
    error = answer - float(label)
    return float(1 - error * error / variance)


def _fall(
    name: str, before: float | None, count: int, found: Sequence[float], least: int, level: float
) -> Iterator[Signal]:
    """From `before`, of `count` rows, to the mean of what each row has now."""
    right = [one for one in found if math.isfinite(one)]
    if before is None or min(len(right), count) < least:
        return
    now, rows_now = float(np.mean(right)), len(right)
    pooled = (before * count + now * rows_now) / (count + rows_now)
    variance = float(np.var(right)) if name.startswith("r2") else pooled * (1 - pooled)
    deviation = math.sqrt(variance * (1 / count + 1 / rows_now))
    chance = NormalDist().cdf((now - before) / deviation) if deviation else float(now >= before)
    yield Signal(
        name=name,
        before=before,
        now=now,
        effect=before - now,
        rows=rows_now,
        p_value=chance,
        detectable=_z(level) * deviation,
    )


def _numbers(rows: pa.Table, column: str) -> np.ndarray:
    if column not in rows.column_names:
        return np.zeros(0)
    # NaN, of a broken network, is no confidence at all: tests would pass over it
    return np.nan_to_num(np.asarray(rows.column(column).drop_null().to_numpy(), np.float64))


def _z(level: float) -> float:
    """Deviations that a change needs to be found in `_POWER` of checks, by one signal alone."""
    return NormalDist().inv_cdf(1 - level) + NormalDist().inv_cdf(_POWER)


def _finite(p_value: float) -> float:
    """NaN, of rows that are all alike, is no sign of anything."""
    return 1.0 if math.isnan(p_value) else float(p_value)
