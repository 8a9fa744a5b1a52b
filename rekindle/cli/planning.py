"""What the plan decides for a job that is run here or sent, and says to whoever sends it.

A config that leaves the layout open, on GPUs that the planner knows, is run and compiled with the
plan's: the same config gives the same layout, because neither prices nor measured speeds have a say
in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.errors import RequestError

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from rekindle.answers import Planned, PlannedRest
    from rekindle.catalog.prices import PriceBook
    from rekindle.plan.calibration import Speeds
    from rekindle.plan.plan import Plan
    from rekindle.spec.model import Spec

SPEEDS = "speeds"  # folder of a home
_TOLD = ("machines", "layout", "memory", "step", "training", "on demand", "spot", "besides")


def on_machines(spec: Spec, platform: str, home: Path) -> Spec:
    """`spec` with the machines that its plan takes for `machine: auto`, at the prices that are
    known under `home`. RequestError where nothing keeps the limits, or nobody can know."""
    from rekindle.catalog.prices import book
    from rekindle.plan.fleet import CLOUDS
    from rekindle.plan.plan import make, refusals
    from rekindle.spec.model import AUTO

    asked = spec.resources
    if asked.machine != AUTO:
        return spec
    where, limits = "resources.machine", (asked.deadline_hours, asked.budget_usd)
    if platform not in CLOUDS:
        raise RequestError(
            f"nobody knows which machines {platform} has", where=where,
            fix="name the GPUs: accelerator, gpus_per_node and nodes",
        )  # fmt: skip
    if limits != (None, None) and spec.train.steps is None and not counted(spec.name, home):
        raise RequestError(
            "how long training takes depends on data that nobody has counted", where=where,
            fix="set train.steps, or name a machine that `rekindle plan --examples N` shows: the "
            "first run counts",
        )  # fmt: skip
    region = str(getattr(getattr(spec.platforms, platform), "region", ""))
    examples, run = counted(spec.name, home) or (None, "")
    plan = make(spec, book(home), platform, region, examples, speeds=speeds_of(home),
                counted_in=run)  # fmt: skip
    if problems := list(refusals(plan, spec)):
        raise RequestError(problems)
    fleet = plan.chosen.fleet
    chosen = {"machine": fleet.name, "nodes": fleet.nodes, "gpus_per_node": fleet.gpus_per_node}
    log.warning("%s: %s, until the config names another", where, fleet)
    return spec.model_copy(update={"resources": asked.model_copy(update=chosen)})


def settled(spec: Spec, platform: str) -> Spec:
    """`spec` with the layout, the micro-batch and the recomputation of its plan, where it leaves
    them open. RequestError where no layout fits. What the planner does not know stays as it is."""
    from rekindle.catalog.prices import PriceBook
    from rekindle.plan.here import CPU
    from rekindle.plan.request import left_open
    from rekindle.spec.layout import AXES
    from rekindle.spec.model import LayoutSpec

    plan = _plan(spec, platform, PriceBook(()))
    if plan is None:
        return spec
    work = plan.chosen.option.work
    degrees = {axis: getattr(work.layout, axis) for axis in AXES}
    chosen = {
        "layout": LayoutSpec(**degrees, schedule=work.layout.schedule),
        "micro_batch_size": work.layout.micro_batch_size,
        "activation_checkpointing": work.checkpointing,
    }
    free = left_open(spec)
    if plan.chosen.fleet.gpu.name == CPU:  # which layout is no question there
        free &= {"micro_batch_size"}
    open_ones = {name: value for name, value in chosen.items() if name in free}
    return spec.model_copy(update={"train": spec.train.model_copy(update=open_ones)})


def planned(spec: Spec, platform: str, home: Path) -> Planned | None:
    """The plan's figures; None where there is no plan. RequestError where training could not end in
    time, or would cost more than it may."""
    from rekindle.catalog.prices import book
    from rekindle.plan.plan import refusals
    from rekindle.plan.told import told

    prices = book(home)
    plan = _plan(spec, platform, prices, speeds_of(home), counted(spec.name, home))
    if plan is None:
        return None
    if problems := list(refusals(plan, spec)):
        raise RequestError(problems)
    return told(plan, rest=rest_of(plan, platform, home, prices))


def planned_here(spec: Spec, home: Path) -> tuple[Spec, Planned | None]:
    """`spec` as this machine runs it, and its figures. What seems not to fit is tried all the same:
    here that costs nothing."""
    from rekindle.catalog.prices import PriceBook
    from rekindle.plan.told import told

    try:
        spec = settled(spec, "local")
        plan = _plan(spec, "local", PriceBook(()), speeds_of(home), counted(spec.name, home))
    except RequestError as error:
        log.warning("%s", error)
        return spec, None
    return spec, told(plan) if plan else None


def counted(name: str, home: Path) -> tuple[int, str] | None:
    """Examples of an epoch (packed, sequences) in the last run of that name, and which that was."""
    from rekindle.cli.options import all_runs
    from rekindle.report.collect import collect

    for run in reversed(all_runs(home)):
        training = collect(run, history=False).training if run.name == name else None
        if training is not None and training.epochs:
            per_epoch = training.steps / training.epochs * training.global_batch_size
            return round(per_epoch), run.run_id
    return None


def rest_of(plan: Plan, platform: str, home: Path, prices: PriceBook) -> PlannedRest | None:
    """The steps besides training, as they were in the last run of this name that ended well, on
    that platform if there is one; at prices of the region of the plan."""
    from rekindle.answers import PlannedRest
    from rekindle.cli.options import TRAINING, all_runs

    known = [run for run in all_runs(home) if run.name == plan.name and run.status == "succeeded"]
    known.sort(key=lambda run: run.platform == platform)
    region = plan.chosen.fleet.region
    for run in reversed(known):
        steps = [s for s in run.steps if s.name.rpartition("/")[2] != TRAINING]
        if any(step.cached or step.seconds is None for step in steps if step.status != "skipped"):
            continue
        seconds = {step.name: step.seconds or 0.0 for step in steps}
        machines = run.submission.machines if run.submission else {}
        usd: float | None = 0.0
        for name, taken in seconds.items():
            kind, count = machines.get(name, ("", 0))
            price = prices.find(kind, region) if kind and run.platform == platform else None
            each = price.on_demand_usd_per_hour if price else None
            usd = None if usd is None or each is None else usd + each * count * taken / 3600
        return PlannedRest(hours=sum(seconds.values()) / 3600, usd=usd, run_id=run.run_id)
    return None


def speeds_of(home: Path) -> Speeds:
    """Trainings that `rekindle plan --calibrate` has measured."""
    from rekindle.answers import Calibration
    from rekindle.plan.calibration import Speeds

    found = list[Calibration]()
    for path in sorted((home / SPEEDS).glob("*.json")):
        try:
            found.append(Calibration.read(path))
        except ValueError as error:
            why = str(error).splitlines()[0]
            log.warning("%s cannot be read and is left out: %s", path, why)
    return Speeds(found)


def outlook(plan: Planned | None) -> Iterator[str]:
    """The figures in a few lines, for whoever decides."""
    from rekindle.cli.plan import HEAD, facts

    told = False
    for head, text in facts(plan) if plan else ():
        told = head in _TOLD if head else told
        if told:
            yield f"  {head:<{HEAD}}{text}"


def _plan(
    spec: Spec, platform: str, prices: PriceBook, speeds: Speeds | None = None,
    known: tuple[int, str] | None = None,
) -> Plan | None:  # fmt: skip
    """None where the planner knows the model or the GPUs not, or training is not ours. Nobody is
    asked: what is compiled must not depend on a network."""
    from rekindle.plan.calibration import Speeds
    from rekindle.plan.fleet import fleets
    from rekindle.plan.plan import make
    from rekindle.plan.request import asked_of

    region = str(getattr(getattr(spec.platforms, platform), "region", ""))
    local = platform == "local"
    if spec.pipeline is not None or not (local or spec.resources.gpus_per_node):
        return None
    try:
        asked = asked_of(spec, ask_hub=False)
        fleet = fleets(spec.resources, platform, region, prices, spec.platforms.local.ranks)[0]
    except RequestError:
        return None
    if spec.train.precision not in fleet.gpu.tflops:
        return None
    examples, run = known or (None, "")
    return make(spec, prices, platform, region, examples, asked, speeds=speeds or Speeds(),
                counted_in=run)  # fmt: skip
