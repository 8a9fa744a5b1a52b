"""The plan of a config: machines, layout, memory, time, money, and why not the others.

`make` is pure: spec, catalog and prices in, Plan out. Of machines that it may choose it takes the
cheapest that keep the limits; of layouts, what search.py says."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.catalog.prices import PriceBook
from rekindle.catalog.rows import rows
from rekindle.errors import Problem, RequestError
from rekindle.plan import risk
from rekindle.plan.constants import profile_of
from rekindle.plan.fleet import Fleet, fleets
from rekindle.plan.memory import memory, needed
from rekindle.plan.request import asked_of
from rekindle.plan.search import Asked, Found, Option, Rejected, search
from rekindle.plan.spot import Needs, Offer, Spot, weigh
from rekindle.plan.steptime import step_time
from rekindle.spec.model import AUTO, DEFAULT_EPOCHS, Spec

SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Choice:
    """Machines, and the layout that suits them best."""

    fleet: Fleet
    option: Option

    @property
    def usd_per_step(self) -> float | None:
        """On demand."""
        usd = self.fleet.usd_per_hour()
        return None if usd is None else usd * self.option.step.seconds / 3600


@dataclasses.dataclass(frozen=True)
class Plan:
    """`hours` of training, uninterrupted: least, expected, most (nine of ten lie within); None
    where nobody knows the number of steps. `others` are the next best, `rejected` why not the rest,
    `weighed` how many candidates there were. `notes` say what is assumed or not known."""

    name: str
    asked: Asked
    chosen: Choice
    others: tuple[Choice, ...]
    rejected: tuple[Rejected, ...]
    weighed: int
    steps: int | None
    hours: tuple[float, float, float] | None
    usd: float | None
    spot: Spot | None
    if_else: tuple[str, ...]
    notes: tuple[str, ...]


def make(
    spec: Spec, book: PriceBook, platform: str = "", region: str = "", examples: int | None = None,
    asked: Asked | None = None, today: datetime.date | None = None,
) -> Plan:  # fmt: skip
    """RequestError where it cannot be planned, or where nothing fits: with the nearest miss.
    `asked` is what the config asks for, if somebody knows it already; prices that were old `today`
    are marked."""
    asked = asked or asked_of(spec)
    steps = steps_of(spec, examples)
    choices, found = _weighed(spec, asked, fleets(spec.resources, platform, region, book), steps)
    chosen = choices[0]
    hours = _hours(chosen.option, steps)
    usd, spot = _usd(chosen, hours), _spot(spec, chosen, steps)
    return Plan(
        name=spec.name, asked=asked, chosen=chosen, others=tuple(choices[1 : SHOWN + 1]),
        rejected=found.rejected, weighed=found.weighed, steps=steps, hours=hours, usd=usd,
        spot=spot, if_else=tuple(_if_else(asked, chosen.option)),
        notes=(*_notes(chosen, steps), *_of_prices(chosen.fleet, spot, today)),
    )  # fmt: skip


def steps_of(spec: Spec, examples: int | None) -> int | None:
    """Optimizer steps; None where they depend on data that nobody has counted."""
    if spec.train.steps is not None:
        return spec.train.steps
    if examples is None:
        return None
    passes = spec.train.epochs or DEFAULT_EPOCHS
    return max(1, math.ceil(passes * examples / spec.train.global_batch_size))


# Choosing


def _weighed(
    spec: Spec, asked: Asked, offered: Sequence[Fleet], steps: int | None
) -> tuple[list[Choice], Found]:
    """The best choice first, and what was found on its machines."""
    if spec.resources.machine != AUTO:
        fleet = offered[0]
        found = search(asked, fleet.cluster)
        if not found.options:
            raise _nothing_fits(fleet, found)
        return [Choice(fleet, option) for option in found.options], found
    results = list(_among(spec, asked, offered, steps))
    if not results:
        raise RequestError(
            "the model fits on none of the machines that may be chosen", where="resources.machine",
            fix="allow larger ones, or train adapters (model.lora)",
        )  # fmt: skip
    ranked = sorted(results, key=lambda result: _preference(spec, result[0], steps))
    return [choice for choice, _ in ranked], ranked[0][1]


def _among(
    spec: Spec, asked: Asked, offered: Sequence[Fleet], steps: int | None
) -> Iterator[tuple[Choice, Found]]:
    """What is worth a look: under a budget alone the fastest that may keep it, else the cheapest
    ones."""
    known = [
        fleet
        for fleet in _comparable(offered, asked)
        if _least_bytes(asked) <= fleet.cluster.gpu.memory_bytes * fleet.cluster.gpus
    ]
    able = [fleet for fleet in known if _may_do(spec, asked, fleet, steps)]
    if not able:  # the fastest of each kind, to show by how much they miss it
        largest = {_kind(fleet): fleet for fleet in known}
        able = list(largest.values())
    if spec.resources.budget_usd is not None and spec.resources.deadline_hours is None:
        return _fastest(spec, asked, able, steps)
    return _cheapest(spec, asked, able, steps)


def _fastest(
    spec: Spec, asked: Asked, able: Sequence[Fleet], steps: int | None
) -> Iterator[tuple[Choice, Found]]:
    """By what they could do at their peak, until none can be faster than one within the budget."""
    best = math.inf
    for fleet in sorted(able, key=lambda fleet: _least_seconds(asked, fleet)):
        if _least_seconds(asked, fleet) > best:
            return
        found = search(asked, fleet.cluster)
        if found.options:
            choice = Choice(fleet, found.options[0])
            yield choice, found
            missed, seconds = _preference(spec, choice, steps)
            best = best if missed else min(best, seconds)


def _cheapest(
    spec: Spec, asked: Asked, able: Sequence[Fleet], steps: int | None
) -> Iterator[tuple[Choice, Found]]:
    """Of each kind as many as keep the limits, since more of them cost more; no kind that would
    cost more at its peak than one that keeps them does."""
    kinds: dict[tuple[Any, ...], list[Fleet]] = {}
    for fleet in able:
        kinds.setdefault(_kind(fleet), []).append(fleet)
    best = math.inf
    for some in sorted(kinds.values(), key=lambda some: _least_usd(asked, some[0])):
        if _least_usd(asked, some[0]) > best:
            return
        for fleet in some:
            found = search(asked, fleet.cluster)
            if not found.options:
                continue
            choice = Choice(fleet, found.options[0])
            yield choice, found
            missed, usd = _preference(spec, choice, steps)
            if not missed:
                best = min(best, usd)
                break


def _kind(fleet: Fleet) -> tuple[str | None, int]:
    return fleet.machine.gpu, fleet.gpus_per_node


def _may_do(spec: Spec, asked: Asked, fleet: Fleet, steps: int | None) -> bool:
    """Whether it could keep the limits if the products took all the time."""
    limits, usd = spec.resources, fleet.usd_per_hour() or 0.0
    if steps is None:
        return True
    profile = profile_of(fleet.cluster.gpu.name, asked.train.compile)
    hours = _least_seconds(asked, fleet) / profile.constants.matrix_efficiency * steps / 3600
    late = (
        limits.deadline_hours is not None and hours * (1 + profile.spread) > limits.deadline_hours
    )
    return not late and (limits.budget_usd is None or hours * usd <= limits.budget_usd)


def _least_seconds(asked: Asked, fleet: Fleet) -> float:
    """Of a step, if the products took all the time, at the GPUs' peak."""
    peak = fleet.cluster.gpu.tflops[asked.train.precision] * 1e12
    tokens = asked.train.global_batch_size * asked.sequence
    flops = asked.shape.flops_per_token(asked.sequence) * tokens
    return flops / (peak * fleet.cluster.gpus)


