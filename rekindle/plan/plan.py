"""The plan of a config: machines, layout, memory, time, money, and why not the others.

`make` is pure. Of machines that it may choose it takes the cheapest that keep the limits; of
layouts, what search.py says. What neither the config nor the catalog knows is assumed
(assumptions.yaml). `told` makes a record of it, for the command line, notebooks and cards."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rekindle import outputs
from rekindle.catalog.prices import PriceBook
from rekindle.errors import Problem, RequestError
from rekindle.plan import quantised, risk, updates
from rekindle.plan.advice import advice
from rekindle.plan.calibration import Known, Speeds
from rekindle.plan.choice import Choice, Hours, choose
from rekindle.plan.constants import CPU
from rekindle.plan.fleet import Fleet, fleets
from rekindle.plan.memory import memory, needed, offloaded_bytes, snapshot_bytes
from rekindle.plan.request import Asked, as_on_a_cpu, asked_of
from rekindle.plan.search import Option, Rejected
from rekindle.plan.spot import Needs, Offer, Spot, weigh
from rekindle.plan.steptime import step_time
from rekindle.spec.layout import AXES
from rekindle.spec.model import DEFAULT_EPOCHS, Spec
from rekindle.tables import rows

SHOWN = 5
_SHORT_SECONDS = 600.0  # of a training; what is not counted matters there
_AND_OFFLOADED = " and what is offloaded"
NOT_COUNTED = "steps besides training are not counted: no run of this name is known that ended well"
NOTHING = Known()
ASSUMED = Path(__file__).with_name("assumptions.yaml")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The chosen layout and machines. `hours` of training: least, expected, most (nine of ten lie
    within); None where the number of steps is not known. `others` are the next best, `rejected` why
    not the rest, `weighed` how many candidates. `notes` say what is assumed or not known."""

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
    spec: Spec,
    book: PriceBook,
    platform: str = "",
    region: str = "",
    examples: int | None = None,
    asked: Asked | None = None,
    today: datetime.date | None = None,
    known: Known = NOTHING,
) -> Plan:
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
        name=spec.name,
        asked=asked,
        chosen=chosen,
        others=tuple(choices[1 : SHOWN + 1]),
        rejected=found.rejected,
        weighed=found.weighed,
        steps=steps,
        hours=chosen.hours(steps),
        usd=chosen.usd(steps),
        spot=spot,
        if_else=tuple(_if_else(chosen.option)),
        notes=(
            *counted,
            *_notes(chosen, steps, known.speeds),
            *_of_prices(chosen.fleet, spot, today),
        ),
    )


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
    for name, limit in (
        ("max_run_hours", limits.max_run_hours),
        ("deadline_hours", limits.deadline_hours),
    ):
        if plan.hours is not None and limit is not None and plan.hours[0] > limit:
            message = f"training takes {plan.hours[0]:.1f} to {plan.hours[2]:.1f} hours; "
            message += f"resources.{name} is {limit:g}"
            fix = "raise the limit, take faster machines (resources.machine: auto), or reduce "
            fix += "train.steps or train.epochs"
            yield Problem(message, f"resources.{name}", fix)
    if plan.usd is not None and limits.budget_usd is not None and plan.usd > limits.budget_usd:
        cheaper = plan.spot is not None and plan.spot.together.expected_usd <= limits.budget_usd
        if not (limits.spot and cheaper):
            message = f"training costs about ${plan.usd:,.0f}; "
            message += f"resources.budget_usd is ${limits.budget_usd:,.0f}"
            fix = "raise the budget, or reduce train.steps or train.epochs"
            if cheaper:
                fix += ", or set resources.spot: true"
            yield Problem(message, "resources.budget_usd", fix)
    size, has = _snapshot(plan.chosen)
    if has is not None and size > has:
        more = _AND_OFFLOADED if offloaded_bytes(plan.chosen.option.work) else ""
        message = f"a checkpoint needs {size / 2**30:,.0f} GiB of host memory a machine for its "
        message += f"copies{more}, and {plan.chosen.fleet.name} has {has / 2**30:,.0f} GiB"
        fix = "shard the model over more machines (train.layout.shard), take machines with more "
        fix += "memory, or train adapters (model.lora)"
        yield Problem(message, "train.checkpoint", fix)


def _snapshot(choice: Choice) -> tuple[int, int | None]:
    """Host memory of a machine that the copies of a save take, and what it has, if that is known.
    Every rank copies what it holds, replicas too; what is offloaded is there besides."""
    ranks, work = choice.fleet.gpus_per_node, choice.option.work
    size = snapshot_bytes(work) + offloaded_bytes(work)
    return ranks * size, choice.fleet.machine.memory_bytes


