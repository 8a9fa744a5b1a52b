"""What runs on platforms cost: hours that were paid for, at the prices of the home's book.

Seconds are the platform's own where it says what it bills (SageMaker's training jobs), which
`billed` tells; else they are estimated from how long machines, or steps, ran, at spot prices where
they ran on spot machines. Prices are those of today: an invoice may differ."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rekindle.catalog.prices import PriceBook
from rekindle.outputs import Cost, CostOfMonth, Costs, Spent
from rekindle.records import RunRecord, TrainingSummary


class Stay(NamedTuple):
    """What a step had of machines: hours that it `took` of them, without savings by spot, those
    that are `paid`, and those that were `lost`: a training's in which no step was made that is in
    its model, and all of a step that failed."""

    step: str
    machine: str
    region: str
    spot: bool
    took: float
    paid: float
    lost: float
    billed: bool
    interruptions: int


def stays(record: RunRecord, training: TrainingSummary | None) -> Iterator[Stay]:
    """Of the steps of a run on a platform, whose training came to `training`."""
    sent = record.submission
    region = str(record.spec.get("platforms", {}).get(record.platform, {}).get("region", ""))
    for step in record.steps:
        if sent is None or not step.seconds or step.cached:
            continue
        machine, count = sent.machines.get(step.name, ("", 0))
        spot, billed = step.name in sent.spot, step.billed_seconds is not None
        took = paid = step.machine_seconds or step.seconds
        if step.billed_seconds is not None:  # a saving by spot is already in them
            took, paid = step.on_demand_seconds or step.billed_seconds, step.billed_seconds
        lost = took if step.status in ("failed", "cancelled") else 0.0
        if training and training.train_seconds is not None and step.holding("training"):
            lost = max(0.0, took - training.train_seconds)  # not below: a run before began it
        yield Stay(
            step.name,
            machine,
            region,
            spot,
            took=took * count / 3600,
            paid=paid * count / 3600,
            lost=lost * count / 3600,
            billed=billed,
            interruptions=max(0, step.attempts - 1) if spot else 0,
        )


def cost_of(run_id: str, platform: str, began: str, of: Iterable[Stay], prices: PriceBook) -> Cost:
    """Of a run, by its stays."""
    sums = dict.fromkeys(Spent.model_fields, 0.0)
    billed, unpriced = list[str](), list[str]()
    for stay in of:
        price = prices.find(stay.machine, stay.region) if stay.machine else None
        usual = per_hour = price.on_demand_usd_per_hour if price else None
        if price and stay.spot and not stay.billed:
            per_hour = price.spot_usd_per_hour
        if stay.billed:
            billed.append(stay.step)
        if per_hour is None:
            unpriced.append(stay.step)
        usd = (per_hour or 0.0) * stay.paid
        more = {
            "hours": stay.took,
            "lost_hours": stay.lost,
            "usd": usd,
            "lost_usd": usd * stay.lost / (stay.took or 1.0),
            "interruptions": stay.interruptions,
            "saved_usd": 0.0 if per_hour is None else (usual or per_hour) * stay.took - usd,
        }
        sums = {name: value + more[name] for name, value in sums.items()}
    return Cost(
        run_id=run_id,
        platform=platform,
        started_at=began,
        billed=tuple(billed),
        unpriced=tuple(unpriced),
        **sums,
    )


def costs(runs: Iterable[Cost]) -> Costs:
    """Of these runs, the newest first, and of the months in which they began."""
    rows, months = sorted(runs, key=lambda row: row.started_at, reverse=True), []
    for month, group in itertools.groupby(rows, lambda row: row.started_at[:7]):
        found = list(group)
        sums = {name: sum(getattr(row, name) for row in found) for name in Spent.model_fields}
        months.append(CostOfMonth(month=month, runs=len(found), **sums))
    return Costs(runs=tuple(rows), months=tuple(months))


HEADS = ("machine hours", "hours lost", "paid", "lost", "saved by spot", "interruptions")


def table(found: Costs) -> Iterator[tuple[str, ...]]:
    """The rows of a table for people, runs and then months."""
    yield "run", "on", *HEADS, ""
    for row in found.runs:
        yield row.run_id, row.platform, *figures(row), _note(row)
    for month in found.months:
        runs = f"{month.runs} run" + "s" * (month.runs != 1)
        yield f"{month.month}, {runs}", "", *figures(month), ""


def figures(spent: Spent) -> tuple[str, ...]:
    """Hours and those lost, dollars, those lost and those saved, and interruptions."""
    dollars = (f"${usd:,.2f}" for usd in (spent.usd, spent.lost_usd, spent.saved_usd))
    return f"{spent.hours:,.2f}", f"{spent.lost_hours:,.2f}", *dollars, f"{spent.interruptions}"


def in_words(cost: Cost) -> str:
    """The same of one run in a sentence; "" where no machine ran."""
    said = ", ".join(f"{name}: {figure}" for name, figure in zip(HEADS, figures(cost), strict=True))
    return f"{said[0].upper()}{said[1:]} ({_note(cost)})." if cost.hours else ""


def _note(cost: Cost) -> str:
    note = "billed seconds" if cost.billed else "estimated"
    return note + f", without {', '.join(cost.unpriced)}: no price" * bool(cost.unpriced)


def dearest(months: Iterable[CostOfMonth]) -> float:
    """Dollars of the month that would have been dearest without spot machines."""
    return max((month.usd + month.saved_usd for month in months), default=0.0)
