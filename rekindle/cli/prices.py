"""`rekindle prices`: the book of prices with its ages; `rekindle prices refresh`: what the clouds
say now."""

import datetime
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rekindle import formats
from rekindle.catalog import prices
from rekindle.catalog.machines import machine, machines
from rekindle.catalog.prices import Price, PriceBook
from rekindle.cli.options import answer, own_prices, shared
from rekindle.errors import PlatformError, RekindleError, RequestError
from rekindle.outputs import PriceChange, PriceRow, Prices, PricesRefreshed, rows_of
from rekindle.platforms.azureml.prices import ask as of_azure
from rekindle.platforms.sagemaker.prices import ask as of_aws
from rekindle.platforms.vertex.prices import KEY
from rekindle.platforms.vertex.prices import ask as of_google
from rekindle.records import write_atomically

CLOUDS = ("aws", "gcp", "azure")
_NUMBERS = (3, 4, 5)  # columns


def _which(function: Callable[..., Any]) -> Callable[..., Any]:
    """`--cloud` and `--region`."""
    cloud = click.option("--cloud", "clouds", type=click.Choice(CLOUDS), multiple=True,
                         help="Only this cloud; repeatable.")  # fmt: skip
    only = "Only this region; repeatable."
    return cloud(click.option("--region", "regions", multiple=True, help=only)(function))


@click.group("prices", invoke_without_command=True)
@_which
@own_prices
@shared
@click.pass_context
def command(
    context: click.Context, clouds: tuple[str, ...], regions: tuple[str, ...],
    own: tuple[Path, ...], home: Path, as_json: bool,
) -> None:  # fmt: skip
    """List machine prices per hour and their age; --json adds their sources."""
    if context.invoked_subcommand is not None:
        _refuse_options(context)
        return
    known = prices.book(home, own)
    found = [each for each in _settled(known) if _is_wanted(each, clouds, regions)]
    if not found:
        there = ", ".join(sorted({each.region for each in _settled(known)}))
        raise RequestError("there is no price of these", where="--cloud, --region",
                           fix=f"choose of {there}; `rekindle prices refresh --region R` asks for "
                           "another region")  # fmt: skip
    today = datetime.datetime.now(datetime.UTC).date()
    rows = [_row(each, today) for each in sorted(found, key=_order)]
    if as_json:
        answer(Prices(prices=tuple(rows)))
    else:
        _table(rows)


@command.command("refresh")
@_which
@shared
def refresh(clouds: tuple[str, ...], regions: tuple[str, ...], home: Path, as_json: bool) -> int:
    """Ask the clouds for the prices of the machines in the catalog, in the regions of the known
    prices or in --region. AWS needs a login, Google a key in GOOGLE_API_KEY, Azure nothing. If a
    cloud does not answer, its old prices stay."""
    wanted = _places(clouds, regions, prices.book(home))
    today = datetime.datetime.now(datetime.UTC).date()
    answers, errors = dict[str, list[Price]](), dict[str, RekindleError]()
    for cloud, there in wanted.items():
        click.echo(f"asking {cloud} about {', '.join(there)}", err=True)
        try:
            answers[cloud] = _asked(cloud, there, today)
        except RekindleError as error:
            errors[cloud] = error
    if not answers:
        raise _all(errors)
    changes = _write(home, answers, wanted)
    if as_json:
        document = PricesRefreshed(
            file=str(prices.refreshed_at(home)), answered=tuple(answers), changes=tuple(changes),
            errors=tuple(row for error in errors.values() for row in rows_of(error)),
        )  # fmt: skip
        answer(document)
        return 1 if errors else 0
    _tell(home, answers, changes)
    if errors:
        raise _all(errors, answered=True)
    return 0


def _refuse_options(context: click.Context) -> None:
    """Those of `prices` itself mean nothing to `refresh`, which has its own."""
    source = click.core.ParameterSource.COMMANDLINE
    for option in context.command.params:
        if option.name and context.get_parameter_source(option.name) == source:
            verb = context.invoked_subcommand
            raise click.UsageError(f"{option.opts[-1]} stands after `{verb}`", context)


def _places(
    clouds: Sequence[str], regions: Sequence[str], known: PriceBook
) -> dict[str, list[str]]:
    """Which regions to ask each cloud about: without any, those of the `known` prices."""
    found: dict[str, list[str]] = {cloud: [] for cloud in clouds or CLOUDS}
    for region in dict.fromkeys(regions):
        cloud = prices.cloud_of(region)
        if cloud not in found:
            asked = " or ".join(clouds) or "any cloud"
            fix = "such as us-east-1 (aws), us-central1 (gcp), eastus (azure)"
            raise RequestError(f"`{region}` is not a region of {asked}", where="--region", fix=fix)
        found[cloud].append(region)
    if not regions:
        for each in known.prices:
            cloud = machine(each.machine).cloud
            if cloud in found and each.region not in found[cloud]:
                found[cloud].append(each.region)
    if left := [cloud for cloud in clouds if not found[cloud]]:
        what = f"no region of {' or '.join(left)} is named"
        raise RequestError(what, where="--cloud", fix="--region")
    return {cloud: there for cloud, there in found.items() if there}


