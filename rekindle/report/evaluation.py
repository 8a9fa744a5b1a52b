"""The evidence as the card shows it: gate and interval, metrics against the champion, confusion,
calibration, slices."""

import dataclasses
import math

from markupsafe import Markup

from rekindle import formats, records
from rekindle.report import plots, texts, verdicts
from rekindle.report.collect import Findings

_SLICES_SHOWN = 12
_NOTHING = Markup("")


@dataclasses.dataclass(frozen=True)
class Gate:
    """The checks, and the bootstrap interval drawn and said."""

    checks: tuple[records.Check, ...]
    interval: Markup
    interval_text: str


@dataclasses.dataclass(frozen=True)
class Compared:
    """One metric or slice, candidate and champion, with the change and whether it is good."""

    name: str
    candidate: float | None
    champion: float | None
    change: float | None
    tone: verdicts.Tone
    rows: int = 0
    small: bool = False
    bar: Markup = _NOTHING


@dataclasses.dataclass(frozen=True)
class SliceTable:
    """The slices of one column, the worst change first; `more` are those beyond the first ones."""

    column: str
    metric: str
    has_champion: bool
    shown: tuple[Compared, ...]
    more: tuple[Compared, ...]
    smallest: int | None


@dataclasses.dataclass(frozen=True)
class ClassRow:
    """One class, or type of entity; `change` compares its F1 with the champion's."""

    result: records.ClassResult
    change: Compared


@dataclasses.dataclass(frozen=True)
class ClassTable:
    """All of them, the worst F1 first; `of` is what they are, `more` those beyond the first."""

    of: str
    shown: tuple[ClassRow, ...]
    more: tuple[ClassRow, ...]


@dataclasses.dataclass(frozen=True)
class Quality:
    """How good the candidate is on the held-out rows."""

    evidence: records.Evidence
    metrics: tuple[Compared, ...]
    classes: ClassTable | None
    confusion: Markup
    mistakes: tuple[tuple[str, str, int], ...]
    wide: bool
    calibration: Markup
    samples: tuple[records.Sample, ...]


def gate(run: records.RunRecord, evidence: records.Evidence | None) -> Gate | None:
    """The gate of the run, if it had one."""
    if not evidence or not (evidence.checks or evidence.comparison):
        return None
    if (comparison := evidence.comparison) is None:
        return Gate(evidence.checks, _NOTHING, "")
    better, metric = 1, comparison.metric
    if texts.lower_is_better(metric):
        # A gate may have turned a lower-is-better metric round already: then the estimate and the
        # plain difference of the two metrics have opposite signs.
        sides = (evidence.metrics, evidence.champion_metrics)
        ours, theirs = (side.get(metric, math.nan) for side in sides)
        better = 1 if (ours - theirs) * comparison.estimate < 0 else -1
    needed = texts.number_setting(run.spec, "evaluate", "gate", "min_delta")
    policy = (run.spec.get("evaluate") or {}).get("gate") or {}
    if policy.get("mode") == "noninferiority":
        needed = -float(policy["margin"])
    text = (
        f"The change in {texts.metric_name(metric)} is {formats.signed(comparison.estimate)},"
        f" with {100 * comparison.confidence:g}% confidence between"
        f" {formats.signed(comparison.lower)} and {formats.signed(comparison.upper)}"
        f" ({formats.count(comparison.resamples)} paired bootstrap resamples,"
        f" seed {comparison.seed})."
    )
    if comparison.detectable:
        text += f" A gain of {formats.metric(comparison.detectable)} would show in 80% of cases."
    drawn = plots.interval(
        lower=comparison.lower, estimate=comparison.estimate, upper=comparison.upper,
        threshold=None if needed is None else better * needed, better=better, label=text,
    )  # fmt: skip
    return Gate(evidence.checks, drawn, text)


