"""The training as the card shows it: its speed, and the curves of its history."""

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

_SMOOTHED_FROM = 60


@dataclasses.dataclass(frozen=True)
class Curve:
    """One figure: its plot, the legend as (css class, name), and a remark."""

    title: str
    plot: Markup
    legend: tuple[tuple[str, str], ...] = ()
    remark: str = ""


def curves(run: RunRecord, history: tuple[HistoryRow, ...]) -> list[Curve]:
    """The figures of a training."""
    limit = texts.number_setting(run.spec, "train", "clip_norm")
    return [curve for curve in _curves(history, limit) if curve.plot]


def measured(history: Sequence[HistoryRow]) -> list[tuple[str, str]]:
    """What a machine says of itself, as far as it was measured."""
    facts = []
    rates = [row.samples_per_second for row in history if math.isfinite(row.samples_per_second)]
    if rates:
        facts.append(("Median throughput", f"{formats.count(statistics.median(rates))} samples/s"))
    for name, field, say in (
        ("Median token rate", "tokens_per_second", lambda rate: f"{formats.count(rate)} tokens/s"),
        ("Model FLOPs utilisation", "mfu", formats.percent),
        ("Time waiting for data", "data_wait", formats.percent),
    ):
        if known := points(history, field):
            facts.append((name, say(statistics.median(value for _, value in known))))
    if peaks := [row.memory_bytes for row in history if row.memory_bytes is not None]:
        facts.append(("Peak memory of rank 0", formats.size(max(peaks))))
    return facts


def points(history: Sequence[HistoryRow], field: str) -> list[Point]:
    """The steps at which a figure was measured, each with its value."""
    values = ((float(row.step), getattr(row, field)) for row in history)
    return [(step, value) for step, value in values if value is not None]


def _curves(history: tuple[HistoryRow, ...], clip_norm: float | None) -> list[Curve]:
    if not history:
        return []
    rates = points(history, "samples_per_second")
    right, learning = points(history, "validation_accuracy"), points(history, "lr")
    end = formats.metric(right[-1][1]) if right else ""
    validation = [Series("validation", right, "b", marks=len(right) <= 40)]
    label = f"Validation accuracy at {len(right)} points, {end} at the end."
    accuracy = plots.line(validation, label=label)
    high = max((y for _, y in learning if math.isfinite(y)), default=0.0)
    label = f"Learning rate over {len(learning)} steps, at most {formats.metric(high)}."
    rate = plots.line([Series("learning rate", learning)], label=label, zero=True)
    return [
        _loss(history),
        *([Curve("Validation accuracy", accuracy, (("b", "validation"),))] if right else []),
        Curve("Learning rate", rate),
        _noisy("Gradient norm", "norm", points(history, "grad_norm"), clip_norm),
        _noisy("Throughput, samples per second", "samples/s", rates, None),
    ]


def _loss(history: tuple[HistoryRow, ...]) -> Curve:
    loss, held_out = points(history, "loss"), points(history, "validation_loss")
    series = _with_mean("training", loss)
    legend = [("a", "training")]
    if held_out:
        series.append(Series("validation", held_out, "b", marks=len(held_out) <= 40))
        legend.append(("b", "validation"))
    broken = next((row.step for row in history if not math.isfinite(row.loss)), None)
    remark = f"The loss is not a number from step {broken}." if broken is not None else ""
    ends = f"{formats.metric(loss[0][1])} to {formats.metric(loss[-1][1])}"
    label = f"Loss over {len(loss)} steps, training from {ends}"
    label += f", validation at the end {formats.metric(held_out[-1][1])}." if held_out else "."
    return Curve("Loss", plots.line(series, label=label, zero=True), tuple(legend), remark)


def _noisy(title: str, name: str, points: list[Point], limit: float | None) -> Curve:
    series = _with_mean(name, points)
    guide = (f"clipped at {formats.metric(limit)}", limit) if limit is not None else None
    middle = statistics.median([y for _, y in points if math.isfinite(y)] or [math.nan])
    label = f"{title} over {len(points)} steps, median {formats.metric(middle)}."
    return Curve(title, plots.line(series, label=label, zero=True, guide=guide))


def _with_mean(name: str, points: list[Point]) -> list[Series]:
    """The line; over many points drawn faintly behind its running mean."""
    width = window(len(points))
    if not width:
        return [Series(name, points)]
    mean = Series(f"{name}, mean", running_mean(points, width), quiet=True)
    return [Series(name, points, "a faint"), mean]


def window(points: int) -> int:
    """Over how many steps a curve of so many points is averaged; 0 for not at all."""
    return max(5, points // 40) if points >= _SMOOTHED_FROM else 0


def running_mean(points: list[Point], window: int) -> list[Point]:
    """The mean of the last `window` finite values at each point, NaN where the value is."""
    recent: list[float] = []
    result: list[Point] = []
    total = 0.0
    for x, y in points:
        if not math.isfinite(y):
            result.append((x, math.nan))
            continue
        recent.append(y)
        total += y
        if len(recent) > window:
            total -= recent[-window - 1]
        result.append((x, total / min(len(recent), window)))
    return result
