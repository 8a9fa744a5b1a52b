"""Which clouds are asked about which regions, and what of their answers is written.

The rows of a cloud that answers replace those of the same regions in the file; a cloud that does
not answer leaves its rows as they are. Exit codes are those of rekindle: 0 all answered, 1 some did
not, 2 the request is wrong and nothing was written."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rekindle.app.runs import DEFAULT_HOME
from rekindle.catalog import prices
from rekindle.catalog.machines import machine, machines
from rekindle.catalog.prices import Price, PriceBook
from rekindle.cli.main import report_errors
from rekindle.errors import PlatformError, RekindleError, RequestError, fix_of
from rekindle.records import write_atomically
from tools.prices import aws, azure, google

ASK = {"aws": aws.ask, "gcp": google.ask, "azure": azure.ask}
_EXPLAINED = """\
Ask the clouds for the prices of the machines in the catalog, in the regions of the known prices or
in --region. AWS needs a login, Google a key in GOOGLE_API_KEY, Azure nothing. If a cloud does not
answer, its old prices stay."""


def main(words: Sequence[str]) -> int:
    """Ask, write the file and print what changed; returns the exit code."""
    asked = _options().parse_args(words)
    try:
        return refresh(asked.output, asked.cloud, asked.region)
    except RekindleError as error:
        report_errors(error, as_json=False)
        return error.exit_code
    except OSError as error:
        what, where = error.strerror or str(error), str(error.filename or "")
        report_errors(RekindleError(what, where=where, fix=fix_of(error)), as_json=False)
        return 1


def _options() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m tools.prices", description=_EXPLAINED)
    found.add_argument(
        "--cloud", action="append", default=[], choices=ASK, help="only this cloud; repeatable"
    )
    found.add_argument("--region", action="append", default=[], help="only this region; repeatable")
    home = Path(os.environ.get("REKINDLE_HOME") or DEFAULT_HOME)
    found.add_argument(
        "-o",
        "--output",
        type=Path,
        default=home / prices.FILE,
        metavar="FILE",
        help="the file to write, which --prices takes (%(default)s, which is read without it)",
    )
    return found


def refresh(path: Path, clouds: Sequence[str], regions: Sequence[str]) -> int:
    """Put what the clouds answer into the file `path`; returns the exit code. RequestError or
    PlatformError where no cloud answers: nothing is written."""
    wanted = _places(clouds, regions, _known(path))
    today = datetime.datetime.now(datetime.UTC).date()
    answers, errors = dict[str, list[Price]](), dict[str, RekindleError]()
    for cloud, there in wanted.items():
        print(f"asking {cloud} about {', '.join(there)}", file=sys.stderr)
        try:
            answers[cloud] = _asked(cloud, there, today)
        except RekindleError as error:
            errors[cloud] = error
    if not answers:
        raise _all(errors)
    changes = list(_write(path, answers, wanted))
    of = ", ".join(f"{len(told)} of {cloud}" for cloud, told in answers.items())
    changed = f"{len(changes)} changed" if changes else "nothing changed"
    print(*changes, f"{path}: prices {of} ({changed})", sep="\n")
    if errors:
        raise _all(errors, answered=True)
    return 0


def written(found: Iterable[Price]) -> str:
    """The text of a file that `read_book` reads back as these prices."""
    lines = ["# written by `python -m tools.prices`; overrides the prices that come with rekindle"]
    for each in found:
        row = {
            "machine": each.machine,
            "region": each.region,
            "on_demand": each.on_demand_usd_per_hour,
            "spot": each.spot_usd_per_hour,
            "source": each.source,
            "as_of": each.as_of.isoformat(),
        }
        if each.spot_as_of is not None:
            row |= {"spot_source": each.spot_source, "spot_as_of": each.spot_as_of.isoformat()}
        lines.append(f"  - {json.dumps(row)}")  # JSON is YAML
    return "\n".join((lines[0], "prices:" if lines[1:] else "prices: []", *lines[1:])) + "\n"


def _known(path: Path) -> PriceBook:
    """The shipped prices, and over them those that the file has already."""
    return prices.book(own=[path] if path.exists() else [])


def _places(
    clouds: Sequence[str], regions: Sequence[str], known: PriceBook
) -> dict[str, list[str]]:
    """Which regions to ask each cloud about: without any, those of the `known` prices."""
    found: dict[str, list[str]] = {cloud: [] for cloud in clouds or ASK}
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
        found = ASK[cloud](names, regions, today)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        what = f"the answer of {cloud} has another form: {type(error).__name__} {error}"
        raise PlatformError(what, where=cloud, fix="report it; known prices stay") from error
    if lacking := sorted(set(regions) - {each.region for each in found}):
        what = f"{cloud} has no price of a machine of the catalog in {', '.join(lacking)}"
        raise PlatformError(what, where=cloud, fix="leave the region out, or correct its name")
    return found


def _write(
    path: Path, answers: Mapping[str, list[Price]], wanted: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Puts the answers in place of the file's rows about the same regions; yields the changes."""
    before = _known(path)
    kept = [
        each
        for each in (prices.read_book([path]).prices if path.exists() else ())
        if each.region not in wanted.get(machine(each.machine).cloud, ())
        or machine(each.machine).cloud not in answers
    ]
    new = [price for told in answers.values() for price in told]
    write_atomically(path, written(sorted([*kept, *new], key=order)))
    return _changes(before, _known(path), wanted)


def _changes(
    before: PriceBook, after: PriceBook, wanted: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """A line for each machine and region whose price is another now."""
    regions = {region for there in wanted.values() for region in there}
    old = {(each.machine, each.region): each for each in before.prices}
    new = {(each.machine, each.region): each for each in after.prices}
    for name, region in sorted({*old, *new}):
        was, now = _shown(old.get((name, region))), _shown(new.get((name, region)))
        changed = [f"{kind} {was[kind]} -> {now[kind]}" for kind in was if was[kind] != now[kind]]
        if changed and region in regions:
            yield f"{name} in {region}: {', '.join(changed)}"


def _shown(price: Price | None) -> dict[str, str]:
    """US dollars an hour by kind; a dash where there is none."""
    demand = price.on_demand_usd_per_hour if price else None
    spot = price.spot_usd_per_hour if price else None
    kinds = {"on demand": demand, "spot": spot}
    return {kind: "-" if usd is None else f"{usd:.4f}" for kind, usd in kinds.items()}


def _all(errors: Mapping[str, RekindleError], answered: bool = False) -> RekindleError:
    """The errors of all clouds as one: a wrong request where nothing was tried."""
    problems = [problem for error in errors.values() for problem in error.problems]
    wrong = not answered and all(isinstance(error, RequestError) for error in errors.values())
    return RequestError(problems) if wrong else PlatformError(problems)


def order(each: Price) -> tuple[object, ...]:
    """What sorts prices: as the catalog has the machines, SageMaker's after EC2's."""
    names = {name: i for i, name in enumerate(machines())}
    name = each.machine.removeprefix("ml.")
    return machine(name).cloud, name != each.machine, names[name], each.region
