"""What was planned before the run against what happened: speed, memory, hours and money.

Only like is compared with like; remarks name another training than planned, resident memory of a
CPU, and a model from the cache. Dollars are estimated, never billed."""

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
from rekindle.report.collect import Findings

WARM_UP = 5  # steps: caches, allocators and clocks settle
FEWEST = 5  # steps that a median needs
_CPU = "cpu"  # TrainingSummary.device


class Figure(NamedTuple):
    """What was planned, at least, as expected and at most, and what happened; `say` writes both."""

    name: str
    planned: tuple[float, float, float]
    happened: float | None
    say: Callable[[float], str]

    def row(self, otherwise: str) -> tuple[str, ...]:
        """Name, what was expected, the interval, what happened, and whether that lies inside."""
        low, expected, high = self.planned
        between = f"{self.say(low)} to {self.say(high)}" if low < high else ""
        happened, judged = "–" if self.happened is None else self.say(self.happened), ""
        if self.happened is not None and between and not otherwise:
            judged = "inside" if low <= self.happened <= high else "outside"
        return self.name, self.say(expected), between, happened, judged


class Compared(NamedTuple):
    """Rows of `Figure.row`, what to know of them, and the command by which later plans use them."""

    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...]
    command: str


def measured(history: Sequence[HistoryRow]) -> tuple[tuple[HistoryRow, ...], int]:
    """The steps that tell how fast a training is, and how many of the first were left out."""
    timed = [row for row in history if row.step_seconds and math.isfinite(row.step_seconds)]
    left_out = min(WARM_UP, max(0, len(timed) - FEWEST))
    return tuple(timed[left_out:]), left_out


def compared(run: RunRecord, found: Findings) -> Compared | None:
    """Plan and outcome, where there was a plan."""
    plan = found.plan
    if plan is None:
        return None
    otherwise = otherwise_trained(plan, found.training)
    rows = tuple(f.row(otherwise) for f in _figures(plan, run, found))
    command = ["rekindle", "plan", run.config or "CONFIG", "--calibrate", run.run_id]
    is_useful = rows[0][-1] == "outside" and len(measured(found.history)[0]) >= FEWEST
    remarks = _remarks(plan, run, found, otherwise)
    return Compared(rows, tuple(remarks), shlex.join(command) if is_useful else "")


def otherwise_trained(plan: Planned, trained: TrainingSummary | None) -> str:
    """How it was trained, where that is not what was planned."""
    if trained is None:
        return ""
    chosen, known = plan.chosen, recognised(trained.device)
    gpu, ranks = known.name if known else trained.device, chosen.nodes * chosen.gpus_per_node
    pairs = (
        (chosen.gpu, trained.device if gpu.casefold() != chosen.gpu.casefold() else ""),
        (f"{ranks} ranks", f"{trained.world_size}" if trained.world_size != ranks else ""),
        (chosen.layout, trained.layout),
        (chosen.precision, chosen.precision and trained.precision),
    )
    return "; ".join(f"planned {had}, trained {has}" for had, has in pairs if has and had != has)


def _figures(plan: Planned, run: RunRecord, found: Findings) -> Iterator[Figure]:
    chosen, hours = plan.chosen, _hours(run)
    times = [row.step_seconds or 0.0 for row in measured(found.history)[0]]
    took = statistics.median(times) if times else None
    yield Figure("Time of a step", chosen.step_seconds, took, formats.seconds)
    if chosen.gpu.casefold() != _CPU:
        tensors = (chosen.memory_bytes,) * 3
        yield Figure("Tensors on the fullest GPU", tensors, _peak(found), formats.binary)
    spot = plan.spot if texts.setting(run.spec, "resources", "spot") is True else None
    price = chosen.spot_usd_per_hour if spot else chosen.on_demand_usd_per_hour
    likely_hours, likely_usd = plan.hours, plan.on_demand_usd
    if spot:  # no interval: nobody knows how sure the mean is
        likely_hours, likely_usd = ((statistics.mean(e),) * 3 for e in (spot.hours, spot.usd))
    if likely_hours:
        yield Figure("Training time", likely_hours, hours, formats.hours)
    if likely_usd:
        spent = None if hours is None or price is None else hours * price
        yield Figure("Dollars, estimated", likely_usd, spent, formats.usd)


def _peak(found: Findings) -> float | None:
    """Of a GPU; what is resident on a CPU is something else."""
    is_on_gpu = found.training is not None and found.training.device not in ("", _CPU)
    return max((row.memory_bytes or 0 for row in found.history if is_on_gpu), default=0) or None


def _hours(run: RunRecord) -> float | None:
    """Of the training; None without one, or where the model came from the cache."""
    step = next((step for step in reversed(run.steps) if step.holding("training")), None)
    return None if step is None or step.cached or step.seconds is None else step.seconds / 3600


def _remarks(plan: Planned, run: RunRecord, found: Findings, otherwise: str) -> Iterator[str]:
    trained, chosen = found.training, plan.chosen
    many = f"{chosen.nodes} x " if chosen.nodes > 1 else ""
    yield f"Planned for {many}{chosen.machine} with the layout {chosen.layout}."
    if otherwise:
        yield f"The figures are of different trainings: {otherwise}."
    if trained and _peak(found) is None:
        yield "Memory is not compared: what is resident on a CPU is not what tensors take."
    if trained and plan.steps not in (None, trained.steps):
        yield f"{trained.steps:,} steps were trained, not the {plan.steps:,} that were planned."
    if trained and _hours(run) is None:
        yield "This run took its model from the cache, so that it has no hours of its own."
    if plan.on_demand_usd:
        yield "Dollars are hours at the price that the plan had: estimated, not billed."
