"""What logged rows and their labels say of a model, signal by signal.

A test a signal, against the model's held-out rows: unknown words by the one-sided test of
Mann and Whitney (more of them), other numbers by that of Kolmogorov and Smirnov,
predicted classes by chi-squared, live accuracy, also of slices, by one-sided proportions
(less of it); latency, which nothing measured at training, against the window before by
Mann and Whitney (slower). Holm's steps (1979) bound the chance of any false alarm of a
check by `false_alarms`; besides, the effect must reach a floor, so that a million rows do
not alarm about nothing. Too few rows never say "no drift".

The tests take rows for independent, and repeats are not: retries, popular texts, an
uptime probe. So one row a content counts for inputs and predictions, there as in the
reference; a request for latency; an id for accuracy. Shapes: N rows now, M before, C
classes, B bins."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from rekindle.evaluate.compare import holm
from rekindle.monitor.labels import Label
from rekindle.records import Evidence, Signal

MOST_SLICES = 20
"""Of these the most frequent ones are compared."""
_POWER = 0.8
_LEAST_EXPECTED = 5.0  # of a class; rarer ones are joined

# the least effects that are alarms: points of a share, parts of a distance between 0 and
# 1, and of latency parts of the median before, and seconds
_LEAST_POINTS = {"unknown": 0.02, "accuracy": 0.03, "r2": 0.03}
_LEAST_DISTANCE = 0.1
_LEAST_SLOWER = 0.5
_LEAST_SECONDS = 0.005
_WEIGHTS = {"unknown": 4.0}  # what changes first where texts do, and 1 for each other signal


def judge(
    evidence: Evidence,
    rows: pa.Table,
    labels: Mapping[str, Label],
    min_rows: int,
    level: float,
    earlier: pa.Table | None = None,
) -> tuple[Signal, ...]:
    """Each signal of which both sides have `min_rows`.

    All together raise a false alarm with probability `level`. `labels` by the `id` of
    rows; `earlier` rows of the same log, of the window before, are what latency is
    compared with."""
    distinct_rows = distinct(rows)
    signals = [
        *_inputs(evidence, distinct_rows, min_rows, level),
        *_predictions(evidence, distinct_rows, min_rows),
        *_accuracy(evidence, rows, labels, min_rows, level),
    ]
    if earlier is not None:
        signals += _latency(earlier, rows, min_rows)
    weights = [_WEIGHTS.get(signal.name, 1.0) for signal in signals]
    is_sure = holm([signal.p_value for signal in signals], level, weights)
    judged = []
    for signal, sure in zip(signals, is_sure, strict=True):
        is_alarm = sure and signal.effect >= _least_effect(signal)
        judged.append(signal.model_copy(update={"alarm": is_alarm}))
    return tuple(judged)


def distinct(rows: pa.Table) -> pa.Table:
    """The first row of each content; those that do not tell theirs all stay."""
    if "hash" not in rows.column_names:
        return rows
    contents = set[str]()
    is_first_N = np.ones(len(rows), bool)
    for row, content in enumerate(rows.column("hash").to_pylist()):
        is_first_N[row] = not content or content not in contents
        contents.add(content)
    return rows.filter(pa.array(is_first_N))


def _least_effect(signal: Signal) -> float:
    """The least effect of a signal that is an alarm."""
    if signal.name == "latency":
        return max(_LEAST_SECONDS, _LEAST_SLOWER * signal.before)
    kind, _, _ = signal.name.partition(":")
    return _LEAST_POINTS.get(kind, _LEAST_DISTANCE)


def expected_accuracy(evidence: Evidence, rows: pa.Table) -> float | None:
    """What accuracy the confidence of answers lets expect: an estimate without labels.

    By how right as confident answers were on the test split (where none were, by itself).
    It is blind to what moves confidence."""
    confidence_N = np.minimum(_numbers(rows, "probability"), 1.0)  # sums of float32 may pass it
    bins = evidence.calibration
    if not len(confidence_N) or not bins:
        return None
    lower_B, upper_B, accuracy_B = np.array([(b.lower, b.upper, b.accuracy) for b in bins]).T
    bin_N = np.clip(np.searchsorted(upper_B, confidence_N), 0, len(bins) - 1)
    is_in_bin_N = (lower_B[bin_N] <= confidence_N) & (confidence_N <= upper_B[bin_N])
    return float(np.where(is_in_bin_N, accuracy_B[bin_N], confidence_N).mean())


def _inputs(evidence: Evidence, rows: pa.Table, least: int, level: float) -> Iterator[Signal]:
    """The numbers that are taken of each input, and how sure the answers are."""
    from scipy.stats import ks_2samp

    reference = evidence.reference
    assert reference is not None
    columns = {name: name for name in reference.inputs}
    columns["confidence"] = "probability"
    for name, column in columns.items():
        values = reference.confidence if name == "confidence" else reference.inputs[name]
        before_M = np.array(values)
        now_N = _numbers(rows, column)
        if name != "value":  # a reference of 4 digits; more would tell equals apart
            now_N = np.round(now_N, 4)
        if min(len(before_M), len(now_N)) < least:
            continue
        before = float(before_M.mean())
        now = float(now_N.mean())
        if name == "unknown":
            effect = now - before
            p_value = _p_value_of_greater(now_N, before_M)
        else:
            effect, p_value = ks_2samp(before_M, now_N, method="asymp")
        deviation = float(before_M.std()) * math.sqrt(1 / len(before_M) + 1 / len(now_N))
        yield Signal(
            name=name,
            before=before,
            now=now,
            effect=float(effect),
            rows=len(now_N),
            p_value=_without_nan(p_value),
            detectable=_deviations_to_find(level) * deviation,
        )


def _latency(earlier: pa.Table, rows: pa.Table, least: int) -> Iterator[Signal]:
    """The medians of the seconds that requests took."""
    if not len(earlier) or not len(rows):
        return
    before_M = _seconds_of_requests(earlier)
    now_N = _seconds_of_requests(rows)
    if min(len(before_M), len(now_N)) < least:
        return
    before = float(np.median(before_M))
    now = float(np.median(now_N))
    yield Signal(
        name="latency",
        before=before,
        now=now,
        effect=now - before,
        rows=len(now_N),
        p_value=_without_nan(_p_value_of_greater(now_N, before_M)),
    )


def _seconds_of_requests(rows: pa.Table) -> np.ndarray:
    """The instances of a request share its time and seconds, and are one measurement:
    counted one by one they would alarm by themselves."""
    return _numbers(rows.group_by(["time", "seconds"]).aggregate([]), "seconds")


def _p_value_of_greater(now_N: np.ndarray, before_M: np.ndarray) -> float:
    """Of Mann and Whitney, one-sided: numbers now are not greater than before."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(now_N, before_M, alternative="greater", method="asymptotic")[1])