def _least_usd(asked: Asked, fleet: Fleet) -> float:
    """Dollars of such a step."""
    return (fleet.usd_per_hour() or 0.0) * _least_seconds(asked, fleet) / 3600


def _least_bytes(asked: Asked) -> int:
    """Weights, gradients and moments of all ranks together; of adapters, the weights alone."""
    stored = 2 if asked.train.weights == "bf16" else 4
    return asked.shape.parameters * stored * (1 if asked.lora else 4)


def _comparable(offered: Sequence[Fleet], asked: Asked) -> Iterator[Fleet]:
    """Of machines with the same GPUs the cheapest; those without a price cannot be compared."""
    best: dict[tuple[Any, ...], Fleet] = {}
    for fleet in offered:
        usd = fleet.usd_per_hour()
        if usd is None or asked.train.precision not in fleet.cluster.gpu.tflops:
            continue
        key = (fleet.machine.gpu, fleet.gpus_per_node, fleet.nodes)
        known = best[key].usd_per_hour() if key in best else None
        if known is None or usd < known:
            best[key] = fleet
    yield from best.values()


def _preference(spec: Spec, choice: Choice, steps: int | None) -> tuple[float, float]:
    """Within the limits first, then the cheapest; under a budget alone the fastest."""
    limits, hours = spec.resources, _hours(choice.option, steps)
    usd = _usd(choice, hours)
    late = over = 0.0
    if hours is not None and limits.deadline_hours is not None:
        late = max(0.0, hours[2] - limits.deadline_hours)
    if usd is not None and limits.budget_usd is not None:
        over = max(0.0, usd - limits.budget_usd)
    per_step = choice.usd_per_step or math.inf
    if limits.budget_usd is not None and limits.deadline_hours is None:
        return over, choice.option.step.seconds
    return late + over, per_step


