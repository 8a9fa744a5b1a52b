"""What the card draws and sorts of the evidence: the gate's interval, confusion, calibration,
classes and slices. All else the template reads from the record."""

import dataclasses
import math

from markupsafe import Markup

from rekindle import formats
from rekindle.records import ClassResult, Evidence, RunRecord, Slice
from rekindle.report import plots, texts, verdicts
from rekindle.report.collect import Findings


@dataclasses.dataclass(frozen=True)
class SliceTable:
    """The slices of one column, the worst change first, and the `top` of the bars of its metric."""

    column: str
    metric: str
    has_champion: bool
    top: float
    rows: list[Slice]
    smallest: float | None


def interval(run: RunRecord, evidence: Evidence) -> tuple[Markup, str]:
    """The interval of the gate, drawn and said; nothing without a comparison."""
    if (comparison := evidence.comparison) is None:
        return Markup(""), ""
    needed = texts.number_setting(run.spec, "evaluate", "gate", "min_delta")
    if texts.setting(run.spec, "evaluate", "gate", "mode") == "noninferiority":
        needed = -float(texts.setting(run.spec, "evaluate", "gate", "margin"))
    ends = comparison.estimate, comparison.lower, comparison.upper
    gain, lower, upper = map(formats.signed, ends)
    drawn_from = "exact bounds of paired answers"
    if comparison.resamples:
        drawn_from = f"{formats.count(comparison.resamples)} resamples, seed {comparison.seed}"
    text = (
        f"The gain in {texts.metric_name(comparison.metric)} is {gain}, with"
        f" {100 * comparison.confidence:g}% confidence between {lower} and {upper} ({drawn_from})."
    )
    if comparison.detectable:
        text += f" A gain of {formats.metric(comparison.detectable)} would show in 80% of cases."
    drawn = plots.interval(
        lower=comparison.lower,
        estimate=comparison.estimate,
        upper=comparison.upper,
        threshold=needed,
        label=text,
    )
    return drawn, text


def confusion(evidence: Evidence) -> Markup:
    """The confusion matrix, if there are classes."""
    counts = evidence.confusion
    hits = sum(row[i] for i, row in enumerate(counts) if i < len(row))
    label = f"Confusion matrix of {len(counts)} classes: {hits} of {sum(map(sum, counts))} right."
    return plots.heatmap(evidence.labels, counts, label=label)


def calibration(evidence: Evidence) -> Markup:
    """The reliability diagram, if there are predictions; of numbers, true over predicted ones."""
    bins = [(part.confidence, part.accuracy, part.rows) for part in evidence.calibration]
    bins = [each for each in bins if each[2] > 0]
    count = f"{sum(rows for _, _, rows in bins)} predictions, {len(bins)} bins"
    label = f"Reliability diagram: accuracy over confidence, {count}."
    if is_numeric := numeric(evidence):
        label = f"True over predicted numbers, {count}."
    return plots.reliability(bins, label=label, numeric=is_numeric)


def numeric(evidence: Evidence) -> bool:
    """Whether numbers are predicted."""
    return "r2" in evidence.metrics


def by_class(evidence: Evidence) -> list[ClassResult]:
    """The classes, or types of entity, the worst F1 first."""
    return sorted(evidence.classes, key=lambda part: (part.f1 or 0.0, -part.rows))


def slices(run: RunRecord, found: Findings) -> list[SliceTable]:
    """A table for each column that was sliced by."""
    every = found.evidence.slices if found.evidence else ()
    smallest = texts.number_setting(run.spec, "evaluate", "gate", "min_slice_size")
    wanted = verdicts.gate_metric(run, found)
    columns = dict.fromkeys(part.column for part in every)
    parts = ([part for part in every if part.column == column] for column in columns)
    return [_slice_table(each, wanted, smallest) for each in parts]


def _slice_table(parts: list[Slice], wanted: str, smallest: float | None) -> SliceTable:
    available = dict.fromkeys(name for part in parts for name in part.candidate)
    metric = next((n for n in (wanted, "accuracy", *available) if n in available), "")
    values = [side.get(metric) for part in parts for side in (part.candidate, part.champion)]
    top = max((value for value in values if value and value < math.inf), default=1.0)
    top = 1.0 if 0 < top <= 1 else top
    rows = []
    for part in parts:
        candidate, champion = part.candidate.get(metric), part.champion.get(metric)
        small = smallest is not None and part.rows < smallest
        change, _ = verdicts.improvement(metric, candidate, champion)
        value = change if change is not None else candidate
        sign = -1 if texts.lower_is_better(metric) else 1
        badness = sign * value if value is not None and math.isfinite(value) else -math.inf
        rows.append((small, badness, part.value or "(empty)", part))
    rows.sort(key=lambda row: row[:3])
    has_champion = any(part.champion for part in parts)
    shown = [row[3] for row in rows]
    return SliceTable(parts[0].column, metric, has_champion, top, shown, smallest)
