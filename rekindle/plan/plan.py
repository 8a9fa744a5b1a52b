"""The plan of a config: machines, layout, memory, time, money, and why not the others.

`make` is pure: choice.py picks the machines, search.py the layout. What neither the
config nor the catalog knows is assumed (assumptions.yaml). `plan_record` makes a record
of a plan, for the command line, notebooks and cards."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

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
from rekindle.plan.spot import Offer, Spot, SpotNeeds, weigh
from rekindle.plan.steptime import step_time
from rekindle.spec.layout import AXES
from rekindle.spec.model import DEFAULT_EPOCHS, Spec
from rekindle.tables import rows

SHOWN = 5  # other choices beside the best
# in a training that is shorter, what is not counted may take as long as its steps
_SHORT_SECONDS = 600.0
NOT_COUNTED = "steps besides training are not counted: no run of this name is known that ended well"
NOTHING = Known()
ASSUMED = Path(__file__).with_name("assumptions.yaml")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The chosen machines and layout, and what is known of the training on them."""

    name: str
    asked: Asked
    """What the config asks for, as far as the plan depends on it."""
    chosen: Choice
    others: tuple[Choice, ...]
    """The next best."""
    rejected: tuple[Rejected, ...]
    """Why layouts that are in neither were not taken."""
    weighed: int
    """How many candidates there were."""
    steps: int | None
    """Optimizer steps; None where they depend on data that has not been counted."""
    hours: Hours | None
    """Of training, uninterrupted; None where `steps` is."""
    usd: float | None
    """For these hours on demand, as expected; None where hours or prices are not known."""
    spot: Spot | None
    """The same training on spot machines; None where its cost cannot be known."""
    if_else: tuple[str, ...]
    """What would change on slower links or with longer sequences, in words."""
    notes: tuple[str, ...]
    """What is assumed or not known, in words."""


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
    """The plan of a config.

    `examples` is the number of training examples, which otherwise is that of an earlier
    run in `known`. `asked` is what the config asks for, if the caller has it already.
    Prices that are old on the day `today` are marked. Raises RequestError where the
    config cannot be planned, or where nothing fits, with the nearest miss."""
    asked = asked or asked_of(spec)
    notes: list[str] = []
    if examples is None and known.examples is not None and spec.train.steps is None:
        examples = known.examples
        notes.append(f"as many examples as in {known.counted_in}: {examples:,}")
    steps = steps_of(spec, examples)
    offered = fleets(spec.resources, platform, region, book, spec.platforms.local.ranks)
    if offered[0].gpu.name == CPU:
        asked = as_on_a_cpu(asked, offered[0].gpus_per_node)
    choices, result = choose(spec, asked, offered, steps, known.speeds)
    chosen = choices[0]
    spot = spot_of(spec, chosen, steps)
    notes += _notes(chosen, steps, known.speeds)
    notes += _price_notes(chosen.fleet, spot, today)
    return Plan(
        name=spec.name,
        asked=asked,
        chosen=chosen,
        others=tuple(choices[1 : SHOWN + 1]),
        rejected=result.rejected,
        weighed=result.weighed,
        steps=steps,
        hours=chosen.hours(steps),
        usd=chosen.usd(steps),
        spot=spot,
        if_else=tuple(_if_else(chosen.option)),
        notes=tuple(notes),
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
    """Why the plan should not be submitted: it would not end in time, or cost more than
    it may, or a checkpoint would not fit into a machine's memory."""
    limits = spec.resources
    if plan.hours is not None:
        yield from _missed_hours(plan.hours, "max_run_hours", limits.max_run_hours)
        yield from _missed_hours(plan.hours, "deadline_hours", limits.deadline_hours)
    if plan.usd is not None and limits.budget_usd is not None and plan.usd > limits.budget_usd:
        spot_is_cheaper = False
        if plan.spot is not None:
            spot_is_cheaper = plan.spot.together.expected_usd <= limits.budget_usd
        if not (limits.spot and spot_is_cheaper):
            fix = "raise the budget, or reduce train.steps or train.epochs"
            if spot_is_cheaper:
                fix += ", or set resources.spot: true"
            yield Problem(
                f"training costs about ${plan.usd:,.0f}; "
                f"resources.budget_usd is ${limits.budget_usd:,.0f}",
                "resources.budget_usd",
                fix,
            )
    size, machine_bytes = _snapshot(plan.chosen)
    if machine_bytes is not None and size > machine_bytes:
        offloaded = _offloaded_words(plan.chosen)
        yield Problem(
            f"a checkpoint needs {size / 2**30:,.0f} GiB of host memory a machine for its "
            f"copies{offloaded}, and {plan.chosen.fleet.name} has "
            f"{machine_bytes / 2**30:,.0f} GiB",
            "train.checkpoint",
            "shard the model over more machines (train.layout.shard), take machines with more "
            "memory, or train adapters (model.lora)",
        )


def _missed_hours(hours: Hours, name: str, limit: float | None) -> Iterator[Problem]:
    """A limit of `resources` that even the least hours exceed."""
    if limit is not None and hours[0] > limit:
        yield Problem(
            f"training takes {hours[0]:.1f} to {hours[2]:.1f} hours; resources.{name} is {limit:g}",
            f"resources.{name}",
            "raise the limit, take faster machines (resources.machine: auto), or reduce "
            "train.steps or train.epochs",
        )


def _snapshot(choice: Choice) -> tuple[int, int | None]:
    """Host memory that a machine needs while a checkpoint is saved, and the memory that
    it has, if that is known.

    For an asynchronous save every rank copies all that it holds, replicas too; what is
    offloaded lies in host memory anyway."""
    ranks = choice.fleet.gpus_per_node
    work = choice.option.work
    rank_bytes = snapshot_bytes(work) + offloaded_bytes(work)
    return ranks * rank_bytes, choice.fleet.machine.memory_bytes


def _offloaded_words(choice: Choice) -> str:
    """What the host holds beside a save's copies, in words; "" for nothing."""
    return " and what is offloaded" if offloaded_bytes(choice.option.work) else ""


def _assumed(name: str) -> float:
    """A number of assumptions.yaml."""
    value: float = rows(ASSUMED)[name]["value"]
    return value


def interruptible_training(choice: Choice, steps: int) -> risk.InterruptibleWork:
    """The training as work that spot reclaims may interrupt: what its steps, saving,
    starting and waiting take, by the assumptions where nothing else is known."""
    option = choice.option
    work = option.work
    shape = option.work.shape
    checkpoint_bytes = work.weights_bytes * shape.parameters + updates.moments_bytes(
        work, shape.parameters, shape.layers, work.weights_bytes
    )
    # every rank copies its share at once; every node writes its own to the store
    ranks = option.cluster.gpus
    store_seconds = checkpoint_bytes / (_assumed("store_bytes_per_second") * choice.fleet.nodes)
    return risk.InterruptibleWork(
        steps=steps,
        step_seconds=option.step.seconds,
        save_seconds=checkpoint_bytes / ranks / _assumed("save_bytes_per_second"),
        commit_seconds=store_seconds,
        # a start reads the checkpoint back, as fast as it was written
        restart_seconds=_assumed("start_seconds") + store_seconds,
        wait_seconds=_assumed("wait_seconds"),
    )


def spot_of(spec: Spec, choice: Choice, steps: int | None) -> Spot | None:
    """The training on spot machines instead; None where the steps are not known, or no
    spot price below the one on demand."""
    on_demand_usd = choice.fleet.usd_per_hour()
    spot_usd = choice.fleet.usd_per_hour(spot=True)
    if steps is None or on_demand_usd is None or spot_usd is None:
        return None
    limits = spec.resources
    needs = SpotNeeds(limits.max_run_hours, limits.budget_usd, limits.deadline_hours)
    # the best interval between checkpoints is calculated, unless the user has set one
    checkpoint_every = None
    if "every" in spec.train.checkpoint.model_fields_set:
        checkpoint_every = spec.train.checkpoint.every
    return weigh(
        interruptible_training(choice, steps),
        risk.hazard(limits.hazard),
        choice.fleet.nodes,
        Offer(spot_usd, on_demand_usd),
        needs,
        checkpoint_every,
    )


def _if_else(option: Option) -> Iterator[str]:
    """What would change with slower links, and with longer sequences, in words."""
    cluster = option.cluster
    constants = option.profile.constants
    # the uncorrected prediction, because `step_time` does not correct either
    seconds = option.step.seconds / option.profile.factor
    if cluster.gpus > 1:
        slower_links = dataclasses.replace(
            cluster,
            inside_bytes_per_second=_half(cluster.inside_bytes_per_second),
            between_bytes_per_second=_half(cluster.between_bytes_per_second),
        )
        change = step_time(option.work, slower_links, constants).seconds / seconds - 1
        yield f"with links half as fast: {change:+.0%} time"
    # attention grows with the square of the sequence
    longer = dataclasses.replace(option.work, sequence=2 * option.work.sequence)
    gib = needed(memory(longer).peak_bytes) / 2**30
    device_gib = cluster.gpu.memory_bytes / 2**30
    change = step_time(longer, cluster, constants).seconds / (2 * seconds) - 1  # twice the tokens
    outcome = f"{change:+.0%} time a token, {gib:.0f} GiB"
    if gib > device_gib:
        outcome = f"{gib:.0f} of {device_gib:.0f} GiB, does not fit as it is"
    yield f"with sequences twice as long: {outcome}"


def _half(speed: float | None) -> float | None:
    return None if speed is None else speed / 2


def _notes(choice: Choice, steps: int | None, speeds: Speeds) -> Iterator[str]:
    """What is assumed or not known of the time and the memory, in words."""
    fleet = choice.fleet
    profile = choice.option.profile
    work = choice.option.work
    speed = f"speed: {profile}"
    if profile.guessed and profile.factor == 1:
        speed += "; after a run, rekindle plan --calibrate RUN measures it"
    yield speed
    if work.optimizer in updates.MOVED:
        yield updates.UNMEASURED
    if work.quantised:
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
    size, machine_bytes = _snapshot(choice)
    copied = f"{size / 2**30:,.1f} GiB"
    if machine_bytes:
        copied = f"{size / 2**30:,.1f} of {machine_bytes / 2**30:,.0f} GiB"
    yield f"host memory: a save copies{_offloaded_words(choice)} {copied} on each machine"
    if fleet.nodes > 1 and fleet.machine.between_bytes_per_second is None:
        yield f"the network of {fleet.name} is not known: taken as no limit"


def _price_notes(fleet: Fleet, spot: Spot | None, today: datetime.date | None) -> Iterator[str]:
    """What is assumed, old or not known of the cost, in words."""
    if fleet.here:
        return
    price = fleet.price
    where = f" in {fleet.region}" if fleet.region else ""
    if price is None or fleet.usd_per_hour() is None:
        yield f"the price of {fleet.name}{where} is not known: rekindle plan --prices FILE"
    elif fleet.usd_per_hour(spot=True) is None:
        yield f"no spot price of {fleet.name}{where}, or none below on demand"
    if price is not None and price.assumed:
        yield f"price: {price.assumed}"
    if price is not None and today is not None:
        spot_is_old = spot is not None and price.is_old(today, spot=True)
        if price.is_old(today) or spot_is_old:
            read_on = min(price.as_of, price.spot_as_of or price.as_of)
            yield f"the price is old, read on {read_on} or later: rekindle plan --prices FILE"
    if spot is not None:
        store_gb_per_second = _assumed("store_bytes_per_second") / 1e9
        yield (
            f"spot: assumed are {_assumed('start_seconds')} s to start, "
            f"{_assumed('wait_seconds')} s to wait for machines, and a node's "
            f"{store_gb_per_second:g} GB/s to the store"
        )


def plan_record(
    plan: Plan, refused: Iterable[Problem] = (), rest: outputs.PlannedRest | None = None
) -> outputs.Planned:
    """The plan as a record. `refused` says why it should not be submitted, `rest` what
    the steps beside training take."""
    option = plan.chosen.option
    problems = list(refused)
    notes = plan.notes
    if not rest:
        notes = (*notes, NOT_COUNTED)
    usd_per_hour = plan.chosen.fleet.usd_per_hour()
    on_demand_usd = None
    if usd_per_hour is not None and plan.hours is not None:
        least, expected, most = plan.hours
        on_demand_usd = (
            usd_per_hour * least,
            usd_per_hour * expected,
            usd_per_hour * most,
        )
    return outputs.Planned(
        name=plan.name,
        parameters=plan.asked.shape.parameters,
        tokens_per_step=plan.asked.train.global_batch_size * plan.chosen.option.sequence,
        steps=plan.steps,
        chosen=_layout(plan.chosen),
        memory=_terms(option.memory.terms.items()),
        time=_terms(option.step.terms.items()),
        hours=plan.hours,
        on_demand_usd=on_demand_usd,
        spot=_spot(plan.spot) if plan.spot else None,
        rest=rest,
        others=tuple(_layout(other) for other in plan.others),
        rejected=tuple(outputs.Rejection(layout=r.layout, reason=r.reason) for r in plan.rejected),
        weighed=plan.weighed,
        advice=tuple(advice(plan.asked, plan.chosen.option, plan.rejected)),
        if_else=plan.if_else,
        notes=notes,
        errors=outputs.rows_of(RequestError(problems)) if problems else (),
    )


def _terms(terms: Iterable[tuple[str, float]]) -> tuple[outputs.PlannedTerm, ...]:
    return tuple(outputs.PlannedTerm(name=name, amount=amount) for name, amount in terms if amount)


def _layout(choice: Choice) -> outputs.PlannedLayout:
    """A layout on its machines, as records have it."""
    fleet = choice.fleet
    option = choice.option
    work = option.work
    layout = option.work.layout
    low, high = option.seconds_between
    flops_per_token = work.shape.flops_per_token(option.sequence, frozen=work.lora_rank > 0)
    flops = flops_per_token * option.tokens_per_second
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
    """Spot machines as records have them: pairs of figures, for reclaims that hit all
    nodes together, which is better, and for reclaims of each node alone."""
    ends = (spot.together, spot.independent)
    # What on-demand machines cost that still meet the deadline. There is nothing to show
    # without a deadline, or where it cannot be met in both cases.
    rescues = []
    for end in ends:
        if end.fallback is not None and end.fallback.feasible and end.fallback_usd is not None:
            rescues.append((end.fallback, end.fallback_usd))
    slack_hours = chances = rescue_usd = None
    if len(rescues) == len(ends):
        (first, first_usd), (second, second_usd) = rescues
        slack_hours = first.slack_hours
        chances = (first.chance, second.chance)
        rescue_usd = (first_usd, second_usd)
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
        slack_hours=slack_hours,
        fallback=chances,
        fallback_usd=rescue_usd,
        # a dict keeps the order, and a reason of both ends once
        reasons=tuple(dict.fromkeys(reason for end in ends for reason in end.reasons)),
    )