def _nothing_fits(fleet: Fleet, found: Found) -> RequestError:
    nearest = min(found.rejected, key=lambda r: r.needed_bytes or math.inf, default=None)
    said = f": {nearest.layout}: {nearest.reason}" if nearest else ""
    return RequestError(
        f"no layout fits on {fleet}{said}", where="resources",
        fix="more or larger machines, resources.machine: auto, or adapters (model.lora)",
    )  # fmt: skip


# Time, money, risk


def _hours(option: Option, steps: int | None) -> tuple[float, float, float] | None:
    if steps is None:
        return None
    low, high = option.seconds_between
    each = low, option.step.seconds, high
    return (each[0] * steps / 3600, each[1] * steps / 3600, each[2] * steps / 3600)


def _usd(choice: Choice, hours: tuple[float, float, float] | None) -> float | None:
    usd = choice.fleet.usd_per_hour()
    return None if usd is None or hours is None else usd * hours[1]


@functools.cache
def _assumed() -> Mapping[str, Any]:
    table: Mapping[str, Any] = rows(Path(__file__).with_name("assumptions.yaml"))
    return table


def training(choice: Choice, steps: int) -> risk.Work:
    """What saving, starting and waiting take, as far as it is known."""
    assumed, option = _assumed(), choice.option
    per_weight = 3 * option.work.weights_bytes  # a weight and two moments
    saved = per_weight * option.work.shape.parameters
    ranks = option.cluster.gpus
    stored = assumed["store_bytes_per_second"]["value"] * choice.fleet.nodes
    return risk.Work(
        steps=steps, step_seconds=option.step.seconds,
        save_seconds=saved / ranks / assumed["save_bytes_per_second"]["value"],
        commit_seconds=saved / stored,
        restart_seconds=assumed["start_seconds"]["value"] + saved / stored,
        wait_seconds=assumed["wait_seconds"]["value"],
        notice_seconds=assumed["notice_seconds"].get(choice.fleet.machine.cloud, 0.0),
    )  # fmt: skip