def _predictions(evidence: Evidence, rows: pa.Table, least: int) -> Iterator[Signal]:
    """The classes that were answered; `before` and `now` are the share of the most
    frequent one."""
    from scipy.stats import chi2_contingency

    counts = {result.label: result.predicted for result in evidence.classes}
    if evidence.reference is not None and evidence.reference.predicted:
        counts = dict(evidence.reference.predicted)
    answers: list[str] = []
    if "label" in rows.column_names:
        answers = rows.column("label").drop_null().to_pylist()
    if len(counts) < 2 or min(len(answers), sum(counts.values())) < least:
        return
    index = {label: place for place, label in enumerate(counts)}
    unknown = len(index)  # where answers stand that no held-out row had
    places = [index.get(answer, unknown) for answer in answers]
    now_C = np.bincount(places, minlength=len(index) + 1)
    table_2C = np.array([[*counts.values(), 0], now_C], np.float64)
    shares_2C = table_2C / table_2C.sum(1, keepdims=True)
    most_frequent = int(shares_2C[0].argmax())
    joined_2C = _join_rare_classes(table_2C)
    p_value = chi2_contingency(joined_2C)[1] if joined_2C.shape[1] > 1 else 1.0
    yield Signal(
        name="prediction",
        before=float(shares_2C[0, most_frequent]),
        now=float(shares_2C[1, most_frequent]),
        effect=float(np.abs(shares_2C[0] - shares_2C[1]).sum() / 2),
        rows=len(answers),
        p_value=_without_nan(p_value),
    )


