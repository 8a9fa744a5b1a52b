"""What the card draws and sorts of the evidence: the gate's interval, confusion,
calibration, classes and slices. All else the template reads from the record."""

import dataclasses
import math

from markupsafe import Markup

from rekindle import formats
from rekindle.records import ClassResult, Evidence, RunRecord, Slice
from rekindle.report import plots, texts, verdicts
from rekindle.report.collect import RunFindings


@dataclasses.dataclass(frozen=True)
class SliceTable:
    """The slices of one column, the worst change first,
    and the `top` of the bars of its metric."""

    column: str
    metric: str
    has_champion: bool
    top: float
    rows: list[Slice]
    smallest: float | None


def interval(run: RunRecord, evidence: Evidence) -> tuple[Markup, str]:
    """The interval of the gate, drawn and in words; nothing without a comparison."""
    comparison = evidence.comparison
    if comparison is None:
        return Markup(""), ""
    threshold = texts.number_setting(run.spec, "evaluate", "gate", "min_delta")
    if texts.setting(run.spec, "evaluate", "gate", "mode") == "noninferiority":
        # a loss of up to the margin is allowed
        threshold = -float(texts.setting(run.spec, "evaluate", "gate", "margin"))
    method = "exact bounds of paired answers"
    if comparison.resamples:
        method = f"{formats.count(comparison.resamples)} resamples, seed {comparison.seed}"
    text = (
        f"The gain in {texts.metric_name(comparison.metric)} is "
        f"{formats.signed(comparison.estimate)}, with {100 * comparison.confidence:g}% confidence "
        f"between {formats.signed(comparison.lower)} and {formats.signed(comparison.upper)} "
        f"({method})."
    )
    if comparison.detectable:
        text += f" A gain of {formats.metric(comparison.detectable)} would show in 80% of cases."
    drawing = plots.interval(
        lower=comparison.lower,
        estimate=comparison.estimate,
        upper=comparison.upper,
        threshold=threshold,
        label=text,
    )
    return drawing, text


def confusion(evidence: Evidence) -> Markup:
    """The confusion matrix, if there are classes."""
    counts = evidence.confusion
    hits = sum(row[i] for i, row in enumerate(counts) if i < len(row))
    label = f"Confusion matrix of {len(counts)} classes: {hits} of {sum(map(sum, counts))} right."
    return plots.heatmap(evidence.labels, counts, label=label)


def calibration(evidence: Evidence) -> Markup:
    """The reliability diagram, if there are predictions; of numbers,
    true over predicted ones."""
    bins = []
    for part in evidence.calibration:
        if part.rows > 0:  # a bin into which nothing fell has no accuracy
            bins.append((part.confidence, part.accuracy, part.rows))
    count = f"{sum(rows for _, _, rows in bins)} predictions, {len(bins)} bins"
    label = f"Reliability diagram: accuracy over confidence, {count}."
    is_numeric = numeric(evidence)
    if is_numeric:
        label = f"True over predicted numbers, {count}."
    return plots.reliability(bins, label=label, numeric=is_numeric)


def numeric(evidence: Evidence) -> bool:
    """Whether numbers are predicted."""
    return "r2" in evidence.metrics


def by_class(evidence: Evidence) -> list[ClassResult]:
    """The classes, or types of entity, the worst F1 first."""
    # of two that are as bad the one with more rows
    return sorted(evidence.classes, key=lambda part: (part.f1 or 0.0, -part.rows))


def slices(run: RunRecord, findings: RunFindings) -> list[SliceTable]:
    """A table for each column that was sliced by."""
    if not findings.evidence:
        return []
    smallest = texts.number_setting(run.spec, "evaluate", "gate", "min_slice_size")
    gate_metric = verdicts.gate_metric(run, findings)
    by_column: dict[str, list[Slice]] = {}
    for part in findings.evidence.slices:
        by_column.setdefault(part.column, []).append(part)
    return [_slice_table(parts, gate_metric, smallest) for parts in by_column.values()]


def _slice_table(parts: list[Slice], gate_metric: str, smallest: float | None) -> SliceTable:
    """The slices of a column by the gate's metric, or another that they have."""
    available: dict[str, None] = {}  # in the order of first sight
    for part in parts:
        available |= dict.fromkeys(part.candidate)
    metric = next((name for name in (gate_metric, "accuracy", *available) if name in available), "")
    return SliceTable(
        column=parts[0].column,
        metric=metric,
        has_champion=any(part.champion for part in parts),
        top=_top(parts, metric),
        rows=sorted(parts, key=lambda part: _slice_order(part, metric, smallest)),
        smallest=smallest,
    )


def _top(parts: list[Slice], metric: str) -> float:
    """Where the bars of a metric end: at one,
    or at the largest value where some are beyond."""
    values = []
    for part in parts:
        for value in (part.candidate.get(metric), part.champion.get(metric)):
            # NaN is below nothing
            if value and value < math.inf:
                values.append(value)
    largest = max(values, default=1.0)
    return 1.0 if 0 < largest <= 1 else largest


def _slice_order(part: Slice, metric: str, smallest: float | None) -> tuple[bool, float, str]:
    """Slices that are too small to judge come last; of the others the worst change first,
    or the worst value where there is no champion."""
    is_small = smallest is not None and part.rows < smallest
    candidate = part.candidate.get(metric)
    change, _ = verdicts.improvement(metric, candidate, part.champion.get(metric))
    value = change if change is not None else candidate
    name = part.value or "(empty)"
    # what could not be computed is looked at first
    if value is None or not math.isfinite(value):
        return is_small, -math.inf, name
    if texts.lower_is_better(metric):
        value = -value
    return is_small, value, name