def _spot(spec: Spec, choice: Choice, steps: int | None) -> Spot | None:
    dear, cheap = choice.fleet.usd_per_hour(), choice.fleet.usd_per_hour(spot=True)
    if steps is None or dear is None or cheap is None:
        return None
    limits = spec.resources
    needs = Needs(limits.max_run_hours, limits.budget_usd, limits.deadline_hours)
    work = training(choice, steps)
    given = "every" in spec.train.checkpoint.model_fields_set
    every = spec.train.checkpoint.every if given else None
    return weigh(
        work, risk.hazard(limits.hazard), choice.fleet.nodes, Offer(cheap, dear), needs, every
    )


def refusals(plan: Plan, spec: Spec) -> Iterator[Problem]:
    """Why nobody should submit it: it would not end in time, or cost more than it may."""
    limits = spec.resources
    for name, limit in (("max_run_hours", limits.max_run_hours),
                        ("deadline_hours", limits.deadline_hours)):  # fmt: skip
        if plan.hours is not None and limit is not None and plan.hours[0] > limit:
            takes = f"training takes {plan.hours[0]:.1f} to {plan.hours[2]:.1f} hours"
            yield Problem(
                f"{takes}, and may take {limit:g}", f"resources.{name}",
                "allow more, take faster machines (resources.machine: auto), or fewer steps",
            )  # fmt: skip
    if plan.usd is not None and limits.budget_usd is not None and plan.usd > limits.budget_usd:
        cheaper = plan.spot is not None and plan.spot.together.expected_usd <= limits.budget_usd
        if not (limits.spot and cheaper):
            costs = f"training costs about ${plan.usd:,.0f}"
            yield Problem(
                f"{costs}, and may cost ${limits.budget_usd:,.0f}", "resources.budget_usd",
                "allow more, or fewer steps" + (", or spot machines" if cheaper else ""),
            )  # fmt: skip


# What if, and what is not known


def _if_else(asked: Asked, option: Option) -> Iterator[str]:
    cluster, constants = option.cluster, option.profile.constants
    slow = dataclasses.replace(
        cluster,
        inside_bytes_per_second=_half(cluster.inside_bytes_per_second),
        between_bytes_per_second=_half(cluster.between_bytes_per_second),
    )
    if cluster.gpus > 1:
        by = step_time(option.work, slow, constants).seconds / option.step.seconds - 1
        yield f"with links half as fast: {by:+.0%} time"
    longer = dataclasses.replace(option.work, sequence=2 * option.work.sequence)
    size, has = needed(memory(longer).peak_bytes).bytes, cluster.gpu.memory_bytes
    if size > has:
        yield (
            f"with sequences twice as long: {size / 2**30:.0f} of {has / 2**30:.0f} GiB, "
            "does not fit as it is"
        )
    else:
        by = step_time(longer, cluster, constants).seconds / option.step.seconds / 2 - 1
        yield f"with sequences twice as long: {by:+.0%} time a token, {size / 2**30:.0f} GiB"


def _half(number: float | None) -> float | None:
    return None if number is None else number / 2


def _notes(choice: Choice, steps: int | None) -> Iterator[str]:
    fleet, profile = choice.fleet, choice.option.profile
    yield f"speed: {profile.basis}; within {profile.spread:.0%} in nine of ten"
    if steps is None:
        yield "the number of steps depends on the data: say --examples, or set train.steps"
    between = fleet.machine.between
    if fleet.nodes > 1 and (between is None or between.bytes_per_second is None):
        yield f"nobody knows the network of {fleet.name}: taken as no limit"


def _of_prices(fleet: Fleet, spot: Spot | None, today: datetime.date | None) -> Iterator[str]:
    price, where = fleet.price, f" in {fleet.region}" if fleet.region else ""
    if price is None or fleet.usd_per_hour() is None:
        yield f"nobody knows the price of {fleet.name}{where}: rekindle plan --prices FILE"
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
        start, wait = (_assumed()[name]["value"] for name in ("start_seconds", "wait_seconds"))
        yield (
            f"spot: assumed are {start} s to start, {wait} s to wait for machines, and a node's "
            f"{_assumed()['store_bytes_per_second']['value'] / 1e9:g} GB/s to the store"
        )