def _join_rare_classes(table_2C: np.ndarray) -> np.ndarray:
    """The columns whose expected counts suffice for the test, and the others as one."""
    expected_C = table_2C.sum(0) * table_2C.sum(1).min() / table_2C.sum()
    is_rare_C = expected_C < _LEAST_EXPECTED
    table = np.column_stack([table_2C[:, ~is_rare_C], table_2C[:, is_rare_C].sum(1)])
    return table[:, table.sum(0) > 0]


def _accuracy(
    evidence: Evidence, rows: pa.Table, labels: Mapping[str, Label], least: int, level: float
) -> Iterator[Signal]:
    """Accuracy over all rows with a label, and of each slice that both sides know; of
    numbers R², in parts of the variance of the test split."""
    metrics = evidence.metrics
    metric = "accuracy"
    column = "label"
    variance = None
    if "r2" in metrics:
        metric = "r2"
        column = "value"
        variance = metrics["rmse"] ** 2 / max(1 - metrics["r2"], 1e-12)
    rightness: list[float] = []
    rightness_of_slices = collections.defaultdict[tuple[str, str], list[float]](list)
    for row_id, answer in _last_answers(rows, column, labels).items():
        label = labels[row_id]
        right = _rightness(answer, label.value, variance)
        rightness.append(right)
        for name_and_value in label.slices:
            rightness_of_slices[name_and_value].append(right)
    yield from _fall(metric, metrics.get(metric), evidence.rows, rightness, least, level)
    held_out = {}
    for part in evidence.slices:
        if part.rows >= least and (part.column, part.value) in rightness_of_slices:
            held_out[part.column, part.value] = part
    most_frequent_first = sorted(held_out, key=lambda key: (-len(rightness_of_slices[key]), key))
    for key in most_frequent_first[:MOST_SLICES]:
        before = held_out[key]
        yield from _fall(
            f"{metric}:{before.column}={before.value}",
            before.candidate.get(metric),
            before.rows,
            rightness_of_slices[key],
            least,
            level,
        )


def _last_answers(
    rows: pa.Table, column: str, labels: Mapping[str, Label]
) -> dict[str, str | float]:
    """The last answer to each id that has a label."""
    if not labels or not len(rows):
        return {}
    answers = {}
    for row in rows.select(["id", column]).to_pylist():
        if row[column] is not None and row["id"] in labels:
            answers[row["id"]] = row[column]
    return answers


def _rightness(answer: str | float, label: str, variance: float | None) -> float:
    """1 for the right class, else 0; of a number 1 less its squared error in parts of the
    variance; NaN for a label that is none."""
    if variance is None:
        return float(answer == label)
    error = float(answer) - float(label)
    return float(1 - error * error / variance)


def _fall(
    name: str,
    before: float | None,
    rows_before: int,
    rightness: Sequence[float],
    least: int,
    level: float,
) -> Iterator[Signal]:
    """From `before`, of so many rows, to the mean of what each row has now."""
    right = [value for value in rightness if math.isfinite(value)]
    if before is None or min(len(right), rows_before) < least:
        return
    rows_now = len(right)
    now = float(np.mean(right))
    if name.startswith("r2"):
        variance = float(np.var(right))
    else:
        pooled = (before * rows_before + now * rows_now) / (rows_before + rows_now)
        variance = pooled * (1 - pooled)
    deviation = math.sqrt(variance * (1 / rows_before + 1 / rows_now))
    if deviation:
        p_value = NormalDist().cdf((now - before) / deviation)
    else:  # all rows are alike
        p_value = float(now >= before)
    yield Signal(
        name=name,
        before=before,
        now=now,
        effect=before - now,
        rows=rows_now,
        p_value=p_value,
        detectable=_deviations_to_find(level) * deviation,
    )


def _numbers(rows: pa.Table, column: str) -> np.ndarray:
    if column not in rows.column_names:
        return np.zeros(0)
    # NaN, of a broken network, is no confidence at all: tests would pass over it
    return np.nan_to_num(np.asarray(rows.column(column).drop_null().to_numpy(), np.float64))


def _deviations_to_find(level: float) -> float:
    """Deviations that a change needs to be found in `_POWER` of checks, by one signal
    alone."""
    return NormalDist().inv_cdf(1 - level) + NormalDist().inv_cdf(_POWER)


def _without_nan(p_value: float) -> float:
    """NaN, of rows that are all alike, is no sign of anything."""
    return 1.0 if math.isnan(p_value) else float(p_value)