def training(choice: Choice, steps: int) -> risk.Work:
    """What saving, starting and waiting take, as far as it is known."""
    known, option = rows(ASSUMED), choice.option
    work, shape = option.work, option.work.shape
    saved = work.weights_bytes * shape.parameters
    saved += updates.moments_bytes(work, shape.parameters, shape.layers, work.weights_bytes)
    ranks = option.cluster.gpus
    stored = known["store_bytes_per_second"]["value"] * choice.fleet.nodes
    return risk.Work(
        steps=steps,
        step_seconds=option.step.seconds,
        save_seconds=saved / ranks / known["save_bytes_per_second"]["value"],
        commit_seconds=saved / stored,
        restart_seconds=known["start_seconds"]["value"] + saved / stored,
        wait_seconds=known["wait_seconds"]["value"],
    )


def spot_of(spec: Spec, choice: Choice, steps: int | None) -> Spot | None:
    """Spot machines instead; None if the steps, or a price below on demand, are not known."""
    dear, cheap = choice.fleet.usd_per_hour(), choice.fleet.usd_per_hour(spot=True)
    if steps is None or dear is None or cheap is None:
        return None
    limits = spec.resources
    needs = Needs(limits.max_run_hours, limits.budget_usd, limits.deadline_hours)
    work = training(choice, steps)
    given = "every" in spec.train.checkpoint.model_fields_set
    every = spec.train.checkpoint.every if given else None
    hazard = risk.hazard(limits.hazard)
    return weigh(work, hazard, choice.fleet.nodes, Offer(cheap, dear), needs, every)


def _if_else(option: Option) -> Iterator[str]:
    cluster, constants = option.cluster, option.profile.constants
    seconds = option.step.seconds / option.profile.factor
    links = ("inside_bytes_per_second", "between_bytes_per_second")
    known = {link: speed for link in links if (speed := getattr(cluster, link)) is not None}
    slow = dataclasses.replace(cluster, **{link: speed / 2 for link, speed in known.items()})
    if cluster.gpus > 1:
        by = step_time(option.work, slow, constants).seconds / seconds - 1
        yield f"with links half as fast: {by:+.0%} time"
    longer = dataclasses.replace(option.work, sequence=2 * option.work.sequence)
    size, has = needed(memory(longer).peak_bytes), cluster.gpu.memory_bytes
    by = step_time(longer, cluster, constants).seconds / seconds / 2 - 1
    then = f"{by:+.0%} time a token, {size / 2**30:.0f} GiB"
    if size > has:
        then = f"{size / 2**30:.0f} of {has / 2**30:.0f} GiB, does not fit as it is"
    yield f"with sequences twice as long: {then}"


def _notes(choice: Choice, steps: int | None, speeds: Speeds) -> Iterator[str]:
    fleet, profile, work = choice.fleet, choice.option.profile, choice.option.work
    measure = "; after a run, rekindle plan --calibrate RUN measures it"
    yield f"speed: {profile}{measure if profile.guessed and profile.factor == 1 else ''}"
    if choice.option.work.optimizer in updates.MOVED:
        yield updates.UNMEASURED
    if choice.option.work.quantised:
        yield quantised.UNMEASURED
    hours = choice.hours(steps)
    if hours is not None and 3_600 * hours[1] < _SHORT_SECONDS:
        yield "training is its steps alone; start of the ranks, validation and saves come on top"
    if not choice.option.proven:
        yield "tests have each two parts of this layout, not all of it: training checks it first"
    for run in speeds.stale(choice.option.cluster.gpu.name, work.compile, work.engine):
        yield f"{run} was measured against an older planner: rekindle plan --calibrate {run}"
    if steps is None:
        yield "the number of steps depends on the data: pass --examples N, or set train.steps"
    size, has = _snapshot(choice)
    of = f" of {has / 2**30:,.0f} GiB" if has else ""
    more = _AND_OFFLOADED if offloaded_bytes(choice.option.work) else ""
    yield f"host memory: a save copies{more} {size / 2**30:,.1f}{of or ' GiB'} on each machine"
    if fleet.nodes > 1 and fleet.machine.between_bytes_per_second is None:
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
    if (
        price is not None
        and today is not None
        and (price.is_old(today) or (spot is not None and price.is_old(today, spot=True)))
    ):
        read = min(price.as_of, price.spot_as_of or price.as_of)
        yield f"the price is old, read on {read} or later: rekindle plan --prices FILE"
    if spot is not None:
        start, wait = (rows(ASSUMED)[name]["value"] for name in ("start_seconds", "wait_seconds"))
        yield (
            f"spot: assumed are {start} s to start, {wait} s to wait for machines, and a node's "
            f"{rows(ASSUMED)['store_bytes_per_second']['value'] / 1e9:g} GB/s to the store"
        )


