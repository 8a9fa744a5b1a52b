"""What runs on platforms cost: hours that were paid for, at the prices of the home's book.

Seconds are the platform's own where it says what it bills (SageMaker's training jobs), which
`billed` tells; else they are estimated from how long machines, or steps, ran, at spot prices where
they ran on spot machines. Prices are those of today: an invoice may differ."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from rekindle.app.runs import newest_first
from rekindle.catalog.prices import PriceBook, book
from rekindle.outputs import Cost, CostOfMonth, Costs, Spent
from rekindle.records import RunRecord, Submission


def costs(home: Path, name: str = "") -> Costs:
    """Of each run on a platform under `home`, or of those of a name, the newest first."""
    prices = book(home)
    sent = ((record, record.submission) for record in newest_first(home, name))
    rows = [cost_of(record, submission, prices) for record, submission in sent if submission]
    rows.sort(key=lambda row: row.started_at, reverse=True)
    months = []
    for month, group in itertools.groupby(rows, lambda row: row.started_at[:7]):
        found = list(group)
        sums = {name: sum(getattr(row, name) for row in found) for name in Spent.model_fields}
        months.append(CostOfMonth(month=month, runs=len(found), **sums))
    return Costs(runs=tuple(rows), months=tuple(months))


def cost_of(record: RunRecord, sent: Submission, prices: PriceBook) -> Cost:
    """Of a run on a platform."""
    region = str(record.spec["platforms"].get(record.platform, {}).get("region", ""))
    hours = usd = dear = 0.0
    billed, unpriced = list[str](), list[str]()
    for step in record.steps:
        if not step.seconds or step.cached:
            continue
        kind, count = sent.machines.get(step.name, ("", 0))
        price, spot = prices.find(kind, region) if kind else None, step.name in sent.spot
        usual = price.on_demand_usd_per_hour if price else None
        taken = paid = (step.machine_seconds or step.seconds) * count / 3600
        if step.billed_seconds is not None:  # a saving by spot is already in them
            taken = (step.on_demand_seconds or step.billed_seconds) * count / 3600
            paid, spot = step.billed_seconds * count / 3600, False
            billed.append(step.name)
        hours += taken
        per_hour = price.spot_usd_per_hour if price and spot else usual
        if per_hour is None:
            unpriced.append(step.name)
            continue
        usd, dear = usd + per_hour * paid, dear + (usual or per_hour) * taken
    attempts = (step.attempts for step in record.steps if step.name in sent.spot)
    return Cost(
        run_id=record.run_id, platform=record.platform, started_at=record.started_at, hours=hours,
        usd=usd, saved_usd=dear - usd, interruptions=sum(max(0, n - 1) for n in attempts),
        billed=tuple(billed), unpriced=tuple(unpriced),
    )  # fmt: skip


def table(found: Costs) -> Iterator[tuple[str, ...]]:
    """The rows of a table for people, runs and then months."""
    yield "run", "on", "machine hours", "paid", "saved by spot", "interruptions", ""
    for row in found.runs:
        note = "billed seconds" if row.billed else "estimated"
        note += f", without {', '.join(row.unpriced)}: no price" * bool(row.unpriced)
        yield row.run_id, row.platform, *_figures(row), note
    for month in found.months:
        runs = f"{month.runs} run" + "s" * (month.runs != 1)
        yield f"{month.month}, {runs}", "", *_figures(month), ""


def _figures(spent: Spent) -> tuple[str, ...]:
    dollars = f"${spent.usd:,.2f}", f"${spent.saved_usd:,.2f}"
    return f"{spent.hours:,.2f}", *dollars, f"{spent.interruptions}"
