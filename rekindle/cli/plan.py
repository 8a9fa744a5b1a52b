"""`rekindle plan CONFIG`: layout, memory, hours, money, and why not the others; asks nobody and
changes nothing."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rekindle.answers import Planned, PlannedLayout, PlannedSpot
from rekindle.cli.compile import PLATFORMS
from rekindle.cli.options import answer, overrides, shared
from rekindle.report.words import binary

if TYPE_CHECKING:
    from rekindle.spec.model import Spec

HEAD = 11  # characters of a line before its text
_BAR = 40
_MOST_REASONS = 8


@click.command("plan")
@click.argument("config", type=click.Path(path_type=Path), required=False)
@overrides
@click.option("--platform", type=click.Choice(["local", *PLATFORMS]), default=None,
              help="Whose machines; default: the platform of CONFIG, else all.")  # fmt: skip
@click.option("--region", default="", help="Where; default: the platform's, else the cheapest.")
@click.option("--examples", type=click.IntRange(min=1), default=None,
              help="Examples in the training split, where nobody has counted them.")  # fmt: skip
@click.option("--trace", "with_trace", is_flag=True,
              help="Ask the engine what the two best layouts hold; needs torch.")  # fmt: skip
@click.option("--prices", "own", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
              help="Prices of your own, over those that are known.")  # fmt: skip
@click.option("--calibrate", "run", metavar="RUN",
              help="First measure that run, and correct this and later plans by it.")  # fmt: skip
@shared
def command(
    config: Path | None,
    overrides: tuple[str, ...],
    platform: str | None,
    region: str,
    examples: int | None,
    with_trace: bool,
    own: tuple[Path, ...],
    run: str | None,
    home: Path,
    as_json: bool,
) -> int:
    """Say what the training of CONFIG needs, how long it takes and what it costs.

    With --calibrate, a training that has run, here or elsewhere, corrects what the planner takes
    from published figures; CONFIG may be left out."""
    from rekindle.spec.load import load_target

    if run is not None:
        from rekindle.cli import calibrate

        measured = calibrate.calibrate(home, run)
        if config is None and as_json:
            answer(measured)
        elif not as_json:
            click.echo("\n".join(calibrate.lines(measured)))
    if config is None:
        if run is None:
            raise click.UsageError("a CONFIG to plan is missing")
        return 0
    spec = load_target(config, overrides)
    planned = figures(spec, platform or "", region, examples, home, own, with_trace=with_trace)
    if as_json:
        answer(planned)
    else:
        for line in lines(planned):
            click.echo(line)
    return 2 if planned.errors else 0


def figures(
    spec: Spec, platform: str, region: str, examples: int | None, home: Path, own: Sequence[Path],
    *, with_trace: bool,
) -> Planned:  # fmt: skip
    """The plan with all that it says; RequestError where it cannot be planned, or nothing fits."""
    from rekindle.catalog.prices import book
    from rekindle.cli.experience import known, rest_of
    from rekindle.plan.plan import make, refusals
    from rekindle.plan.told import told

    named = platform or _platform(spec)
    there = region or str(getattr(getattr(spec.platforms, named, None), "region", ""))
    today = datetime.datetime.now(datetime.UTC).date()
    prices = book(home, own)
    before = known(home, spec.name)
    found = make(spec, prices, named, there, examples, today=today, known=before)
    if with_trace:
        from rekindle.plan.finalists import traced

        found = traced(found, spec)
    return told(found, refusals(found, spec), rest_of(found, named, home, prices))


def _platform(spec: Spec) -> str:
    """The one that the config has a section of."""
    named = [name for name in PLATFORMS if name in spec.platforms.model_fields_set]
    return named[0] if len(named) == 1 else ""


def lines(plan: Planned) -> Iterator[str]:
    """The plan for people, with bars of memory and time."""
    whole = plan.chosen.step_seconds[1]
    bars = {
        "memory": [(t.name, t.amount, binary(t.amount)) for t in plan.memory],
        "step": [(t.name, t.amount, f"{t.amount / whole:.0%}") for t in plan.time],
    }
    yield title(plan)
    for head, text in facts(plan):
        yield f"{head:<{HEAD}}{text}"
        yield from _bars(bars.get(head, []))


def title(plan: Planned) -> str:
    """What is to be trained."""
    batch = f"{plan.tokens_per_step:,} tokens a step"
    return f"{plan.name}: {_short(plan.parameters)} parameters, {batch}"


def facts(plan: Planned) -> Iterator[tuple[str, str]]:
    """All else in words, each under a head; what belongs to the one before has none."""
    chosen = plan.chosen
    yield "machines", _machines(chosen)
    how = chosen.activation_checkpointing
    size = f"micro-batch {chosen.micro_batch_size} x {chosen.accumulation}"
    again = f", {how} recomputation" if how != "none" else ""
    numbers = f", {chosen.precision}" if chosen.precision else ""
    yield "layout", f"{chosen.layout}{numbers}, {size}{again}"
    tensors = f"{binary(chosen.memory_bytes)} of it tensors"
    yield (
        "memory",
        f"{binary(chosen.needed_bytes)} of {binary(chosen.device_bytes)} a GPU, {tensors}",
    )
    low, middle, high = map(_seconds, chosen.step_seconds)
    mfu = f", {chosen.mfu:.0%} MFU" if chosen.mfu else ""
    yield "step", f"{middle} ({low} to {high}), {chosen.tokens_per_second:,.0f} tokens/s{mfu}"
    if plan.hours is not None:
        least, expected, most = map(_hours, plan.hours)
        yield "training", f"{expected} ({least} to {most}), {plan.steps:,} steps"
    if plan.on_demand_usd is not None:
        least, expected, most = map(_usd, plan.on_demand_usd)
        yield "on demand", f"{expected} ({least} to {most})"
    if plan.spot is not None:
        yield from _spot(plan.spot)
    if plan.rest is not None:
        usd = "" if plan.rest.usd is None else f", {_usd(plan.rest.usd)}"
        hours = _hours(plan.rest.hours)
        yield "besides", f"{hours}{usd} for other steps, as in {plan.rest.run_id}"
    yield from _others(plan)
    yield from (("if", line) for line in plan.if_else)
    yield from (("note", line) for line in plan.notes)
    yield from (("refused", f"{error.what}: {error.fix}") for error in plan.errors)


def _spot(spot: PlannedSpot) -> Iterator[tuple[str, str]]:
    times = f"{spot.interruptions[0]:.1f}", f"{spot.interruptions[1]:.1f}"
    rate = f"{spot.hazard}: {spot.hazard_per_node_hour:g} a node and hour"
    yield (
        "spot",
        f"{_to(*map(_usd, spot.usd))}, {_to(*map(_hours, spot.hours))}, {_to(*times)} interruptions"
        f" ({rate}), a checkpoint every {spot.every} steps",
    )
    for name, chances in (("in time", spot.in_time), ("in budget", spot.in_budget)):
        known = [f"{chance:.0%}" for chance in chances if chance is not None]
        if known:
            yield "", f"{_to(known[-1], known[0])} {name}"
    if spot.fallback and spot.fallback_usd and spot.slack_hours is not None:
        likely = _to(*(f"{chance:.0%}" for chance in spot.fallback))
        behind = f"once {_hours(spot.slack_hours)} behind"
        when = behind if spot.slack_hours > 0 else "from the start"
        usd = _to(*map(_usd, spot.fallback_usd))
        yield "", f"on demand {when}, for the deadline: {likely} likely, {usd} expected in all"
    if spot.viable != "yes":
        yield "", f"viable: {spot.viable}: {'; '.join(spot.reasons)}"


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


def _short(number: float) -> str:
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"


def _to(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def _hours(number: float) -> str:
    return f"{number:,.1f} h" if number >= 1 else f"{60 * number:.1f} min"


def _usd(number: float) -> str:
    return f"${number:,.0f}" if number >= 100 else f"${number:.2f}"


def _seconds(number: float) -> str:
    return f"{number:,.0f} s" if number >= 100 else f"{number:.3g} s"