def told(
    plan: Plan, refused: Iterable[Problem] = (), rest: outputs.PlannedRest | None = None
) -> outputs.Planned:
    """All that a plan says; `refused`: why it should not be submitted, `rest`: other steps."""
    option, problems = plan.chosen.option, list(refused)
    notes = plan.notes if rest else (*plan.notes, NOT_COUNTED)
    usd, hours = plan.chosen.fleet.usd_per_hour(), plan.hours
    return outputs.Planned(
        name=plan.name,
        parameters=plan.asked.shape.parameters,
        tokens_per_step=plan.asked.train.global_batch_size * plan.chosen.option.sequence,
        steps=plan.steps,
        chosen=_layout(plan.chosen),
        memory=_terms(option.memory.terms.items()),
        time=_terms(option.step.terms.items()),
        hours=hours,
        on_demand_usd=None
        if usd is None or hours is None
        else (usd * hours[0], usd * hours[1], usd * hours[2]),
        spot=_spot(plan.spot) if plan.spot else None,
        rest=rest,
        others=tuple(_layout(other) for other in plan.others),
        rejected=tuple(outputs.Rejection(layout=r.layout, reason=r.reason) for r in plan.rejected),
        weighed=plan.weighed,
        advice=tuple(advice(plan)),
        if_else=plan.if_else,
        notes=notes,
        errors=outputs.rows_of(RequestError(problems)) if problems else (),
    )


def _terms(terms: Iterable[tuple[str, float]]) -> tuple[outputs.PlannedTerm, ...]:
    return tuple(outputs.PlannedTerm(name=name, amount=amount) for name, amount in terms if amount)


def _layout(choice: Choice) -> outputs.PlannedLayout:
    fleet, option = choice.fleet, choice.option
    work, layout = option.work, option.work.layout
    low, high = option.seconds_between
    each = work.shape.flops_per_token(option.sequence, frozen=work.lora_rank > 0)
    flops = each * option.tokens_per_second
    tflops = option.cluster.gpu.product_tflops(work.precision, work.tf32) or 0.0
    peak = tflops * 1e12 * option.cluster.gpus
    return outputs.PlannedLayout(
        machine=fleet.name,
        nodes=fleet.nodes,
        gpus_per_node=fleet.gpus_per_node,
        gpu=option.cluster.gpu.name,
        region=fleet.region,
        layout=str(layout),
        degrees={axis: getattr(layout, axis) for axis in AXES},
        schedule=layout.schedule,
        micro_batch_size=layout.micro_batch_size,
        accumulation=work.accumulation,
        activation_checkpointing=work.checkpointing,
        precision=work.precision,
        step_seconds=(low, option.step.seconds, high),
        tokens_per_second=option.tokens_per_second,
        mfu=flops / peak if peak else 0.0,
        dominant=option.step.dominant,
        memory_bytes=option.memory.peak_bytes,
        needed_bytes=needed(option.memory.peak_bytes),
        device_bytes=option.cluster.gpu.memory_bytes,
        on_demand_usd_per_hour=fleet.usd_per_hour(),
        spot_usd_per_hour=fleet.usd_per_hour(spot=True),
        zero=str(work.zero or ""),
    )


def _spot(spot: Spot) -> outputs.PlannedSpot:
    ends = (spot.together, spot.independent)
    # on-demand machines for the deadline; nothing where there is none, or where it is lost
    rescue: dict[str, Any] = {}
    known = [(end.fallback, end.fallback_usd) for end in ends]
    safe = [(one, usd) for one, usd in known if one and one.feasible and usd is not None]
    if len(safe) == len(ends):
        chances, dollars = zip(*((one.chance, usd) for one, usd in safe), strict=True)
        rescue = {"slack_hours": safe[0][0].slack_hours, "fallback": chances}
        rescue["fallback_usd"] = dollars
    return outputs.PlannedSpot(
        viable=spot.viable,
        hazard_per_node_hour=spot.hazard.per_node_hour,
        hazard=spot.hazard.chosen,
        every=spot.every,
        hours=(ends[0].expected.wall_hours, ends[1].expected.wall_hours),
        usd=(ends[0].expected_usd, ends[1].expected_usd),
        interruptions=(ends[0].expected.interruptions, ends[1].expected.interruptions),
        in_time=(ends[0].in_time, ends[1].in_time),
        in_budget=(ends[0].in_budget, ends[1].in_budget),
        **rescue,
        reasons=tuple(dict.fromkeys(reason for end in ends for reason in end.reasons)),
    )
