"""What was planned before the run against what happened: layout, speed, memory, hours and money.

Only like is compared with like, and what is not is said: other machines or another layout than
planned, resident memory of a CPU, a model from the cache. Dollars are estimated, never billed."""

import dataclasses
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence

from markupsafe import Markup

from rekindle import formats
from rekindle.catalog.machines import recognised
from rekindle.outputs import Planned
from rekindle.records import HistoryRow, RunRecord, StepRecord, TrainingSummary
from rekindle.report import plots, texts
from rekindle.report.collect import Findings
from rekindle.report.drawing import Axis, ratio_axis
from rekindle.report.verdicts import Tone

WARM_UP = 5  # steps: caches, allocators and clocks settle
FEWEST = 5  # steps that a median needs
_UNKNOWN = "not on record"
_CPU = "cpu"  # TrainingSummary.device


@dataclasses.dataclass(frozen=True)
class Figure:
    """`planned` is least, expected, most; `sure` says that nine of ten lie within. `better` is 1
    where more is better, -1 where less is. `more` is said of the plan, `detail` of the outcome."""

    name: str
    planned: tuple[float, float, float]
    happened: float | None
    say: Callable[[float], str]
    better: int = -1
    sure: bool = True
    more: str = ""
    detail: str = ""

    @property
    def ratio(self) -> float | None:
        """What happened over what was expected."""
        if self.happened is None or not self.planned[1] > 0:
            return None
        ratio = self.happened / self.planned[1]
        return ratio if math.isfinite(ratio) and ratio > 0 else None

    @property
    def inside(self) -> bool | None:
        """Whether it lies in the interval; None where there is none, or nothing happened."""
        if self.ratio is None or self.happened is None or not self.sure:
            return None
        return self.planned[0] <= self.happened <= self.planned[2]

    @property
    def tone(self) -> Tone:
        """Of what lies outside: better or worse than planned."""
        if self.inside is not False or self.ratio is None:
            return "quiet"
        return "good" if (self.ratio > 1) == (self.better > 0) else "bad"

    @property
    def interval(self) -> str:
        """What nine of ten lie between, where there are two ends."""
        return _between(self) if self.planned[0] < self.planned[2] else ""

    @property
    def outcome(self) -> str:
        """What happened, in words."""
        return "–" if self.happened is None else self.say(self.happened)

    @property
    def difference(self) -> str:
        """How far apart they are, and whether that is inside the interval."""
        where = {None: "", True: ", inside", False: ", outside"}[self.inside]
        return "" if self.ratio is None else formats.change(self.ratio - 1) + where

    def drawn(self, scale: Axis) -> Markup:
        """The interval as a bar, what was expected as a tick and what happened as a dot."""
        low, expected, high = self.planned
        label = f"{self.name}: planned {self.say(expected)}"
        label += f", {self.interval}" if self.interval else ""
        happened = f"; happened {self.outcome}, {self.difference}."
        label += happened if self.difference else "; not measured."
        css = "out" if self.inside is False else "in"
        bounds = low / expected, high / expected
        return plots.planned(*bounds, self.ratio, scale, label=label, css=css)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A verdict, the command by which later plans use what was measured, machines and layout as
    (name, value), rows on one scale, and what to know when reading."""

    tone: Tone
    verdict: str
    command: str
    facts: tuple[tuple[str, str], ...]
    scale: Axis
    rows: tuple[Figure, ...]
    remarks: tuple[str, ...]


def measured(history: Sequence[HistoryRow]) -> tuple[tuple[HistoryRow, ...], int]:
    """The steps that tell how fast a training is, and how many of the first were left out."""
    timed = [row for row in history if row.step_seconds and math.isfinite(row.step_seconds)]
    left_out = min(WARM_UP, max(0, len(timed) - FEWEST))
    return tuple(timed[left_out:]), left_out


def compared(run: RunRecord, found: Findings) -> Compared | None:
    """Plan and outcome, where there was a plan."""
    plan = found.plan
    if plan is None or not plan.chosen.step_seconds[0] > 0:
        return None
    otherwise = otherwise_trained(plan, found.training)
    planned = (one for one in _figures(plan, run, found) if one.planned[1] > 0)
    figures = [dataclasses.replace(one, sure=one.sure and not otherwise) for one in planned]
    ends = (end / one.planned[1] for one in figures for end in one.planned)
    scale = ratio_axis([*ends, *(one.ratio for one in figures if one.ratio is not None)])
    step, enough = figures[0], len(measured(found.history)[0]) >= FEWEST
    tone, verdict = _verdict(step, otherwise)
    command = ["rekindle", "plan", run.config or "CONFIG", "--calibrate", run.run_id]
    return Compared(
        tone=tone, verdict=verdict,
        command=shlex.join(command) if step.inside is False and enough else "",
        facts=tuple(_places(plan, found.training)), scale=scale, rows=tuple(figures),
        remarks=tuple(_remarks(plan, run, found)),
    )  # fmt: skip


def _figures(plan: Planned, run: RunRecord, found: Findings) -> Iterator[Figure]:
    chosen, (rows, _) = plan.chosen, measured(found.history)

    def rate(name: str, middle: float, field: str, say: Callable[[float], str]) -> Figure:
        low, expected, high = chosen.step_seconds
        between = (middle * expected / high, middle, middle * expected / low)
        return Figure(name, between, _median(rows, field), say, better=1)

    took = _median(rows, "step_seconds")
    yield Figure("Time of a step", chosen.step_seconds, took, formats.seconds)
    yield rate("Tokens a second", chosen.tokens_per_second, "tokens_per_second", _rate)
    if chosen.gpu.casefold() != _CPU:
        yield rate("Model FLOPs utilisation", chosen.mfu, "mfu", formats.percent)
        yield Figure(
            "Tensors on the fullest GPU", (chosen.memory_bytes,) * 3, _peak(found), formats.binary,
            sure=False, more=f"{formats.binary(chosen.needed_bytes)} with the reserve",
        )  # fmt: skip
    step = _trained(run)
    hours = None if step is None or step.cached or step.seconds is None else step.seconds / 3600
    spot = plan.spot if _on_spot(plan, run) else None
    price = _price(plan, run)
    usd = None if hours is None or price is None else hours * price
    times = f"{step.attempts} attempts" if step is not None and step.attempts > 1 else ""
    on_spot = spot.hours if spot else None
    yield from _spending("Training time", plan.hours, on_spot, hours, formats.hours, times)
    on_spot = spot.usd if spot else None
    yield from _spending("Dollars, estimated", plan.on_demand_usd, on_spot, usd, formats.usd)


def _spending(
    name: str, planned: tuple[float, float, float] | None, on_spot: tuple[float, float] | None,
    happened: float | None, say: Callable[[float], str], detail: str = "",
) -> Iterator[Figure]:  # fmt: skip
    """On spot machines between what reclaims all at once make of it, and one by one; how sure the
    speed is comes on top, so that nothing is claimed of the ends."""
    if on_spot is not None:
        ends = min(on_spot), statistics.mean(on_spot), max(on_spot)
        yield Figure(name, ends, happened, say, sure=False, detail=detail)
    elif planned is not None:
        yield Figure(name, planned, happened, say, detail=detail)


def _places(plan: Planned, trained: TrainingSummary | None) -> Iterator[tuple[str, str]]:
    chosen = plan.chosen
    gpus = f"{chosen.nodes * chosen.gpus_per_node} x {chosen.gpu}"
    machines = chosen.machine if chosen.nodes == 1 else f"{chosen.nodes} x {chosen.machine}"
    yield "Planned for", f"{gpus}, {machines}"
    if trained is not None:
        yield "Trained on", f"{trained.world_size} x {trained.device or _UNKNOWN}"
    yield "Planned layout", chosen.layout
    if trained is not None:
        yield "Trained layout", trained.layout or _UNKNOWN


def _median(rows: Sequence[HistoryRow], field: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, field)) and math.isfinite(value)]
    return statistics.median(values) if values else None


def _peak(found: Findings) -> float | None:
    """Of a GPU; what is resident on a CPU is something else."""
    if found.training is None or found.training.device in ("", _CPU):
        return None
    return max((row.memory_bytes for row in found.history if row.memory_bytes), default=None)


def _trained(run: RunRecord) -> StepRecord | None:
    """The last step that left a training."""
    return next((step for step in reversed(run.steps) if step.holding("training")), None)


def _on_spot(plan: Planned, run: RunRecord) -> bool:
    return texts.setting(run.spec, "resources", "spot") is True and plan.spot is not None


def _price(plan: Planned, run: RunRecord) -> float | None:
    spot = _on_spot(plan, run)
    return plan.chosen.spot_usd_per_hour if spot else plan.chosen.on_demand_usd_per_hour


def otherwise_trained(plan: Planned, trained: TrainingSummary | None) -> str:
    """How it was trained, where that is not what was planned."""
    if trained is None:
        return ""
    chosen, device = plan.chosen, trained.device
    ranks = chosen.nodes * chosen.gpus_per_node
    known = recognised(device)
    differences = []
    if device and (known.name if known else device).casefold() != chosen.gpu.casefold():
        differences.append((chosen.gpu, device))
    if trained.world_size != ranks:
        differences.append((f"{ranks} ranks", f"{trained.world_size}"))
    if trained.layout and trained.layout != chosen.layout:
        differences.append((chosen.layout, trained.layout))
    if trained.precision and chosen.precision and trained.precision != chosen.precision:
        differences.append((chosen.precision, trained.precision))
    return "; ".join(f"planned {had}, trained {has}" for had, has in differences)


def _verdict(step: Figure, otherwise: str) -> tuple[Tone, str]:
    if step.ratio is None or step.happened is None:
        return "quiet", "Nothing to compare yet: no step of this run is on record with its time."
    if otherwise:
        return "quiet", f"The figures are of different trainings: {otherwise}."
    took, between = formats.seconds(step.happened), _between(step)
    if step.inside:
        return "good", f"As planned: a step took {took}, inside the interval of {between}."
    expected = formats.seconds(step.planned[1])
    if step.ratio > 1:
        by = f"{formats.times(step.ratio)} the expected {expected}, above"
        return "bad", f"Slower than planned: a step took {took}, {by} the interval of {between}."
    by = f"{formats.times(1 / step.ratio)} as fast as the expected {expected}, below"
    return "quiet", f"Faster than planned: a step took {took}, {by} the interval of {between}."


def _remarks(plan: Planned, run: RunRecord, found: Findings) -> Iterator[str]:
    trained, (rows, left) = found.training, measured(found.history)
    if rows:
        first = f", without the first {left}, which warm up" if left else ""
        yield f"Speeds are medians of {formats.count(len(rows))} steps{first}."
    if trained is not None and found.history and _peak(found) is None:
        why = "training on a CPU" if trained.device == _CPU else "a record that names no device"
        yield f"Memory is not compared: {why} says how much was resident, not what tensors took."
    elif plan.chosen.degrees.get("pp", 1) > 1 and _peak(found) is not None:
        yield "Memory was measured on rank 0; the fullest stage of a pipeline may be another."
    # examples that are shorter than they may be make steps shorter than planned
    each = [row.tokens for row in rows if row.tokens]
    if each and abs((mean := statistics.mean(each)) / plan.tokens_per_step - 1) > 0.1:
        had, most = formats.count(mean), f"{formats.count(plan.tokens_per_step)}: as many as its"
        yield f"A step had about {had} tokens, and was planned with {most} examples may have."
    yield from _of_time(plan, run, trained)


def _of_time(plan: Planned, run: RunRecord, trained: TrainingSummary | None) -> Iterator[str]:
    step = _trained(run)
    if step is not None and step.cached:
        yield "This run took its model from the cache, so that it has no hours of its own."
        return
    if trained is not None and plan.steps not in (None, trained.steps):
        steps = f"{formats.count(plan.steps or 0)} steps, trained {formats.count(trained.steps)}"
        yield f"Planned were {steps}: hours and dollars differ by that, too."
    if step is not None and plan.hours is not None:
        end = "." if _on_spot(plan, run) else "; the plan has none."
        yield f"Training is the wall time of its step, with starts, waits and interruptions{end}"
    price, kind = _price(plan, run), "spot" if _on_spot(plan, run) else "on demand"
    if step is not None and price is not None and plan.on_demand_usd is not None:
        where = f" in {plan.chosen.region}" if plan.chosen.region else ""
        an_hour = f"{formats.usd(price)} an hour {kind}{where}"
        yield f"Dollars are these hours at the plan's price, {an_hour}: estimated, not billed."


def _between(figure: Figure) -> str:
    return f"{figure.say(figure.planned[0])} to {figure.say(figure.planned[2])}"


def _rate(value: float) -> str:
    return formats.count(value) if value >= 100 else f"{value:.3g}"
