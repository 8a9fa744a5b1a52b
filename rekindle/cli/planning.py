"""What the plan decides for a job that is sent, and says to whoever sends it.

A config that leaves the layout open, on GPUs that the planner knows, is compiled with the plan's:
the same config gives the same layout, because prices have no say in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rekindle.errors import RequestError

if TYPE_CHECKING:
    from rekindle.answers import Planned
    from rekindle.catalog.prices import PriceBook
    from rekindle.plan.plan import Plan
    from rekindle.spec.model import Spec

_TOLD = ("machines", "layout", "memory", "step", "training", "on demand", "spot")


def settled(spec: Spec, platform: str) -> Spec:
    """`spec` with the layout, the micro-batch and the recomputation of its plan, where it leaves
    them open. RequestError where no layout fits. What the planner does not know stays as it is."""
    from rekindle.catalog.prices import PriceBook
    from rekindle.spec.model import LayoutSpec

    plan = _plan(spec, platform, PriceBook(()))
    if plan is None or not plan.asked.free:
        return spec
    work = plan.chosen.option.work
    degrees = {axis: getattr(work.layout, axis) for axis in ("dp", "shard", "tp", "pp", "cp")}
    chosen = {
        "layout": LayoutSpec(**degrees, schedule=work.layout.schedule),
        "micro_batch_size": work.layout.micro_batch_size,
        "activation_checkpointing": work.checkpointing,
    }
    open_ones = {name: value for name, value in chosen.items() if name in plan.asked.free}
    return spec.model_copy(update={"train": spec.train.model_copy(update=open_ones)})


def planned(spec: Spec, platform: str, home: Path) -> Planned | None:
    """The plan's figures; None where there is no plan. RequestError where training could not end in
    time, or would cost more than it may."""
    from rekindle.catalog.prices import book
    from rekindle.plan.plan import refusals
    from rekindle.plan.told import told

    plan = _plan(spec, platform, book(home))
    if plan is None:
        return None
    if problems := list(refusals(plan, spec)):
        raise RequestError(problems)
    return told(plan)


def outlook(plan: Planned | None) -> Iterator[str]:
    """The figures in a few lines, for whoever decides."""
    from rekindle.cli.plan import lines

    for line in lines(plan) if plan else ():
        if line.startswith(_TOLD):
            yield f"  {line}"


def _plan(spec: Spec, platform: str, prices: PriceBook) -> Plan | None:
    """None where the planner knows the model or the GPUs not, or training is not ours. Nobody is
    asked: what is compiled must not depend on a network."""
    from rekindle.plan.fleet import fleets
    from rekindle.plan.plan import make
    from rekindle.plan.request import asked_of

    region = str(getattr(getattr(spec.platforms, platform), "region", ""))
    if spec.pipeline is not None or not spec.resources.gpus_per_node:
        return None
    try:
        asked = asked_of(spec, ask_hub=False)
        fleet = fleets(spec.resources, platform, region, prices)[0]
    except RequestError:
        return None
    if spec.train.precision not in fleet.cluster.gpu.tflops:
        return None
    return make(spec, prices, platform, region, asked=asked)
