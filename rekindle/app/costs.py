"""What runs on platforms cost: hours that were paid for, at the prices of the home's book.

Seconds are the platform's own where it says what it bills (SageMaker's training jobs), which
`billed` tells; else they are estimated from how long steps ran, at spot prices where they ran on
spot machines. Prices are those of today: an invoice may differ."""

import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rekindle.app.runs import newest_first
from rekindle.catalog.prices import PriceBook, book
from rekindle.outputs import Cost, CostOfMonth, Costs
from rekindle.records import RunRecord, StepRecord


@dataclasses.dataclass(frozen=True)
class _Step:
    """Machine hours of a step, dollars that were paid, and those of machines on demand."""

    hours: float
    usd: float | None
    on_demand_usd: float | None
    billed: bool = False


def costs(home: Path, name: str = "") -> Costs:
    """Of each run on a platform under `home`, or of those of a name, the newest first."""
    prices, rows = book(home), list[Cost]()
    for record in newest_first(home, name):
        if record.submission is not None:
            rows.append(_of_run(record, prices))
    rows.sort(key=lambda row: row.started_at, reverse=True)
    months = collections.defaultdict[str, list[Cost]](list)
    for row in rows:
        months[row.started_at[:7]].append(row)
    totals = tuple(
        CostOfMonth(
            month=month, runs=len(found), hours=sum(row.hours for row in found),
            usd=sum(row.usd for row in found), saved_usd=sum(row.saved_usd for row in found),
            interruptions=sum(row.interruptions for row in found),
        ) for month, found in months.items()
    )  # fmt: skip
    return Costs(runs=tuple(rows), months=totals)


def _of_run(record: RunRecord, prices: PriceBook) -> Cost:
    assert record.submission is not None
    region = str(record.spec["platforms"].get(record.platform, {}).get("region", ""))
    found = dict[str, _Step]()
    for step in record.steps:
        if step.seconds and not step.cached:
            found[step.name] = _of_step(step, record, region, prices)
    priced = [step for step in found.values() if step.usd is not None]
    usd = sum(step.usd or 0.0 for step in priced)
    dear = sum(step.on_demand_usd or step.usd or 0.0 for step in priced)
    spot = (step for step in record.steps if step.name in record.submission.spot)
    return Cost(
        run_id=record.run_id, platform=record.platform, started_at=record.started_at,
        hours=sum(step.hours for step in found.values()), usd=usd, saved_usd=dear - usd,
        interruptions=sum(max(0, step.attempts - 1) for step in spot),
        billed=tuple(name for name, step in found.items() if step.billed),
        unpriced=tuple(name for name, step in found.items() if step.usd is None),
    )  # fmt: skip


def _of_step(step: StepRecord, record: RunRecord, region: str, prices: PriceBook) -> _Step:
    assert record.submission is not None
    kind, count = record.submission.machines.get(step.name, ("", 0))
    price = prices.find(kind, region) if kind else None
    usual = price.on_demand_usd_per_hour if price else None
    if step.billed_seconds is not None:  # a saving by spot is already in them
        hours = (step.on_demand_seconds or step.billed_seconds) * count / 3600
        paid = step.billed_seconds * count / 3600
        dear = usual and usual * hours
        return _Step(hours, usual and usual * paid, dear, billed=True)
    hours = (step.seconds or 0.0) * count / 3600
    on_spot = step.name in record.submission.spot
    usd = price.spot_usd_per_hour if price and on_spot else usual
    return _Step(hours, usd and usd * hours, usual and usual * hours)


def table(found: Costs) -> Iterator[tuple[str, ...]]:
    """The rows of a table for people, runs and then months."""
    yield "run", "on", "machine hours", "paid", "saved by spot", "interruptions", ""
    for row in found.runs:
        note = "billed seconds" if row.billed else "estimated"
        note += f", without {', '.join(row.unpriced)}: no price" * bool(row.unpriced)
        figures = f"{row.hours:,.2f}", f"${row.usd:,.2f}", f"${row.saved_usd:,.2f}"
        yield row.run_id, row.platform, *figures, f"{row.interruptions}", note
    for month in found.months:
        figures = f"{month.hours:,.2f}", f"${month.usd:,.2f}", f"${month.saved_usd:,.2f}"
        runs = f"{month.runs} run" + "s" * (month.runs != 1)
        yield f"{month.month}, {runs}", "", *figures, f"{month.interruptions}", ""
