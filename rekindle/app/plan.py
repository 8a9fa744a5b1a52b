"""What the plan decides for a job that is run here or submitted.

A config that leaves the layout open, on GPUs that the planner knows, is run and compiled
with the plan's: the same config gives the same layout, because neither prices nor
measured speeds have a say in it."""

import datetime
import logging
from collections.abc import Sequence
from pathlib import Path

from rekindle.app.history import past_measurements, rest_of
from rekindle.catalog.prices import PriceBook, book
from rekindle.errors import Problem, RequestError, collected
from rekindle.outputs import Planned
from rekindle.plan.calibration import Known
from rekindle.plan.constants import CPU
from rekindle.plan.fleet import fleets, has_cloud
from rekindle.plan.plan import Plan, make, plan_record, refusals
from rekindle.plan.request import asked_of, known_shape, left_open, on_gpu
from rekindle.spec.installed import platform_names
from rekindle.spec.layout import AXES, resolve
from rekindle.spec.model import AUTO, MOST_HOURS, LayoutSpec, Spec

log = logging.getLogger(__name__)


def figures(
    spec: Spec,
    platform: str,
    region: str,
    examples: int | None,
    home: Path,
    own_prices: Sequence[Path],
) -> Planned:
    """The plan with all its figures.

    RequestError where it cannot be planned, or nothing fits."""
    if not platform:
        sections = [name for name in platform_names() if name in spec.platforms.model_fields_set]
        platform = sections[0] if len(sections) == 1 else ""
    prices = book(home, own_prices)
    plan = make(
        spec,
        prices,
        platform,
        region or _region(spec, platform),
        examples,
        today=datetime.datetime.now(datetime.UTC).date(),
        known=past_measurements(home, spec.name),
    )
    return plan_record(plan, refusals(plan, spec), rest_of(plan, spec, platform, home, prices))


def _region(spec: Spec, platform: str) -> str:
    """The region that the config names for a platform; "" for none."""
    section = getattr(spec.platforms, platform, None)
    return str(getattr(section, "region", ""))


def on_machines(spec: Spec, platform: str, home: Path) -> Spec:
    """`spec` with the machines of its plan for `machine: auto`, at prices known in
    `home`, and with the hours that `budget_usd` pays for. RequestError where nothing
    keeps the limits, or where that cannot be known."""
    spec = _with_chosen_machines(spec, platform, home)
    return _with_paid_hours(spec, platform, home)


def _with_chosen_machines(spec: Spec, platform: str, home: Path) -> Spec:
    resources = spec.resources
    if resources.machine != AUTO:
        return spec
    if not has_cloud(platform):
        raise RequestError(
            f"it is not known which machines {platform} has",
            where="resources.machine",
            fix="name the GPUs: accelerator, gpus_per_node and nodes",
        )
    past = past_measurements(home, spec.name)
    is_limited = resources.deadline_hours is not None or resources.budget_usd is not None
    if is_limited and spec.train.steps is None and past.examples is None:
        raise RequestError(
            "how long training takes depends on data that has not been counted",
            where="resources.machine",
            fix="set train.steps, or name a machine that `rekindle plan --examples N` shows: the "
            "first run counts",
        )
    plan = make(spec, book(home), platform, _region(spec, platform), known=past)
    problems = list(refusals(plan, spec))
    if problems:
        raise RequestError(problems)
    fleet = plan.chosen.fleet
    log.warning("resources.machine: %s, until the config names another", fleet)
    machines = {
        "machine": fleet.name,
        "nodes": fleet.nodes,
        "gpus_per_node": fleet.gpus_per_node,
    }
    return spec.model_copy(update={"resources": resources.model_copy(update=machines)})


def _with_paid_hours(spec: Spec, platform: str, home: Path) -> Spec:
    """The spec with the hours that its budget pays for, where prices are known.

    Training has to be able to end at a step."""
    budget = spec.resources.budget_usd
    train = spec.train
    trains = spec.pipeline is None or "train" in spec.model_fields_set
    ends_at_a_step = trains and not train.entrypoint and train.engine != "trainer"
    if budget is None or not has_cloud(platform) or not ends_at_a_step:
        return spec
    try:
        fleet = fleets(spec.resources, platform, _region(spec, platform), book(home))[0]
        usd_per_hour = fleet.usd_per_hour(spec.resources.spot)
    except RequestError:
        return spec
    if not usd_per_hour:
        return spec
    hours = max(round(budget / usd_per_hour, 4), 1e-4)
    hours = min(hours, train.budget_hours or MOST_HOURS)
    update = {"train": train.model_copy(update={"budget_hours": hours})}
    return spec.model_copy(update=update)


def on_any_machine(spec: Spec, platform: str, home: Path, problems: list[Problem]) -> Spec:
    """`on_machines`, or the spec with the machine left open and why in `problems`.

    The caller looks for what else is wrong."""
    with collected(problems):
        return on_machines(spec, platform, home)
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"machine": ""})})


def settled(spec: Spec, platform: str) -> Spec:
    """`spec` with the layout, the micro-batch and the activation checkpointing of its
    plan, where it leaves them open. RequestError where no layout fits. What the planner
    does not know stays as it is."""
    # without prices and measured speeds: the same config gives the same layout
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
    fields = left_open(spec)
    if work.zero:  # DeepSpeed shards by itself
        fields -= {"layout"}
    if plan.chosen.fleet.gpu.name == CPU:  # which layout is no question there
        fields &= {"micro_batch_size"}
    update = {name: value for name, value in chosen.items() if name in fields}
    return spec.model_copy(update={"train": spec.train.model_copy(update=update)})


def planned(spec: Spec, platform: str, home: Path) -> Planned | None:
    """The plan's figures, or None; RequestError beyond the limits of time and money."""
    prices = book(home)
    plan = _plan(spec, platform, prices, past_measurements(home, spec.name))
    if plan is None:
        return None
    problems = list(refusals(plan, spec))
    if problems:
        raise RequestError(problems)
    return plan_record(plan, rest=rest_of(plan, spec, platform, home, prices))


def planned_here(spec: Spec, home: Path) -> tuple[Spec, Planned | None]:
    """`spec` as this machine runs it, and its figures; what seems not to fit is tried."""
    try:
        spec = settled(spec, "local")
        plan = _plan(spec, "local", PriceBook(()), past_measurements(home, spec.name))
    except RequestError as error:
        log.warning("%s", error)
        return spec, None
    return spec, plan_record(plan) if plan else None


def _plan(spec: Spec, platform: str, prices: PriceBook, past: Known | None = None) -> Plan | None:
    """None where the planner does not know the model or the GPUs, or training is not
    ours. It asks no service: what is compiled must not depend on a network."""
    region = _region(spec, platform)
    names_machines = platform == "local" or spec.resources.gpus_per_node
    if spec.pipeline is not None or not names_machines:
        return None
    try:
        request = asked_of(spec, ask_hub=False)
        fleet = fleets(spec.resources, platform, region, prices, spec.platforms.local.ranks)[0]
    except RequestError:
        if platform != "local" and not spec.train.entrypoint:  # a layout is checked all the same
            world = spec.resources.nodes * spec.resources.gpus_per_node
            resolve(spec.train, world, known_shape(spec))
        return None
    # no speed of this GPU is known for the precision
    if on_gpu(request, fleet.gpu).train.precision not in fleet.gpu.tflops:
        return None
    return make(spec, prices, platform, region, asked=request, known=past or Known())