def quality(evidence: records.Evidence | None) -> Quality | None:
    """Metrics and their plots, if the run was evaluated."""
    if not evidence:
        return None
    ours, theirs = evidence.metrics, evidence.champion_metrics
    names = dict.fromkeys([*ours, *theirs])
    bins = [(part.confidence, part.accuracy, part.rows) for part in evidence.calibration]
    bins = [each for each in bins if each[2] > 0]
    count = f"{sum(rows for _, _, rows in bins)} predictions, {len(bins)} bins"
    calibration = f"Reliability diagram: accuracy over confidence, {count}."
    wrong = plots.mistakes(evidence.labels, evidence.confusion)
    hits = sum(row[i] for i, row in enumerate(evidence.confusion) if i < len(row))
    total = sum(sum(row) for row in evidence.confusion)
    n = len(evidence.confusion)
    label = f"Confusion matrix of {n} classes: {hits} of {total} right."
    dumped = (sample.model_dump() for sample in evidence.samples)
    samples = ({name: texts.plain(text) for name, text in sample.items()} for sample in dumped)
    return Quality(
        evidence=evidence, classes=_classes(evidence),
        metrics=tuple(_compare(name, name, ours.get(name), theirs.get(name)) for name in names),
        confusion=plots.heatmap(evidence.labels, evidence.confusion, label=label), mistakes=wrong,
        wide=n > 12 or max((len(name) for name in evidence.labels), default=0) > 12,
        calibration=plots.reliability(bins, label=calibration),
        samples=tuple(records.Sample(**sample) for sample in samples),
    )  # fmt: skip


def slices(run: records.RunRecord, found: Findings) -> tuple[SliceTable, ...]:
    """A table for each column that was sliced by."""
    if not found.evidence or not found.evidence.slices:
        return ()
    every = found.evidence.slices
    columns = dict.fromkeys(part.column for part in every)
    smallest = texts.number_setting(run.spec, "evaluate", "gate", "min_slice_size")
    wanted = verdicts.gate_metric(run, found)
    parts = {column: [part for part in every if part.column == column] for column in columns}
    return tuple(_slice_table(*each, wanted, smallest) for each in parts.items())


def _classes(evidence: records.Evidence) -> ClassTable | None:
    if not evidence.classes:
        return None
    worst = sorted(evidence.classes, key=lambda part: (part.f1 or 0.0, -part.rows))
    rows = [ClassRow(part, _compare(part.label, "f1", part.f1, part.champion_f1)) for part in worst]
    of = "entity" if "entity_f1" in evidence.metrics else "class"
    return ClassTable(of, tuple(rows[:_SLICES_SHOWN]), tuple(rows[_SLICES_SHOWN:]))


def _compare(name: str, metric: str, candidate: float | None, champion: float | None) -> Compared:
    change, tone = verdicts.improvement(metric, candidate, champion)
    return Compared(name, candidate, champion, change, tone)


def _slice_table(
    column: str, parts: list[records.Slice], wanted: str, smallest: float | None
) -> SliceTable:
    available = dict.fromkeys(name for part in parts for name in part.candidate)
    metric = next((n for n in (wanted, "accuracy", *available) if n in available), "")
    values = [side.get(metric) for part in parts for side in (part.candidate, part.champion)]
    top = max((value for value in values if value and value < math.inf), default=1.0)
    top = 1.0 if 0 < top <= 1 else top
    rows = []
    for part in parts:
        candidate, champion = part.candidate.get(metric), part.champion.get(metric)
        small = smallest is not None and part.rows < smallest
        said = f"{part.value}: {formats.metric(candidate)}"
        said += f", champion {formats.metric(champion)}" if champion is not None else ""
        css, drawn = "a soft" if small else "a", _NOTHING
        if candidate is not None:
            drawn = plots.bar(candidate, top, label=said, mark=champion, css=css)
        row = _compare(part.value or "(empty)", metric, candidate, champion)
        rows.append(dataclasses.replace(row, rows=part.rows, small=small, bar=drawn))
    rows.sort(key=lambda row: (row.small, _badness(row, metric), row.name))
    return SliceTable(
        column=column, metric=metric, has_champion=any(part.champion for part in parts),
        shown=tuple(rows[:_SLICES_SHOWN]), more=tuple(rows[_SLICES_SHOWN:]),
        smallest=int(smallest) if smallest is not None else None,
    )  # fmt: skip


def _badness(row: Compared, metric: str) -> float:
    """Ascending from the worst, by the change against the champion, or else by the value."""
    sign = -1 if texts.lower_is_better(metric) else 1
    value = row.change if row.change is not None else row.candidate
    return sign * value if value is not None and math.isfinite(value) else -math.inf
