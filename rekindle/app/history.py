"""What earlier runs under a home tell the planner: how fast trainings were, how many examples there
are, what the other steps took."""

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
    """What `rekindle plan --calibrate` measured, and the examples of an epoch of `name`."""
    for run in newest_first(home, name):
        training = collect(run, history=False).training
        if training is not None and training.epochs:
            per_epoch = training.steps / training.epochs * training.global_batch_size
            return Known(Speeds(_measured(home)), round(per_epoch), run.run_id)
    return Known(Speeds(_measured(home)))


def rest_of(
    plan: Plan, spec: Spec, platform: str, home: Path, prices: PriceBook
) -> PlannedRest | None:
    """The steps besides training, as they were in the last run of this name that ended well, on
    that platform if there is one; at prices of the region of the plan. Those on `data.nodes` are
    divided among the machines that the spec asks for now: pieces are worked on apart."""
    nodes = spec.data.nodes if spec.data and spec.pipeline is None and platform != "local" else 1
    for run in newest_first(home, plan.name, platform):
        seconds = _seconds(run) if run.status == "succeeded" else None
        if seconds is not None:
            machines = run.submission.machines if run.submission else {}
            here = dict(machines) if run.platform == platform else {}
            before = 1 if run.platform == "local" else (run.spec.get("data") or {}).get("nodes", 1)
            for step in (step for step in seconds if step in ON_PIECES and nodes != before):
                seconds[step] *= before / nodes
                here |= {step: (here[step][0], nodes)} if step in here else {}
            usd = _usd(seconds, here, plan.chosen.fleet.region, prices)
            return PlannedRest(
                hours=sum(seconds.values()) / 3600,
                usd=usd,
                run_id=run.run_id,
                divided=nodes if nodes != before else 0,
            )
    return None


def _measured(home: Path) -> list[Calibration]:
    """The oldest first."""
    found = list[Calibration]()
    for path in sorted((home / SPEEDS).glob("*.json"), key=lambda path: path.stat().st_mtime):
        try:
            found.append(Calibration.read(path))
        except ValueError as error:
            log.warning("%s cannot be read and is left out: %s", path, first_line(error))
    return found


def _seconds(run: RunRecord) -> dict[str, float] | None:
    """Of each step but training; None where one came from the cache, or has no known time."""
    steps = [s for s in run.steps if s.name.rpartition("/")[2] != TRAINING]
    if any(step.cached or step.seconds is None for step in steps if step.status != "skipped"):
        return None
    return {step.name: step.seconds or 0.0 for step in steps}


def _usd(
    seconds: Mapping[str, float],
    machines: Mapping[str, tuple[str, int]],
    region: str,
    prices: PriceBook,
) -> float | None:
    """None where the machine of a step is not known, or its price."""
    total = 0.0
    for name, taken in seconds.items():
        kind, count = machines.get(name, ("", 0))
        price = prices.find(kind, region) if kind else None
        if price is None or price.on_demand_usd_per_hour is None:
            return None
        total += price.on_demand_usd_per_hour * count * taken / 3600
    return total
