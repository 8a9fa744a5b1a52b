"""What runs on platforms cost: hours that were paid for, at the prices of the home's
book.

Seconds are the platform's own where it says what it bills (SageMaker's training jobs),
which `billed` tells; else they are estimated from how long machines, or steps, ran, at
spot prices where they ran on spot machines. Prices are those of today: an invoice may
differ."""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rekindle.catalog.prices import PriceBook
from rekindle.outputs import Cost, CostOfMonth, Costs, Spent
from rekindle.records import RunRecord, TrainingSummary


class Stay(NamedTuple):
    """What a step had of machines: hours that it `took` of them, without savings by spot,
    those that are `paid`, and those that were `lost`: a training's in which no step was
    made that is in its model, and all of a step that failed."""

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
    """What each step of a run on a platform had of machines;
    `training` is what came of its training."""
    submission = record.submission
    if submission is None:
        return
    region = str(record.spec.get("platforms", {}).get(record.platform, {}).get("region", ""))
    for step in record.steps:
        if not step.seconds or step.cached:
            continue
        machine, count = submission.machines.get(step.name, ("", 0))
        spot = step.name in submission.spot
        took = paid = step.machine_seconds or step.seconds
        if step.billed_seconds is not None:
            # a saving by spot is already in what is billed
            took = step.on_demand_seconds or step.billed_seconds
            paid = step.billed_seconds
        lost = took if step.status in ("failed", "cancelled") else 0.0
        # machines that started, waited or repeated steps were paid for, too
        if training and training.train_seconds is not None and step.holding("training"):
            lost = max(0.0, took - training.train_seconds)  # not below: a run before began it
        interruptions = 0
        if spot:
            interruptions = max(0, step.attempts - 1)
        yield Stay(
            step.name,
            machine,
            region,
            spot,
            took=took * count / 3600,
            paid=paid * count / 3600,
            lost=lost * count / 3600,
            billed=step.billed_seconds is not None,
            interruptions=interruptions,
        )


def cost_of(run_id: str, platform: str, began: str, of: Iterable[Stay], prices: PriceBook) -> Cost:
    """What a run cost, by its stays."""
    hours = lost_hours = usd = lost_usd = saved_usd = 0.0
    interruptions = 0
    billed: list[str] = []
    unpriced: list[str] = []
    for stay in of:
        price = prices.find(stay.machine, stay.region) if stay.machine else None
        on_demand = price.on_demand_usd_per_hour if price else None
        per_hour = on_demand
        # seconds that are billed have the saving by spot in them already
        if price and stay.spot and not stay.billed:
            per_hour = price.spot_usd_per_hour
        if stay.billed:
            billed.append(stay.step)
        hours += stay.took
        lost_hours += stay.lost
        interruptions += stay.interruptions
        if per_hour is None:
            unpriced.append(stay.step)
            continue
        # `took` of nothing has lost nothing
        stay_usd = per_hour * stay.paid
        usd += stay_usd
        lost_usd += stay_usd * stay.lost / (stay.took or 1.0)
        saved_usd += (on_demand or per_hour) * stay.took - stay_usd
    return Cost(
        run_id=run_id,
        platform=platform,
        started_at=began,
        billed=tuple(billed),
        unpriced=tuple(unpriced),
        hours=hours,
        lost_hours=lost_hours,
        usd=usd,
        lost_usd=lost_usd,
        saved_usd=saved_usd,
        interruptions=interruptions,
    )


def costs(runs: Iterable[Cost]) -> Costs:
    """What these runs cost, the newest first, and the months in which they began."""
    rows = sorted(runs, key=lambda row: row.started_at, reverse=True)
    months = []
    for month, group in itertools.groupby(rows, lambda row: row.started_at[:7]):
        runs_of_month = list(group)
        months.append(
            CostOfMonth(
                month=month,
                runs=len(runs_of_month),
                hours=sum(run.hours for run in runs_of_month),
                usd=sum(run.usd for run in runs_of_month),
                saved_usd=sum(run.saved_usd for run in runs_of_month),
                lost_hours=sum(run.lost_hours for run in runs_of_month),
                lost_usd=sum(run.lost_usd for run in runs_of_month),
                interruptions=sum(run.interruptions for run in runs_of_month),
            )
        )
    return Costs(runs=tuple(rows), months=tuple(months))


HEADS = ("machine hours", "hours lost", "paid", "lost", "saved by spot", "interruptions")


def table(all_costs: Costs) -> Iterator[tuple[str, ...]]:
    """The rows of a table for people, runs and then months."""
    yield "run", "on", *HEADS, ""
    for row in all_costs.runs:
        yield row.run_id, row.platform, *figures(row), _note(row)
    for month in all_costs.months:
        runs = "1 run" if month.runs == 1 else f"{month.runs} runs"
        yield f"{month.month}, {runs}", "", *figures(month), ""


def figures(spent: Spent) -> tuple[str, ...]:
    """Hours and those lost, dollars, those lost and those saved, and interruptions."""
    dollars = (f"${usd:,.2f}" for usd in (spent.usd, spent.lost_usd, spent.saved_usd))
    return (
        f"{spent.hours:,.2f}",
        f"{spent.lost_hours:,.2f}",
        *dollars,
        f"{spent.interruptions}",
    )


def in_words(cost: Cost) -> str:
    """The same of one run in a sentence; "" where no machine ran."""
    if not cost.hours:
        return ""
    pairs = zip(HEADS, figures(cost), strict=True)
    text = ", ".join(f"{name}: {figure}" for name, figure in pairs)
    return f"{text[0].upper()}{text[1:]} ({_note(cost)})."


def _note(cost: Cost) -> str:
    """Whose seconds these are, and which steps have no price."""
    note = "billed seconds" if cost.billed else "estimated"
    if cost.unpriced:
        note += f", without {', '.join(cost.unpriced)}: no price"
    return note


def dearest(months: Iterable[CostOfMonth]) -> float:
    """Dollars of the month that would have been dearest without spot machines."""
    return max((month.usd + month.saved_usd for month in months), default=0.0)
