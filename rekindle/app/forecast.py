"""A plan in words, with bars of memory and time, and as a value for notebooks."""

import dataclasses
import html
from collections.abc import Iterator

from rekindle import formats
from rekindle.outputs import Planned, PlannedLayout, PlannedRest, PlannedSpot

GIB = 2**30
HEAD = 11  # characters of a line before its text
_BAR = 40  # characters of the longest bar
_MOST_REASONS = 8
_OUTLOOK = (
    "machines",
    "layout",
    "memory",
    "step",
    "training",
    "on demand",
    "spot",
    "besides",
)


@dataclasses.dataclass(frozen=True, repr=False)
class Forecast:
    """What a training needs, how long it takes and what it costs, all in `record`."""

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
        """Of training without interruptions: least, expected, most; None if unknown."""
        return self.record.hours

    @property
    def on_demand_usd(self) -> tuple[float, float, float] | None:
        """What those hours cost; None where they or the price are not known."""
        return self.record.on_demand_usd

    @property
    def refused(self) -> list[str]:
        """Why it should not be submitted, and what to do; empty where it may be."""
        return [f"{error.what}: {error.fix}" for error in self.record.errors]

    @property
    def rows(self) -> list[dict[str, object]]:
        """The chosen layout, then the next best: `pandas.DataFrame(plan.rows)`."""
        layouts = (self.record.chosen, *self.record.others)
        return [_row(layout, layout is self.record.chosen) for layout in layouts]

    @property
    def rejected(self) -> list[dict[str, str]]:
        """Why not the others: `pandas.DataFrame(plan.rejected)`."""
        return [{"layout": r.layout, "reason": r.reason} for r in self.record.rejected]

    def __str__(self) -> str:
        return "\n".join(lines(self.record))

    def __repr__(self) -> str:
        return f"Forecast({self.record.name!r}, {self.layout} on {self.machines})"

    def _repr_html_(self) -> str:
        return f'<pre style="white-space:pre-wrap">{html.escape(str(self))}</pre>'


def _row(layout: PlannedLayout, chosen: bool) -> dict[str, object]:
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
    step_seconds = plan.chosen.step_seconds[1]
    bars: dict[str, list[tuple[str, float, str]]] = {"memory": [], "step": []}
    for term in plan.memory:
        bars["memory"].append((term.name, term.amount, formats.binary(term.amount)))
    for term in plan.time:
        bars["step"].append((term.name, term.amount, f"{term.amount / step_seconds:.0%}"))
    yield title(plan)
    for head, text in facts(plan):
        yield f"{head:<{HEAD}}{text}"
        yield from _bars(bars.get(head, []))


def outlook(plan: Planned | None) -> Iterator[str]:
    """The figures in a few lines, for the user who confirms."""
    if plan is None:
        return
    is_shown = False
    for head, text in facts(plan):
        if head:  # a line without one belongs to the line before
            is_shown = head in _OUTLOOK
        if is_shown:
            yield f"  {head:<{HEAD}}{text}"


def title(plan: Planned) -> str:
    """What is to be trained."""
    batch = f"{plan.tokens_per_step:,} tokens a step"
    return f"{plan.name}: {formats.short(plan.parameters)} parameters, {batch}"


def facts(plan: Planned) -> Iterator[tuple[str, str]]:
    """All else in words, each under a head; what belongs to the one before has none."""
    # these four are known of every plan
    yield "machines", _machines(plan.chosen)
    yield "layout", _layout(plan.chosen)
    yield "memory", _memory(plan.chosen)
    yield "step", _step(plan.chosen)
    if plan.hours is not None:
        least, expected, most = map(formats.hours, plan.hours)
        yield "training", f"{expected} ({least} to {most}), {plan.steps:,} steps"
    if plan.on_demand_usd is not None:
        least, expected, most = map(formats.usd, plan.on_demand_usd)
        yield "on demand", f"{expected} ({least} to {most})"
    if plan.spot is not None:
        yield from _spot(plan.spot)
    if plan.rest is not None:
        yield "besides", _other_steps(plan.rest)
    yield from _others(plan)
    yield from (("advice", line) for line in plan.advice)
    yield from (("if", line) for line in plan.if_else)
    yield from (("note", line) for line in plan.notes)
    yield from (("refused", f"{error.what}: {error.fix}") for error in plan.errors)


def _layout(chosen: PlannedLayout) -> str:
    text = chosen.layout
    if chosen.zero:
        text += f" by DeepSpeed's {chosen.zero}"
    if chosen.precision:
        text += f", {chosen.precision}"
    text += f", micro-batch {chosen.micro_batch_size} x {chosen.accumulation}"
    if chosen.activation_checkpointing != "none":
        text += f", {chosen.activation_checkpointing} activation checkpointing"
    return text


