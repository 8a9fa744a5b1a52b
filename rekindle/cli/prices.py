"""`rekindle prices`: the book of prices with its ages."""

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from rekindle import formats
from rekindle.catalog import prices
from rekindle.catalog.machines import machine, machines
from rekindle.catalog.prices import Price, PriceBook
from rekindle.cli.options import answer, own_prices, shared
from rekindle.errors import RequestError
from rekindle.outputs import PriceRow, Prices

CLOUDS = ("aws", "gcp", "azure")
_NUMBERS = (3, 4, 5)  # columns


@click.command("prices")
@click.option("--cloud", "clouds", type=click.Choice(CLOUDS), multiple=True,
              help="Only this cloud; repeatable.")  # fmt: skip
@click.option("--region", "regions", multiple=True, help="Only this region; repeatable.")
@own_prices
@shared
def command(
    clouds: tuple[str, ...], regions: tuple[str, ...], own: tuple[Path, ...], home: Path,
    as_json: bool,
) -> None:  # fmt: skip
    """List machine prices per hour and their age; --json adds their sources."""
    known = prices.book(home, own)
    found = [
        each for each in _settled(known)
        if (not clouds or machine(each.machine).cloud in clouds)
        and (not regions or each.region in regions)
    ]  # fmt: skip
    if not found:
        there = ", ".join(sorted({each.region for each in _settled(known)}))
        fix = f"choose of {there}; --prices FILE adds prices of your own"
        raise RequestError("there is no price of these", where="--cloud, --region", fix=fix)
    today = datetime.datetime.now(datetime.UTC).date()
    rows = [_row(each, today) for each in sorted(found, key=order)]
    if as_json:
        answer(Prices(prices=tuple(rows)))
    else:
        _table(rows)


def _settled(known: PriceBook) -> Iterator[Price]:
    """Each row as a plan finds it."""
    for each in known.prices:
        found = known.find(each.machine, each.region)
        assert found is not None
        yield found


def order(each: Price) -> tuple[Any, ...]:
    """What sorts prices: as the catalog has the machines, SageMaker's after EC2's."""
    names = {name: i for i, name in enumerate(machines())}
    name = each.machine.removeprefix("ml.")
    return machine(name).cloud, name != each.machine, names[name], each.region


def _row(each: Price, today: datetime.date) -> PriceRow:
    spot_day = each.spot_as_of if each.spot_usd_per_hour is not None else None
    return PriceRow(
        machine=each.machine, cloud=machine(each.machine).cloud, region=each.region,
        on_demand_usd_per_hour=each.on_demand_usd_per_hour,
        spot_usd_per_hour=each.spot_usd_per_hour, source=each.source,
        as_of=each.as_of.isoformat(), age_days=each.age_days(today), old=each.is_old(today),
        spot_source=each.spot_source if spot_day else "",
        spot_as_of=spot_day.isoformat() if spot_day else "",
        spot_old=each.spot_usd_per_hour is not None and each.is_old(today, spot=True),
        assumed=each.assumed,
    )  # fmt: skip


def _table(rows: Sequence[PriceRow]) -> None:
    """A line each, never cut, so that other programs can read columns."""
    lines = [("machine", "GPUs", "region", "on demand $/h", "spot $/h", "days ago", "note")]
    for row in rows:
        marks = ["old"] if row.old else ["spot is old"] if row.spot_old else []
        if row.assumed:
            marks.append("spot assumed" if row.assumed.startswith("spot") else "assumed")
        kind = machine(row.machine)
        lines.append((
            row.machine, f"{kind.gpus} {kind.gpu}" if kind.gpu else "-", row.region,
            _shown(row.on_demand_usd_per_hour), _shown(row.spot_usd_per_hour),
            str(row.age_days), ", ".join(marks),
        ))  # fmt: skip
    click.echo("\n".join(formats.aligned(lines, right=_NUMBERS)))
    if any(row.old or row.spot_old for row in rows):
        old = f"old: of more than {prices.OLD_DAYS} days ago; --prices FILE overrides prices"
        click.echo(old, err=True)


def _shown(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:.4f}"
