"""A plan in words, with bars of memory and time; and as a value for notebooks that shows them."""

import dataclasses
import html
from collections.abc import Iterator
from typing import Any

from rekindle import formats
from rekindle.outputs import Planned, PlannedLayout, PlannedSpot

GIB = 2**30
HEAD = 11  # characters of a line before its text
_BAR = 40
_MOST_REASONS = 8
_TOLD = ("machines", "layout", "memory", "step", "training", "on demand", "spot", "besides")


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """What a training needs, how long it takes and what it costs: `record` holds all of it."""

    record: Planned

    @property
    def layout(self) -> str:
        """Degrees, such as `shard 8`."""
        return self.record.chosen.layout

    @property
    def machines(self) -> str:
        """How many of which, such as `1 x p4de.24xlarge`."""
        return f"{self.record.chosen.nodes} x {self.record.chosen.machine}"

    @property
    def hours(self) -> tuple[float, float, float] | None:
        """Of training without interruptions: least, expected, most; None for uncounted data."""
        return self.record.hours

    @property
    def on_demand_usd(self) -> tuple[float, float, float] | None:
        """What those hours cost; None where they or the price are not known."""
        return self.record.on_demand_usd

    @property
    def refused(self) -> list[str]:
        """Why it should not be submitted, and what to do; empty where nothing speaks against it."""
        return [f"{error.what}: {error.fix}" for error in self.record.errors]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The chosen layout, then the next best: `pandas.DataFrame(plan.rows)`."""
        layouts = (self.record.chosen, *self.record.others)
        return [_row(one, one is self.record.chosen) for one in layouts]

    @property
    def rejected(self) -> list[dict[str, str]]:
        """Why not the others: `pandas.DataFrame(plan.rejected)`."""
        return [{"layout": one.layout, "reason": one.reason} for one in self.record.rejected]

    def __str__(self) -> str:
        return "\n".join(lines(self.record))

    def __repr__(self) -> str:
        return f"Forecast({self.record.name!r}, {self.layout} on {self.machines})"

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(str(self))}</pre>'


def _row(layout: PlannedLayout, chosen: bool) -> dict[str, Any]:
    least, expected, most = layout.step_seconds
    return {
        "layout": layout.layout,
        "chosen": chosen,
        "machines": f"{layout.nodes} x {layout.machine}",
        "gpus": layout.nodes * layout.gpus_per_node,
        "gpu": layout.gpu,
        "region": layout.region,
        "micro_batch_size": layout.micro_batch_size,
        "accumulation": layout.accumulation,
        "activation_checkpointing": layout.activation_checkpointing,
        "step_seconds": expected,
        "step_seconds_least": least,
        "step_seconds_most": most,
        "tokens_per_second": layout.tokens_per_second,
        "mfu": layout.mfu,
        "memory_gib": layout.memory_bytes / GIB,
        "needed_gib": layout.needed_bytes / GIB,
        "device_gib": layout.device_bytes / GIB,
        "on_demand_usd_per_hour": layout.on_demand_usd_per_hour,
        "spot_usd_per_hour": layout.spot_usd_per_hour,
        "dominant": layout.dominant,
    }


def lines(plan: Planned) -> Iterator[str]:
    """The plan for people, with bars of memory and time."""
    whole = plan.chosen.step_seconds[1]
    bars = {
        "memory": [(t.name, t.amount, formats.binary(t.amount)) for t in plan.memory],
        "step": [(t.name, t.amount, f"{t.amount / whole:.0%}") for t in plan.time],
    }
    yield title(plan)
    for head, text in facts(plan):
        yield f"{head:<{HEAD}}{text}"
        yield from _bars(bars.get(head, []))


def outlook(plan: Planned | None) -> Iterator[str]:
    """The figures in a few lines, for the user who confirms."""
    told = False
    for head, text in facts(plan) if plan else ():
        told = head in _TOLD if head else told
        if told:
            yield f"  {head:<{HEAD}}{text}"


def title(plan: Planned) -> str:
    """What is to be trained."""
    batch = f"{plan.tokens_per_step:,} tokens a step"
    return f"{plan.name}: {formats.short(plan.parameters)} parameters, {batch}"


def facts(plan: Planned) -> Iterator[tuple[str, str]]:
    """All else in words, each under a head; what belongs to the one before has none."""
    chosen = plan.chosen
    yield "machines", _machines(chosen)
    how = chosen.activation_checkpointing
    size = f"micro-batch {chosen.micro_batch_size} x {chosen.accumulation}"
    again = f", {how} activation checkpointing" if how != "none" else ""
    numbers = f", {chosen.precision}" if chosen.precision else ""
    by = f" by DeepSpeed's {chosen.zero}" if chosen.zero else ""
    yield "layout", f"{chosen.layout}{by}{numbers}, {size}{again}"
    tensors = f"{formats.binary(chosen.memory_bytes)} of it tensors"
    needed, has = map(formats.binary, (chosen.needed_bytes, chosen.device_bytes))
    per = "a process" if chosen.gpu == "CPU" else "a GPU"
    yield "memory", f"{needed} of {has} {per}, {tensors}"
    low, middle, high = map(formats.seconds, chosen.step_seconds)
    mfu = f", {chosen.mfu:.0%} MFU" if chosen.mfu else ""
    yield "step", f"{middle} ({low} to {high}), {chosen.tokens_per_second:,.0f} tokens/s{mfu}"
    if plan.hours is not None:
        least, expected, most = map(formats.hours, plan.hours)
        yield "training", f"{expected} ({least} to {most}), {plan.steps:,} steps"
    if plan.on_demand_usd is not None:
        least, expected, most = map(formats.usd, plan.on_demand_usd)
        yield "on demand", f"{expected} ({least} to {most})"
    if plan.spot is not None:
        yield from _spot(plan.spot)
    if plan.rest is not None:
        usd = "" if plan.rest.usd is None else f", {formats.usd(plan.rest.usd)}"
        hours = formats.hours(plan.rest.hours)
        nodes = f", but ingest and shard on {plan.rest.divided} nodes" if plan.rest.divided else ""
        yield "besides", f"{hours}{usd} for other steps, as in {plan.rest.run_id}{nodes}"
    yield from _others(plan)
    yield from (("advice", line) for line in plan.advice)
    yield from (("if", line) for line in plan.if_else)
    yield from (("note", line) for line in plan.notes)
    yield from (("refused", f"{error.what}: {error.fix}") for error in plan.errors)


def _spot(spot: PlannedSpot) -> Iterator[tuple[str, str]]:
    times = f"{spot.interruptions[0]:.1f}", f"{spot.interruptions[1]:.1f}"
    rate = f"{spot.hazard}: {spot.hazard_per_node_hour:g} a node and hour"
    usd, hours = _to(*map(formats.usd, spot.usd)), _to(*map(formats.hours, spot.hours))
    often = f"{_to(*times)} interruptions ({rate}), a checkpoint every {spot.every} steps"
    yield "spot", f"{usd}, {hours}, {often}"
    for name, chances in (("in time", spot.in_time), ("in budget", spot.in_budget)):
        known = [f"{chance:.0%}" for chance in chances if chance is not None]
        if known:
            yield "", f"{_to(known[-1], known[0])} {name}"
    if spot.fallback and spot.fallback_usd and spot.slack_hours is not None:
        likely = _to(*(f"{chance:.0%}" for chance in spot.fallback))
        behind = f"once {formats.hours(spot.slack_hours)} behind"
        when = behind if spot.slack_hours > 0 else "from the start"
        usd = _to(*map(formats.usd, spot.fallback_usd))
        yield "", f"on demand {when}, for the deadline: {likely} likely, {usd} expected in all"
    if spot.viable != "yes":
        viable = "not viable" if spot.viable == "no" else f"viable {spot.viable}"
        yield "", f"{viable}: {'; '.join(spot.reasons)}"


def _others(plan: Planned) -> Iterator[tuple[str, str]]:
    mine = plan.chosen.machine, plan.chosen.nodes
    best = plan.chosen.step_seconds[1]
    for other in plan.others:
        where = "" if (other.machine, other.nodes) == mine else f"{_machines(other)}: "
        by = other.step_seconds[1] / best - 1
        word = "faster" if by < 0 else "slower"
        speed = f"{abs(by):.0%} {word}" if abs(by) >= 0.005 else "as fast"
        yield "or", f"{where}{other.layout}: {speed}, most of its time {other.dominant}"
    shown = {other.layout for other in plan.others}
    left = [r for r in plan.rejected if r.layout not in shown]
    yield from (("not", f"{one.layout}: {one.reason}") for one in left[:_MOST_REASONS])
    if (more := len(left) - _MOST_REASONS) > 0:
        yield "", f"and {more} more (--json); {plan.weighed:,} candidates weighed"


def _machines(layout: PlannedLayout) -> str:
    gpus = f"{layout.gpus_per_node} x {layout.gpu}"
    where = f" in {layout.region}" if layout.region else ""
    usd = layout.on_demand_usd_per_hour
    price = "" if usd is None else f", ${usd:,.2f} an hour"
    return f"{layout.nodes} x {layout.machine} ({gpus} each){where}{price}"


def _bars(rows: list[tuple[str, float, str]]) -> Iterator[str]:
    most = max((amount for _, amount, _ in rows), default=0.0)
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, amount, said in rows:
        length = max(1, round(_BAR * amount / most)) if most else 0
        yield f"  {name:<{width}}  {'█' * length} {said}"


def _to(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