def _memory(chosen: PlannedLayout) -> str:
    needed = formats.binary(chosen.needed_bytes)
    device = formats.binary(chosen.device_bytes)
    owner = "a process" if chosen.gpu == "CPU" else "a GPU"
    return f"{needed} of {device} {owner}, {formats.binary(chosen.memory_bytes)} of it tensors"


def _step(chosen: PlannedLayout) -> str:
    low, middle, high = map(formats.seconds, chosen.step_seconds)
    mfu = f", {chosen.mfu:.0%} MFU" if chosen.mfu else ""
    return f"{middle} ({low} to {high}), {chosen.tokens_per_second:,.0f} tokens/s{mfu}"


def _other_steps(rest: PlannedRest) -> str:
    """The steps besides training, as they were in an earlier run."""
    text = formats.hours(rest.hours)
    if rest.usd is not None:
        text += f", {formats.usd(rest.usd)}"
    text += f" for other steps, as in {rest.run_id}"
    if rest.divided:
        text += f", but ingest and shard on {rest.divided} nodes"
    return text


def _spot(spot: PlannedSpot) -> Iterator[tuple[str, str]]:
    fewest, most = spot.interruptions
    interruptions = f"{_range(f'{fewest:.1f}', f'{most:.1f}')} interruptions"
    rate = f"{spot.hazard}: {spot.hazard_per_node_hour:g} a node and hour"
    usd = _range(*map(formats.usd, spot.usd))
    hours = _range(*map(formats.hours, spot.hours))
    yield (
        "spot",
        f"{usd}, {hours}, {interruptions} ({rate}), a checkpoint every {spot.every} steps",
    )
    for name, chances in (("in time", spot.in_time), ("in budget", spot.in_budget)):
        percents = [f"{chance:.0%}" for chance in chances if chance is not None]
        if percents:
            yield "", f"{_range(percents[-1], percents[0])} {name}"
    if spot.fallback and spot.fallback_usd and spot.slack_hours is not None:
        chance = _range(*(f"{chance:.0%}" for chance in spot.fallback))
        when = "from the start"
        if spot.slack_hours > 0:
            when = f"once {formats.hours(spot.slack_hours)} behind"
        usd = _range(*map(formats.usd, spot.fallback_usd))
        yield (
            "",
            f"on demand {when}, for the deadline: {chance} likely, {usd} expected in all",
        )
    if spot.viable != "yes":
        viable = "not viable" if spot.viable == "no" else f"viable {spot.viable}"
        yield "", f"{viable}: {'; '.join(spot.reasons)}"


def _others(plan: Planned) -> Iterator[tuple[str, str]]:
    """The next best layouts, and why not the first of those that were rejected."""
    chosen = plan.chosen
    for other in plan.others:
        machines = ""
        if (other.machine, other.nodes) != (chosen.machine, chosen.nodes):
            machines = f"{_machines(other)}: "
        slower_by = other.step_seconds[1] / chosen.step_seconds[1] - 1
        if abs(slower_by) < 0.005:  # would be shown as 0 %
            speed = "as fast"
        elif slower_by < 0:
            speed = f"{-slower_by:.0%} faster"
        else:
            speed = f"{slower_by:.0%} slower"
        yield (
            "or",
            f"{machines}{other.layout}: {speed}, most of its time {other.dominant}",
        )
    shown_layouts = {other.layout for other in plan.others}
    rejected = [r for r in plan.rejected if r.layout not in shown_layouts]
    for rejection in rejected[:_MOST_REASONS]:
        yield "not", f"{rejection.layout}: {rejection.reason}"
    not_shown = len(rejected) - _MOST_REASONS
    if not_shown > 0:
        yield "", f"and {not_shown} more (--json); {plan.weighed:,} candidates weighed"


def _machines(layout: PlannedLayout) -> str:
    gpus = f"{layout.gpus_per_node} x {layout.gpu}"
    text = f"{layout.nodes} x {layout.machine} ({gpus} each)"
    if layout.region:
        text += f" in {layout.region}"
    if layout.on_demand_usd_per_hour is not None:
        text += f", ${layout.on_demand_usd_per_hour:,.2f} an hour"
    return text


def _bars(rows: list[tuple[str, float, str]]) -> Iterator[str]:
    """A bar for each row: its name, its length, and the text behind it."""
    longest = max((amount for _, amount, _ in rows), default=0.0)
    width = max((len(name) for name, _, _ in rows), default=0)
    for name, amount, text in rows:
        length = max(1, round(_BAR * amount / longest)) if longest else 0
        yield f"  {name:<{width}}  {'█' * length} {text}"


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"
