"""The training as the card shows it: what was measured of its speed, and the curves of
its history. Colours are the style sheet's classes: `a` for training, `b` for
validation."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from markupsafe import Markup

from rekindle import formats
from rekindle.records import HistoryRow, RunRecord
from rekindle.report import plots, texts
from rekindle.report.drawing import Point
from rekindle.report.plots import Series

_SMOOTHED_FROM = 60  # points of a curve that gets a running mean in front of it
_MARKED_UP_TO = 40  # points that are drawn as dots, too; more dots would be one thick line


@dataclasses.dataclass(frozen=True)
class Curve:
    """One figure of the card."""

    title: str
    plot: Markup
    legend: tuple[tuple[str, str], ...] = ()
    """The class and the name of each line; empty where there is only one."""
    remark: str = ""


def curves(run: RunRecord, history: tuple[HistoryRow, ...]) -> list[Curve]:
    """The figures of a training, without those that have nothing to show."""
    clip_norm = texts.number_setting(run.spec, "train", "clip_norm")
    return [curve for curve in _curves(history, clip_norm) if curve.plot]


def measured(history: Sequence[HistoryRow]) -> list[tuple[str, str]]:
    """What was measured of speed and memory, as names and values for people."""
    facts = []
    rates = [row.samples_per_second for row in history if math.isfinite(row.samples_per_second)]
    if rates:
        facts.append(("Median throughput", f"{formats.count(statistics.median(rates))} samples/s"))
    token_rate = _median(history, "tokens_per_second")
    if token_rate is not None:
        facts.append(("Median token rate", f"{formats.count(token_rate)} tokens/s"))
    utilisation = _median(history, "mfu")
    if utilisation is not None:
        facts.append(("Model FLOPs utilisation", formats.percent(utilisation)))
    waiting = _median(history, "data_wait")
    if waiting is not None:
        facts.append(("Time waiting for data", formats.percent(waiting)))
    peaks = [row.memory_bytes for row in history if row.memory_bytes is not None]
    if peaks:
        facts.append(("Peak memory of rank 0", formats.size(max(peaks))))
    return facts


def _median(history: Sequence[HistoryRow], field: str) -> float | None:
    """The median of a figure; None where it was not measured."""
    values = [value for _, value in points(history, field)]
    return statistics.median(values) if values else None


def points(history: Sequence[HistoryRow], field: str) -> list[Point]:
    """The steps at which a figure was measured, each with its value."""
    measured_points = []
    for row in history:
        value = getattr(row, field)
        if value is not None:
            measured_points.append((float(row.step), value))
    return measured_points


def _curves(history: tuple[HistoryRow, ...], clip_norm: float | None) -> list[Curve]:
    """All figures of a history, those without a point included."""
    if not history:
        return []
    curves = [_loss(history)]
    accuracy = points(history, "validation_accuracy")
    if accuracy:
        curves.append(_accuracy(accuracy))
    norms = points(history, "grad_norm")
    rates = points(history, "samples_per_second")
    curves += [
        _learning_rate(points(history, "lr")),
        _noisy("Gradient norm", "norm", norms, clip_norm),
        _noisy("Throughput, samples per second", "samples/s", rates, None),
    ]
    return curves


def _accuracy(accuracy: list[Point]) -> Curve:
    """The accuracy on the validation split."""
    series = [Series("validation", accuracy, "b", marks=len(accuracy) <= _MARKED_UP_TO)]
    last = formats.metric(accuracy[-1][1])
    label = f"Validation accuracy at {len(accuracy)} points, {last} at the end."
    return Curve("Validation accuracy", plots.line(series, label=label), (("b", "validation"),))


def _learning_rate(rates: list[Point]) -> Curve:
    """The learning rate over the steps."""
    highest = max((rate for _, rate in rates if math.isfinite(rate)), default=0.0)
    label = f"Learning rate over {len(rates)} steps, at most {formats.metric(highest)}."
    series = [Series("learning rate", rates)]
    return Curve("Learning rate", plots.line(series, label=label, zero=True))


def _loss(history: tuple[HistoryRow, ...]) -> Curve:
    """The training loss, with its running mean, and the loss on the validation split."""
    loss = points(history, "loss")
    held_out = points(history, "validation_loss")
    series = _with_mean("training", loss)
    legend = [("a", "training")]
    label = f"Loss over {len(loss)} steps, training from {formats.metric(loss[0][1])} to "
    label += formats.metric(loss[-1][1])
    if held_out:
        series.append(Series("validation", held_out, "b", marks=len(held_out) <= _MARKED_UP_TO))
        legend.append(("b", "validation"))
        label += f", validation at the end {formats.metric(held_out[-1][1])}"
    label += "."
    remark = ""
    broken_step = next((row.step for row in history if not math.isfinite(row.loss)), None)
    if broken_step is not None:
        remark = f"The loss is not a number from step {broken_step}."
    return Curve("Loss", plots.line(series, label=label, zero=True), tuple(legend), remark)


def _noisy(title: str, name: str, points: list[Point], limit: float | None) -> Curve:
    """A figure whose values scatter, with their running mean; `limit` is the level at
    which training cuts them off."""
    series = _with_mean(name, points)
    guide = None
    if limit is not None:
        guide = (f"clipped at {formats.metric(limit)}", limit)
    # the norm of a step that overflowed is not finite
    finite = [value for _, value in points if math.isfinite(value)]
    median = statistics.median(finite or [math.nan])
    label = f"{title} over {len(points)} steps, median {formats.metric(median)}."
    return Curve(title, plots.line(series, label=label, zero=True, guide=guide))


def _with_mean(name: str, points: list[Point]) -> list[Series]:
    """The line of these points. If there are many, it is faint, and behind its running mean."""
    width = window(len(points))
    if not width:
        return [Series(name, points)]
    mean = Series(f"{name}, mean", running_mean(points, width), quiet=True)
    return [Series(name, points, "a faint"), mean]


def window(points: int) -> int:
    """Over how many steps a curve of so many points is averaged; 0: not at all."""
    if points < _SMOOTHED_FROM:
        return 0
    return max(5, points // 40)


def running_mean(points: list[Point], window: int) -> list[Point]:
    """At each point the mean of the last `window` finite values; NaN where its own value
    is not finite."""
    finite_values: list[float] = []
    means: list[Point] = []
    total = (
        0.0  # of the last `window` of them: a new sum at each point takes `window` times as long
    )
    for x, y in points:
        # a loss that is not finite is a gap, and does not spoil the means after it
        if not math.isfinite(y):
            means.append((x, math.nan))
            continue
        finite_values.append(y)
        total += y
        if len(finite_values) > window:
            total -= finite_values[-window - 1]
        means.append((x, total / min(len(finite_values), window)))
    return means
