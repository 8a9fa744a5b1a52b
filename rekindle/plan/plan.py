"""The plan of a config: machines, layout, memory, time, money, and why not the others.

`make` is pure: spec, catalog and prices in, Plan out. Of machines that it may choose it takes the
cheapest that keep the limits; of layouts, what search.py says."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator

from rekindle.catalog.prices import PriceBook
from rekindle.errors import Problem
from rekindle.plan.calibration import Known, Speeds
from rekindle.plan.choice import Choice, Hours, choose
from rekindle.plan.constants import CPU
from rekindle.plan.exposure import assumed, spot_of
from rekindle.plan.fleet import Fleet, fleets
from rekindle.plan.memory import memory, needed, snapshot_bytes
from rekindle.plan.request import Asked, as_on_a_cpu, asked_of
from rekindle.plan.search import Option, Rejected
from rekindle.plan.spot import Spot
from rekindle.plan.steptime import step_time
from rekindle.spec.model import DEFAULT_EPOCHS, Spec

SHOWN = 5
NOTHING = Known()


@dataclasses.dataclass(frozen=True)
class Plan:
    """The chosen layout and machines, and why not the others.

    `hours` of training, uninterrupted: least, expected, most (nine of ten lie within); None
    where the number of steps is not known. `others` are the next best, `rejected` why not the rest,
    `weighed` how many candidates there were. `notes` say what is assumed or not known."""

    name: str
    asked: Asked
    chosen: Choice
    others: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    weighed: int
    steps: int | None
    hours: Hours | None
    usd: float | None
    spot: Spot | None
    if_else: tuple[str, ...]
    notes: tuple[str, ...]


def make(
    spec: Spec, book: PriceBook, platform: str = "", region: str = "", examples: int | None = None,
    asked: Asked | None = None, today: datetime.date | None = None, known: Known = NOTHING,
) -> Plan:  # fmt: skip
    """RequestError where it cannot be planned, or where nothing fits: with the nearest miss.
    `asked` is what the config asks for, if the caller knows it already; prices that were old
    `today` are marked; `known` is what earlier runs told, of which `examples` counts more."""
    asked = asked or asked_of(spec)
    counted = list[str]()
    if examples is None and known.examples is not None and spec.train.steps is None:
        examples = known.examples
        counted = [f"as many examples as in {known.counted_in}: {examples:,}"]
    steps = steps_of(spec, examples)
    offered = fleets(spec.resources, platform, region, book, spec.platforms.local.ranks)
    if offered[0].gpu.name == CPU:
        asked = as_on_a_cpu(asked, offered[0].gpus_per_node)
    choices, found = choose(spec, asked, offered, steps, known.speeds)
    chosen = choices[0]
    spot = spot_of(spec, chosen, steps)
    return Plan(
        name=spec.name, asked=asked, chosen=chosen, others=tuple(choices[1 : SHOWN + 1]),
        rejected=found.rejected, weighed=found.weighed, steps=steps, hours=chosen.hours(steps),
        usd=chosen.usd(steps), spot=spot, if_else=tuple(_if_else(asked, chosen.option)),
        notes=(*counted, *_notes(chosen, steps, known.speeds),
               *_of_prices(chosen.fleet, spot, today)),
    )  # fmt: skip


def steps_of(spec: Spec, examples: int | None) -> int | None:
    """Optimizer steps; None where they depend on data that has not been counted."""
    if spec.train.steps is not None:
        return spec.train.steps
    if examples is None:
        return None
    passes = spec.train.epochs or DEFAULT_EPOCHS
    return max(1, math.ceil(passes * examples / spec.train.global_batch_size))


def refusals(plan: Plan, spec: Spec) -> Iterator[Problem]:
    """Why it should not be submitted: it would not end in time, or cost more than it may."""
    limits = spec.resources
    for name, limit in (("max_run_hours", limits.max_run_hours),
                        ("deadline_hours", limits.deadline_hours)):  # fmt: skip
        if plan.hours is not None and limit is not None and plan.hours[0] > limit:
            takes = f"training takes {plan.hours[0]:.1f} to {plan.hours[2]:.1f} hours"
            yield Problem(
                f"{takes}; resources.{name} is {limit:g}", f"resources.{name}",
                "raise the limit, take faster machines (resources.machine: auto), or reduce "
                "train.steps or train.epochs",
            )  # fmt: skip
    if plan.usd is not None and limits.budget_usd is not None and plan.usd > limits.budget_usd:
        cheaper = plan.spot is not None and plan.spot.together.expected_usd <= limits.budget_usd
        if not (limits.spot and cheaper):
            costs = f"training costs about ${plan.usd:,.0f}"
            yield Problem(
                f"{costs}; resources.budget_usd is ${limits.budget_usd:,.0f}",
                "resources.budget_usd",
                "raise the budget, or reduce train.steps or train.epochs"
                + (", or set resources.spot: true" if cheaper else ""),
            )  # fmt: skip
    size, has = _snapshot(plan.chosen)
    if has is not None and size > has:
        yield Problem(
            f"a checkpoint needs {size / 2**30:,.0f} GiB of host memory a machine for its copies, "
            f"and {plan.chosen.fleet.name} has {has / 2**30:,.0f} GiB", "train.checkpoint",
            "shard the model over more machines (train.layout.shard), take machines with more "
            "memory, or train adapters (model.lora)",
        )  # fmt: skip


def _snapshot(choice: Choice) -> tuple[int, int | None]:
    """Host memory of a machine that the copies of a save take, and what it has, if that is known.
    Every rank copies what it holds, replicas too."""
    ranks = choice.fleet.gpus_per_node
    return ranks * snapshot_bytes(choice.option.work), choice.fleet.machine.memory_bytes


# What if, and what is not known


def _if_else(asked: Asked, option: Option) -> Iterator[str]:
    cluster, constants = option.cluster, option.profile.constants
    seconds = option.step.seconds / option.profile.factor
    slow = dataclasses.replace(
        cluster,
        inside_bytes_per_second=_half(cluster.inside_bytes_per_second),
        between_bytes_per_second=_half(cluster.between_bytes_per_second),
    )
    if cluster.gpus > 1:
        by = step_time(option.work, slow, constants).seconds / seconds - 1
        yield f"with links half as fast: {by:+.0%} time"
    longer = dataclasses.replace(option.work, sequence=2 * option.work.sequence)
    size, has = needed(memory(longer).peak_bytes).bytes, cluster.gpu.memory_bytes
    if size > has:
        yield (
            f"with sequences twice as long: {size / 2**30:.0f} of {has / 2**30:.0f} GiB, "
            "does not fit as it is"
        )
    else:
        by = step_time(longer, cluster, constants).seconds / seconds / 2 - 1
        yield f"with sequences twice as long: {by:+.0%} time a token, {size / 2**30:.0f} GiB"


def _half(number: float | None) -> float | None:
    return None if number is None else number / 2


def _notes(choice: Choice, steps: int | None, speeds: Speeds) -> Iterator[str]:
    fleet, profile = choice.fleet, choice.option.profile
    yield f"speed: {profile.basis}; within {profile.spread:.0%} in nine of ten"
    if not choice.option.proven:
        yield "tests have each two parts of this layout, not all of it: training checks it first"
    for run in speeds.stale(choice.option.cluster.gpu.name, choice.option.work.compile):
        yield f"{run} was measured against an older planner: rekindle plan --calibrate {run}"
    if steps is None:
        yield "the number of steps depends on the data: pass --examples N, or set train.steps"
    size, has = _snapshot(choice)
    of = f" of {has / 2**30:,.0f} GiB" if has else ""
    yield f"host memory: a save copies {size / 2**30:,.1f}{of or ' GiB'} on each machine"
    between = fleet.machine.between
    if fleet.nodes > 1 and (between is None or between.bytes_per_second is None):
        yield f"the network of {fleet.name} is not known: taken as no limit"


def _of_prices(fleet: Fleet, spot: Spot | None, today: datetime.date | None) -> Iterator[str]:
    price, where = fleet.price, f" in {fleet.region}" if fleet.region else ""
    if fleet.here:
        return
    if price is None or fleet.usd_per_hour() is None:
        yield f"the price of {fleet.name}{where} is not known: rekindle plan --prices FILE"
    elif fleet.usd_per_hour(spot=True) is None:
        yield f"no spot price of {fleet.name}{where}, or none below on demand"
    if price is not None and price.assumed:
        yield f"price: {price.assumed}"
    if price is not None and today is not None and (
        price.is_old(today) or (spot is not None and price.is_old(today, spot=True))
    ):  # fmt: skip
        read = min(price.as_of, price.spot_as_of or price.as_of)
        yield f"the price is old, read on {read} or later: rekindle prices refresh"
    if spot is not None:
        start, wait = (assumed()[name]["value"] for name in ("start_seconds", "wait_seconds"))
        yield (
            f"spot: assumed are {start} s to start, {wait} s to wait for machines, and a node's "
            f"{assumed()['store_bytes_per_second']['value'] / 1e9:g} GB/s to the store"
        )
