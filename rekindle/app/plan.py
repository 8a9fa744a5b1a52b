"""What the plan decides for a job that is run here or submitted.

A config that leaves the layout open, on GPUs that the planner knows, is run and compiled with the
plan's: the same config gives the same layout, because neither prices nor measured speeds have a say
in it."""

import contextlib
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
from rekindle.plan.fleet import CLOUDS, fleets
from rekindle.plan.plan import Plan, make, refusals, told
from rekindle.plan.request import asked_of, known_shape, left_open, on_gpu
from rekindle.platforms.platform import PLATFORMS
from rekindle.spec.layout import AXES, resolve
from rekindle.spec.model import AUTO, MOST_HOURS, LayoutSpec, Spec
from rekindle.tables import problems_in

log = logging.getLogger(__name__)

_problem = problems_in(__file__)


def figures(
    spec: Spec,
    platform: str,
    region: str,
    examples: int | None,
    home: Path,
    own: Sequence[Path],
) -> Planned:
    """The plan with all that it says; RequestError where it cannot be planned, or nothing fits."""
    sections = [name for name in PLATFORMS if name in spec.platforms.model_fields_set]
    named = platform or (sections[0] if len(sections) == 1 else "")
    there = region or _region(spec, named)
    today = datetime.datetime.now(datetime.UTC).date()
    prices = book(home, own)
    found = make(
        spec, prices, named, there, examples, today=today, known=past_measurements(home, spec.name)
    )
    return told(found, refusals(found, spec), rest_of(found, spec, named, home, prices))


def _region(spec: Spec, platform: str) -> str:
    """The one that the config names for a platform; "" for none."""
    return str(getattr(getattr(spec.platforms, platform, None), "region", ""))


def on_machines(spec: Spec, platform: str, home: Path) -> Spec:
    """`spec` with the machines of its plan for `machine: auto`, at prices known in `home`, and with
    the hours that `budget_usd` pays for. RequestError where nothing keeps the limits, or where that
    cannot be known."""
    return _paid(_on_chosen(spec, platform, home), platform, home)


def _paid(spec: Spec, platform: str, home: Path) -> Spec:
    """With the hours that the budget pays for, where its end can be a step's and prices are
    known."""
    budget, train = spec.resources.budget_usd, spec.train
    trains = spec.pipeline is None or "train" in spec.model_fields_set
    ends = trains and not train.entrypoint and train.engine != "trainer"
    if budget is None or platform not in CLOUDS or not ends:
        return spec
    with contextlib.suppress(RequestError):
        fleet = fleets(spec.resources, platform, _region(spec, platform), book(home))[0]
        if usd := fleet.usd_per_hour(spec.resources.spot):
            hours = min(max(round(budget / usd, 4), 1e-4), train.budget_hours or MOST_HOURS)
            update = {"train": train.model_copy(update={"budget_hours": hours})}
            return spec.model_copy(update=update)
    return spec


def _on_chosen(spec: Spec, platform: str, home: Path) -> Spec:
    asked = spec.resources
    if asked.machine != AUTO:
        return spec
    if platform not in CLOUDS:
        raise RequestError([_problem("machines", platform=platform)])
    before, limits = past_measurements(home, spec.name), (asked.deadline_hours, asked.budget_usd)
    if limits != (None, None) and spec.train.steps is None and before.examples is None:
        raise RequestError([_problem("uncounted")])
    plan = make(spec, book(home), platform, _region(spec, platform), known=before)
    if problems := list(refusals(plan, spec)):
        raise RequestError(problems)
    fleet = plan.chosen.fleet
    chosen = {"machine": fleet.name, "nodes": fleet.nodes, "gpus_per_node": fleet.gpus_per_node}
    log.warning("resources.machine: %s, until the config names another", fleet)
    return spec.model_copy(update={"resources": asked.model_copy(update=chosen)})


def on_any_machine(spec: Spec, platform: str, home: Path, problems: list[Problem]) -> Spec:
    """The same, or with the machine left open and why in `problems`: more may be wrong."""
    with collected(problems):
        return on_machines(spec, platform, home)
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"machine": ""})})


def settled(spec: Spec, platform: str) -> Spec:
    """`spec` with the layout, the micro-batch and the recomputation of its plan, where it leaves
    them open. RequestError where no layout fits. What the planner does not know stays as it is."""
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
    free = left_open(spec) - ({"layout"} if work.zero else set())
    if plan.chosen.fleet.gpu.name == CPU:  # which layout is no question there
        free &= {"micro_batch_size"}
    open_ones = {name: value for name, value in chosen.items() if name in free}
    return spec.model_copy(update={"train": spec.train.model_copy(update=open_ones)})


def planned(spec: Spec, platform: str, home: Path) -> Planned | None:
    """The plan's figures, or None; RequestError beyond the limits of time and money."""
    prices = book(home)
    plan = _plan(spec, platform, prices, past_measurements(home, spec.name))
    if plan is None:
        return None
    if problems := list(refusals(plan, spec)):
        raise RequestError(problems)
    return told(plan, rest=rest_of(plan, spec, platform, home, prices))


def planned_here(spec: Spec, home: Path) -> tuple[Spec, Planned | None]:
    """`spec` as this machine runs it, and its figures; what seems not to fit is tried."""
    try:
        spec = settled(spec, "local")
        plan = _plan(spec, "local", PriceBook(()), past_measurements(home, spec.name))
    except RequestError as error:
        log.warning("%s", error)
        return spec, None
    return spec, told(plan) if plan else None


def _plan(spec: Spec, platform: str, prices: PriceBook, before: Known | None = None) -> Plan | None:
    """None where the planner does not know the model or the GPUs, or training is not ours. It asks
    no service: what is compiled must not depend on a network."""
    region = _region(spec, platform)
    if spec.pipeline is not None or not (platform == "local" or spec.resources.gpus_per_node):
        return None
    try:
        asked = asked_of(spec, ask_hub=False)
        fleet = fleets(spec.resources, platform, region, prices, spec.platforms.local.ranks)[0]
    except RequestError:
        if platform != "local" and not spec.train.entrypoint:  # a layout is checked all the same
            world = spec.resources.nodes * spec.resources.gpus_per_node
            resolve(spec.train, world, known_shape(spec))
        return None
    if on_gpu(asked, fleet.gpu).train.precision not in fleet.gpu.tflops:
        return None
    return make(spec, prices, platform, region, asked=asked, known=before or Known())
