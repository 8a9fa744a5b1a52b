"""What earlier runs under a home tell the planner: how fast trainings were, how many
examples there are, what the other steps took."""

import logging
from collections.abc import Mapping
from pathlib import Path

from rekindle.app.pipeline import ON_PIECES, TRAINING
from rekindle.app.runs import newest_first
from rekindle.catalog.prices import PriceBook
from rekindle.errors import first_line
from rekindle.outputs import Calibration, PlannedRest
from rekindle.plan.calibration import Known, Speeds
from rekindle.plan.plan import Plan
from rekindle.records import RunRecord
from rekindle.report.collect import collect
from rekindle.spec.model import Spec

log = logging.getLogger(__name__)

SPEEDS = "speeds"  # folder of a home


def past_measurements(home: Path, name: str) -> Known:
    """The calibrations under a home, and the examples of an epoch of `name`."""
    speeds = Speeds(_calibrations(home))
    for run in newest_first(home, name):
        training = collect(run, history=False).training
        if training is not None and training.epochs:
            steps_per_epoch = training.steps / training.epochs
            examples = round(steps_per_epoch * training.global_batch_size)
            return Known(speeds, examples, run.run_id)
    return Known(speeds)


def rest_of(
    plan: Plan, spec: Spec, platform: str, home: Path, prices: PriceBook
) -> PlannedRest | None:
    """The steps besides training, as they were in the last run of this name that ended
    well, on that platform if there is one; at prices of the region of the plan.

    Those on `data.nodes` are divided among the machines that the spec asks for now:
    pieces are worked on apart."""
    nodes = 1
    if spec.data and spec.pipeline is None and platform != "local":
        nodes = spec.data.nodes
    for run in newest_first(home, plan.name, platform):
        # steps of a run that failed may have been cut short
        if run.status != "succeeded":
            continue
        seconds = _seconds_by_step(run)
        if seconds is None:
            continue
        machines: dict[str, tuple[str, int]] = {}
        if run.platform == platform and run.submission:
            machines = dict(run.submission.machines)
        nodes_then = _data_nodes(run)
        if nodes_then != nodes:
            for step in seconds:
                if step not in ON_PIECES:
                    continue
                seconds[step] *= nodes_then / nodes
                if step in machines:
                    machine, _ = machines[step]
                    machines[step] = (machine, nodes)
        return PlannedRest(
            hours=sum(seconds.values()) / 3600,
            usd=_usd(seconds, machines, plan.chosen.fleet.region, prices),
            run_id=run.run_id,
            divided=nodes if nodes != nodes_then else 0,
        )
    return None


def _data_nodes(run: RunRecord) -> int:
    """The machines among which a run divided its data steps."""
    if run.platform == "local":
        return 1
    data = run.spec.get("data") or {}
    return int(data.get("nodes", 1))


def _calibrations(home: Path) -> list[Calibration]:
    """What was measured under a home, the oldest first."""
    calibrations: list[Calibration] = []
    paths = (home / SPEEDS).glob("*.json")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        try:
            calibrations.append(Calibration.read(path))
        except ValueError as error:
            log.warning("%s cannot be read and is left out: %s", path, first_line(error))
    return calibrations


def _seconds_by_step(run: RunRecord) -> dict[str, float] | None:
    """Of each step but training.

    None where a step came from the cache, or has no known time."""
    seconds: dict[str, float] = {}
    for step in run.steps:
        if step.name.rpartition("/")[2] == TRAINING:
            continue
        if step.status != "skipped" and (step.cached or step.seconds is None):
            return None
        seconds[step.name] = step.seconds or 0.0
    return seconds


def _usd(
    seconds: Mapping[str, float],
    machines: Mapping[str, tuple[str, int]],
    region: str,
    prices: PriceBook,
) -> float | None:
    """What steps cost; None where the machine of a step is not known, or its price."""
    usd = 0.0
    for step, step_seconds in seconds.items():
        if step not in machines:
            return None
        machine, count = machines[step]
        price = prices.find(machine, region) if machine else None
        if price is None or price.on_demand_usd_per_hour is None:
            return None
        usd += price.on_demand_usd_per_hour * count * step_seconds / 3600
    return usd
