"""A plan as a record, which the command line, notebooks and cards show."""

from collections.abc import Iterable
from typing import Any

from rekindle import outputs
from rekindle.errors import Problem, RequestError
from rekindle.plan.advice import advice
from rekindle.plan.choice import Choice
from rekindle.plan.memory import needed
from rekindle.plan.plan import Plan
from rekindle.plan.spot import Spot
from rekindle.spec.layout import AXES

NOT_COUNTED = "steps besides training are not counted: no run of this name is known that ended well"


def told(
    plan: Plan, refused: Iterable[Problem] = (), rest: outputs.PlannedRest | None = None
) -> outputs.Planned:
    """All that a plan says.

    `refused` is why it should not be submitted, `rest` what the other steps take."""
    option, problems = plan.chosen.option, list(refused)
    notes = plan.notes if rest else (*plan.notes, NOT_COUNTED)
    usd, hours = plan.chosen.fleet.usd_per_hour(), plan.hours
    return outputs.Planned(
        name=plan.name, parameters=plan.asked.shape.parameters,
        tokens_per_step=plan.asked.train.global_batch_size * plan.chosen.option.sequence,
        steps=plan.steps, chosen=_layout(plan.chosen),
        memory=_terms(option.memory.terms.items()), time=_terms(option.step.terms.items()),
        hours=hours,
        on_demand_usd=None
        if usd is None or hours is None
        else (usd * hours[0], usd * hours[1], usd * hours[2]),
        spot=_spot(plan.spot) if plan.spot else None, rest=rest,
        others=tuple(_layout(other) for other in plan.others),
        rejected=tuple(outputs.Rejection(layout=r.layout, reason=r.reason) for r in plan.rejected),
        weighed=plan.weighed, advice=tuple(advice(plan)), if_else=plan.if_else, notes=notes,
        errors=outputs.rows_of(RequestError(problems)) if problems else (),
    )  # fmt: skip


def _terms(terms: Iterable[tuple[str, float]]) -> tuple[outputs.PlannedTerm, ...]:
    return tuple(outputs.PlannedTerm(name=name, amount=amount) for name, amount in terms if amount)


def _layout(choice: Choice) -> outputs.PlannedLayout:
    fleet, option = choice.fleet, choice.option
    work, layout = option.work, option.work.layout
    low, high = option.seconds_between
    each = work.shape.flops_per_token(option.sequence, frozen=work.lora_rank > 0)
    flops = each * option.tokens_per_second
    tflops = option.cluster.gpu.product_tflops(work.precision, work.software.tf32) or 0.0
    peak = tflops * 1e12 * option.cluster.gpus
    return outputs.PlannedLayout(
        machine=fleet.name, nodes=fleet.nodes, gpus_per_node=fleet.gpus_per_node,
        gpu=option.cluster.gpu.name, region=fleet.region, layout=str(layout),
        degrees={axis: getattr(layout, axis) for axis in AXES}, schedule=layout.schedule,
        micro_batch_size=layout.micro_batch_size, accumulation=work.accumulation,
        activation_checkpointing=work.checkpointing, precision=work.precision,
        step_seconds=(low, option.step.seconds, high),
        tokens_per_second=option.tokens_per_second, mfu=flops / peak if peak else 0.0,
        dominant=option.step.dominant, memory_bytes=option.memory.peak_bytes,
        needed_bytes=needed(option.memory.peak_bytes).bytes,
        device_bytes=option.cluster.gpu.memory_bytes,
        on_demand_usd_per_hour=fleet.usd_per_hour(),
        spot_usd_per_hour=fleet.usd_per_hour(spot=True), zero=str(work.zero or ""),
    )  # fmt: skip


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
        viable=spot.viable, hazard_per_node_hour=spot.hazard.per_node_hour,
        hazard=spot.hazard.chosen, every=spot.every,
        hours=(ends[0].expected.wall_hours, ends[1].expected.wall_hours),
        usd=(ends[0].expected_usd, ends[1].expected_usd),
        interruptions=(ends[0].expected.interruptions, ends[1].expected.interruptions),
        in_time=(ends[0].in_time, ends[1].in_time),
        in_budget=(ends[0].in_budget, ends[1].in_budget),
        **rescue,
        reasons=tuple(dict.fromkeys(reason.text for end in ends for reason in end.reasons)),
    )  # fmt: skip
