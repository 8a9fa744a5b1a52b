"""What was planned before the run against what happened: speed, memory, hours and money.

Only like is compared with like; remarks name another training than planned, resident
memory of a CPU, and a model from the cache. Dollars are estimated, never billed."""

import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rekindle import formats
from rekindle.catalog.machines import recognised
from rekindle.outputs import Planned
from rekindle.records import HistoryRow, RunRecord, TrainingSummary
from rekindle.report import texts
from rekindle.report.collect import RunFindings

WARM_UP = 5  # steps: caches, allocators and clocks settle
FEWEST = 5  # steps that a median needs
_CPU = "cpu"  # TrainingSummary.device


class Figure(NamedTuple):
    """What was planned, at least, as expected and at most, and what happened;
    `say` writes both."""

    name: str
    planned: tuple[float, float, float]
    happened: float | None
    say: Callable[[float], str]

    def row(self, otherwise: str) -> tuple[str, ...]:
        """Name, what was expected, the interval, what happened, and whether that lies
        inside; of a training `otherwise` than planned this is not judged."""
        low, expected, high = self.planned
        interval = f"{self.say(low)} to {self.say(high)}" if low < high else ""
        if self.happened is None:
            return self.name, self.say(expected), interval, "–", ""
        verdict = ""
        if interval and not otherwise:
            verdict = "inside" if low <= self.happened <= high else "outside"
        return self.name, self.say(expected), interval, self.say(self.happened), verdict


class ComparedPlan(NamedTuple):
    """Rows of `Figure.row`, what to know of them,
    and the command by which later plans use them."""

    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]
    command: str


def measured(history: Sequence[HistoryRow]) -> tuple[tuple[HistoryRow, ...], int]:
    """The steps that tell how fast a training is,
    and how many of the first were left out."""
    # a step of no time, or of a broken clock, tells nothing
    timed = [row for row in history if row.step_seconds and math.isfinite(row.step_seconds)]
    left_out = min(WARM_UP, max(0, len(timed) - FEWEST))
    return tuple(timed[left_out:]), left_out


def compared(run: RunRecord, findings: RunFindings) -> ComparedPlan | None:
    """Plan and outcome, where there was a plan."""
    plan = findings.plan
    if plan is None:
        return None
    otherwise = otherwise_trained(plan, findings.training)
    rows = tuple(figure.row(otherwise) for figure in _figures(plan, run, findings))
    remarks = tuple(_remarks(plan, run, findings, otherwise))
    command = ""
    steps, _ = measured(findings.history)
    # the first row is the time of a step, which is what plans are corrected by
    if rows[0][-1] == "outside" and len(steps) >= FEWEST:
        arguments = [
            "rekindle",
            "plan",
            run.config or "CONFIG",
            "--calibrate",
            run.run_id,
        ]
        command = shlex.join(arguments)
    return ComparedPlan(rows, remarks, command)


def otherwise_trained(plan: Planned, trained: TrainingSummary | None) -> str:
    """How it was trained, where that is not what was planned."""
    if trained is None:
        return ""
    chosen = plan.chosen
    differences = []
    gpu = recognised(trained.device)
    # torch's name of a device is not the catalog's
    name = gpu.name if gpu else trained.device
    if trained.device and name.casefold() != chosen.gpu.casefold():
        differences.append((chosen.gpu, trained.device))
    ranks = chosen.nodes * chosen.gpus_per_node
    if trained.world_size != ranks:
        differences.append((f"{ranks} ranks", f"{trained.world_size}"))
    if trained.layout:
        differences.append((chosen.layout, trained.layout))
    if chosen.precision and trained.precision:
        differences.append((chosen.precision, trained.precision))
    clauses = []
    for planned, actual in differences:
        if planned != actual:
            clauses.append(f"planned {planned}, trained {actual}")
    return "; ".join(clauses)


def _figures(plan: Planned, run: RunRecord, findings: RunFindings) -> Iterator[Figure]:
    """The figures that were planned, each with what happened;
    the time of a step first."""
    chosen = plan.chosen
    steps, _ = measured(findings.history)
    step_seconds = None
    if steps:
        step_seconds = statistics.median(row.step_seconds or 0.0 for row in steps)
    yield Figure("Time of a step", chosen.step_seconds, step_seconds, formats.seconds)
    # what is planned of a CPU's memory is tensors, and what is measured is resident
    if chosen.gpu.casefold() != _CPU:
        planned_bytes = (chosen.memory_bytes,) * 3
        yield Figure("Tensors on the fullest GPU", planned_bytes, _peak(findings), formats.binary)
    likely_hours = plan.hours
    likely_usd = plan.on_demand_usd
    price = chosen.on_demand_usd_per_hour
    # a plan weighs spot machines whether or not the config asks for them
    if plan.spot and texts.setting(run.spec, "resources", "spot") is True:
        # no interval: it is not known how sure the mean is
        likely_hours = (statistics.mean(plan.spot.hours),) * 3
        likely_usd = (statistics.mean(plan.spot.usd),) * 3
        price = chosen.spot_usd_per_hour
    hours = _hours(run)
    if likely_hours:
        yield Figure("Training time", likely_hours, hours, formats.hours)
    if likely_usd:
        usd = None
        if hours is not None and price is not None:
            usd = hours * price
        yield Figure("Dollars, estimated", likely_usd, usd, formats.usd)


def _peak(findings: RunFindings) -> float | None:
    """Most memory of a GPU; what is resident on a CPU is something else."""
    if findings.training is None or findings.training.device in ("", _CPU):
        return None
    # 0 where no step was measured
    return max((row.memory_bytes or 0 for row in findings.history), default=0) or None


def _hours(run: RunRecord) -> float | None:
    """Hours of the training; None without one, or where the model came from the cache."""
    step = next((step for step in reversed(run.steps) if step.holding("training")), None)
    if step is None or step.cached or step.seconds is None:
        return None
    return step.seconds / 3600


def _remarks(plan: Planned, run: RunRecord, findings: RunFindings, otherwise: str) -> Iterator[str]:
    """What to know before the figures are compared."""
    chosen = plan.chosen
    nodes = f"{chosen.nodes} x " if chosen.nodes > 1 else ""
    yield f"Planned for {nodes}{chosen.machine} with the layout {chosen.layout}."
    if otherwise:
        yield f"The figures are of different trainings: {otherwise}."
    trained = findings.training
    if trained and _peak(findings) is None:
        yield "Memory is not compared: what is resident on a CPU is not what tensors take."
    if trained and plan.steps not in (None, trained.steps):
        yield f"{trained.steps:,} steps were trained, not the {plan.steps:,} that were planned."
    if trained and _hours(run) is None:
        yield "This run took its model from the cache, so that it has no hours of its own."
    if plan.on_demand_usd:
        yield "Dollars are hours at the price that the plan had: estimated, not billed."