def _asked(cloud: str, regions: Sequence[str], today: datetime.date) -> list[Price]:
    """What the cloud says; PlatformError if it has no price for a region, or says it in no way that
    is known."""
    names = [each.name for each in machines().values() if each.cloud == cloud]
    try:
        if cloud == "gcp":
            found = of_google(names, regions, today, os.environ.get(KEY, ""))
        else:
            found = (of_aws if cloud == "aws" else of_azure)(names, regions, today)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f"the answer of {cloud} has another form: {type(error).__name__} {error}"
        raise PlatformError(what, where=cloud, fix="report it; known prices stay") from error
    if lacking := sorted(set(regions) - {each.region for each in found}):
        what = f"{cloud} has no price of a machine of the catalog in {', '.join(lacking)}"
        raise PlatformError(what, where=cloud, fix="leave the region out, or correct its name")
    return found


def _write(
    home: Path, answers: Mapping[str, list[Price]], wanted: Mapping[str, Sequence[str]]
) -> list[PriceChange]:
    """Puts the answers in place of what was refreshed before about the same regions."""
    path = prices.refreshed_at(home)
    before = prices.book(home)
    kept = [
        each for each in (prices.read_book([path]).prices if path.exists() else ())
        if each.region not in wanted.get(machine(each.machine).cloud, ())
        or machine(each.machine).cloud not in answers
    ]  # fmt: skip
    new = [price for told in answers.values() for price in told]
    write_atomically(path, prices.written(sorted([*kept, *new], key=_order)))
    return list(_changes(before, prices.book(home), wanted))


def _changes(
    before: PriceBook, after: PriceBook, wanted: Mapping[str, Sequence[str]]
) -> Iterator[PriceChange]:
    regions = {region for there in wanted.values() for region in there}
    old = {(each.machine, each.region): each for each in before.prices}
    new = {(each.machine, each.region): each for each in after.prices}
    for name, region in sorted({*old, *new}):
        was, now = _usd(old.get((name, region))), _usd(new.get((name, region)))
        if was != now and region in regions:
            yield PriceChange(
                machine=name, region=region, on_demand_before=was[0], on_demand=now[0],
                spot_before=was[1], spot=now[1],
            )  # fmt: skip


def _usd(price: Price | None) -> tuple[float | None, float | None]:
    return (price.on_demand_usd_per_hour, price.spot_usd_per_hour) if price else (None, None)


def _tell(home: Path, answers: Mapping[str, list[Price]], changes: Sequence[PriceChange]) -> None:
    for each in changes:
        demand = ("on demand", each.on_demand_before, each.on_demand)
        pairs = (demand, ("spot", each.spot_before, each.spot))
        told = [f"{kind} {_shown(was)} -> {_shown(now)}" for kind, was, now in pairs if was != now]
        click.echo(f"{each.machine} in {each.region}: {', '.join(told)}")
    of = ", ".join(f"{len(told)} of {cloud}" for cloud, told in answers.items())
    changed = f"{len(changes)} changed" if changes else "nothing changed"
    click.echo(f"{prices.refreshed_at(home)}: prices {of} ({changed})")


def _all(errors: Mapping[str, RekindleError], answered: bool = False) -> RekindleError:
    """The errors of all clouds as one: a wrong request where nothing was tried."""
    problems = [problem for error in errors.values() for problem in error.problems]
    wrong = not answered and all(isinstance(error, RequestError) for error in errors.values())
    return RequestError(problems) if wrong else PlatformError(problems)


def _settled(known: PriceBook) -> Iterator[Price]:
    """Each row as a plan finds it."""
    for each in known.prices:
        found = known.find(each.machine, each.region)
        assert found is not None
        yield found


def _is_wanted(each: Price, clouds: Sequence[str], regions: Sequence[str]) -> bool:
    cloud = machine(each.machine).cloud
    return (not clouds or cloud in clouds) and (not regions or each.region in regions)


def _order(each: Price) -> tuple[Any, ...]:
    """As the catalog has the machines, SageMaker's after EC2's."""
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
        click.echo(
            f"old: of more than {prices.OLD_DAYS} days ago; `rekindle prices refresh` asks the "
            "clouds", err=True,
        )  # fmt: skip


def _shown(usd: float | None) -> str:
    return "-" if usd is None else f"{usd:.4f}"
