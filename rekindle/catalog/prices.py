"""What a machine costs an hour. prices.yaml has what could be found, with its source and its day;
what `rekindle prices refresh` reads from the clouds, and the user's own files, override its rows.

Nothing is guessed: no row, no price. The one thing assumed is what SageMaker adds to EC2's price
where SageMaker's own is unknown (`factors` in the YAML); such a price says so."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rekindle.catalog.machines import Cloud, machine
from rekindle.catalog.nearest import unknown
from rekindle.catalog.tables import rows
from rekindle.errors import Problem, RequestError, SpecError
from rekindle.spec.yaml_document import Document, read_document

OLD_DAYS = 30
_REGIONS: Mapping[Cloud, str] = {
    "aws": r"[a-z]{2,3}(-[a-z]+){1,2}-\d+", "gcp": r"[a-z]+-[a-z]+\d+", "azure": r"[a-z]+\d*",
}  # fmt: skip
_SECTIONS = ("sources", "factors", "prices")
_KEYS = (
    "machine", "region", "on_demand", "spot", "source", "as_of", "spot_source", "spot_as_of",
)  # fmt: skip
_FACTOR_KEYS = ("machines", "factor", "source", "as_of")


@dataclasses.dataclass(frozen=True)
class Price:
    """A price; None is unknown, or not sold so: spot that is not below on-demand counts as none.

    Where spot was read elsewhere it has a source and a day of its own. `assumed` says what of it is
    not a list price, "" for nothing."""

    machine: str
    region: str
    on_demand_usd_per_hour: float | None
    spot_usd_per_hour: float | None
    source: str
    as_of: datetime.date
    spot_source: str = ""
    spot_as_of: datetime.date | None = None
    assumed: str = ""

    def __post_init__(self) -> None:
        spot, usual = self.spot_usd_per_hour, self.on_demand_usd_per_hour
        if spot is not None and usual is not None and spot >= usual:
            object.__setattr__(self, "spot_usd_per_hour", None)

    def age_days(self, today: datetime.date, *, spot: bool = False) -> int:
        """Days since the price, or the one of spot, was read at its source."""
        return (today - ((spot and self.spot_as_of) or self.as_of)).days

    def is_old(self, today: datetime.date, *, spot: bool = False) -> bool:
        """Whether it is to be marked: of more than 30 days ago, or of a day that has not come."""
        return not -1 <= self.age_days(today, spot=spot) <= OLD_DAYS


@dataclasses.dataclass(frozen=True)
class Factor:
    """What machines of SageMaker cost in terms of EC2's; `machines` is a regular expression."""

    machines: str
    factor: float
    source: str
    as_of: datetime.date


class PriceBook:
    """Prices by machine and region; `factors` in the order in which they count."""

    def __init__(self, prices: Iterable[Price], factors: Iterable[Factor] = ()) -> None:
        self._prices = {(each.machine, each.region): each for each in prices}
        self._factors = {each.machines: each for each in factors}

    @property
    def prices(self) -> tuple[Price, ...]:
        return tuple(self._prices.values())

    def find(self, machine: str, region: str) -> Price | None:
        """The price of the machine there, by the platform's own name for it. What the book lacks of
        `ml.p5.48xlarge` is calculated from the price of p5.48xlarge, and marked as assumed."""
        found = self._prices.get((machine, region))
        below = self._prices.get((machine.removeprefix("ml."), region))
        if found is below or below is None or (found and found.spot_usd_per_hour is not None):
            return found
        factor = next(
            (f for f in self._factors.values() if re.fullmatch(f.machines, machine)), None
        )
        return found if factor is None else _reckoned(machine, found, below, factor)

    def regions(self, machine: str) -> tuple[str, ...]:
        """Where there is a price of the machine, on demand or spot."""
        names = {machine, machine.removeprefix("ml.")}
        return tuple(sorted({region for name, region in self._prices if name in names}))

    def over(self, other: PriceBook) -> PriceBook:
        """`other` with the rows of this one in place of its own."""
        factors = {**self._factors, **other._factors, **self._factors}  # own ones count first
        return PriceBook((*other.prices, *self.prices), factors.values())


def book(home: Path | None = None, own: Sequence[Path] = ()) -> PriceBook:
    """What is known: the shipped rows, over them what was refreshed under `home`, over that the
    files `own`. RequestError, with file and line, for a file that is wrong."""
    refreshed = [path for path in (refreshed_at(home),) if path.exists()] if home else []
    return read_book([*refreshed, *own]).over(shipped())


def refreshed_at(home: Path) -> Path:
    """Where `rekindle prices refresh` writes."""
    return home / "prices.yaml"


@functools.cache
def shipped() -> PriceBook:
    """The rows that come with rekindle, of which a test knows that they are right."""
    values = rows(Path(__file__).with_suffix(".yaml"))
    return _Reader(Document(values, {})).book()


def read_book(paths: Iterable[Path]) -> PriceBook:
    """The rows of these files, a later one's in place of an earlier one's. RequestError with all
    that is wrong in the first wrong one."""
    found = PriceBook(())
    for path in paths:
        found = _Reader(read_document(path)).book().over(found)
    return found


def written(prices: Iterable[Price]) -> str:
    """The text of a file that `read_book` reads back as these prices."""
    lines = ["# written by `rekindle prices refresh`; overrides the prices that come with rekindle"]
    for each in prices:
        row = {
            "machine": each.machine, "region": each.region,
            "on_demand": each.on_demand_usd_per_hour, "spot": each.spot_usd_per_hour,
            "source": each.source, "as_of": each.as_of.isoformat(),
        }  # fmt: skip
        if each.spot_as_of is not None:
            row |= {"spot_source": each.spot_source, "spot_as_of": each.spot_as_of.isoformat()}
        lines.append(f"  - {json.dumps(row)}")  # JSON is YAML
    return "\n".join((lines[0], "prices:" if lines[1:] else "prices: []", *lines[1:])) + "\n"


def cloud_of(region: str) -> Cloud | None:
    """Whose region it is, by the form of its name."""
    return next((c for c, form in _REGIONS.items() if re.fullmatch(form, region)), None)


def _reckoned(name: str, found: Price | None, below: Price, factor: Factor) -> Price:
    """A price of SageMaker by EC2's: all of it, or spot only where the rest was `found`."""

    def times(usd: float | None) -> float | None:
        return None if usd is None else round(usd * factor.factor, 6)

    spot, how = times(below.spot_usd_per_hour), f"{factor.factor:g} times EC2's ({factor.source})"
    if found is None:
        usual = times(below.on_demand_usd_per_hour)
        return dataclasses.replace(
            below, machine=name, on_demand_usd_per_hour=usual, spot_usd_per_hour=spot, assumed=how
        )
    if spot is None:
        return found
    return dataclasses.replace(
        found, spot_usd_per_hour=spot, spot_source=below.spot_source or below.source,
        spot_as_of=below.spot_as_of or below.as_of, assumed=f"spot: {how}",
    )  # fmt: skip


class _Reader:
    """Makes prices of a document and gathers what is wrong with it."""

    def __init__(self, document: Document) -> None:
        self.values, self.lines = document.values, document.lines
        self.problems: list[Problem] = []

    def book(self) -> PriceBook:
        self._known(self.values, _SECTIONS, ())
        prices = [self._price(row, path) for row, path in self._rows("prices", _KEYS)]
        factors = [self._factor(row, path) for row, path in self._rows("factors", _FACTOR_KEYS)]
        if self.problems:
            raise SpecError(self.problems)
        return PriceBook([p for p in prices if p], [f for f in factors if f])

    def _rows(self, section: str, keys: Sequence[str]) -> Iterator[tuple[dict[str, Any], Any]]:
        given = self.values.get(section) or []
        if not isinstance(given, list):
            self._wrong(
                (section,), f"`{section}` is not a list", "one row a line, each with a dash"
            )
            return
        for index, row in enumerate(given):
            if not isinstance(row, dict):
                self._wrong((section, index), "a row is not a mapping", f"{{{keys[0]}: ...}}")
                continue
            self._known(row, keys, (section, index))
            yield row, (section, index)

    def _price(self, row: dict[str, Any], path: tuple[Any, ...]) -> Price | None:
        before = len(self.problems)
        name, region = self._text(row, path, "machine"), self._text(row, path, "region")
        usual, spot = self._usd(row, path, "on_demand"), self._usd(row, path, "spot")
        source, day = self._text(row, path, "source"), self._day(row, path, "as_of")
        where_spot, day_spot = row.get("spot_source"), None
        if "spot_as_of" in row or where_spot is not None:
            where_spot = self._text(row, path, "spot_source")
            day_spot = self._day(row, path, "spot_as_of")
        if name and region:
            self._place(name, region, path)
        if usual is None and spot is None:
            fix = "on_demand: or spot: in US dollars an hour"
            self._wrong(path, "the row has no price", fix)
        if len(self.problems) > before or day is None:
            return None
        return Price(name, region, usual, spot, source, day, where_spot or "", day_spot)

    def _factor(self, row: dict[str, Any], path: tuple[Any, ...]) -> Factor | None:
        before = len(self.problems)
        pattern, source = self._text(row, path, "machines"), self._text(row, path, "source")
        factor, day = self._usd(row, path, "factor"), self._day(row, path, "as_of")
        try:
            re.compile(pattern)
        except re.error as error:
            self._wrong((*path, "machines"), f"no regular expression: {error}", r"such as ml\.p5.*")
        if len(self.problems) > before or factor is None or day is None:
            return None
        return Factor(pattern, factor, source, day)

    def _place(self, name: str, region: str, path: tuple[Any, ...]) -> None:
        """Whether there is such a machine, and its cloud may have such a region."""
        try:
            cloud = machine(name).cloud
        except RequestError as error:
            self._wrong((*path, "machine"), error.problems[0].what, error.problems[0].fix)
            return
        if cloud != "local" and cloud_of(region) != cloud:
            self._wrong(
                (*path, "region"), f"`{region}` is not a region of {cloud}", "correct the name"
            )

    def _known(self, row: Mapping[str, Any], keys: Sequence[str], path: tuple[Any, ...]) -> None:
        for key in row:
            if key not in keys:
                error = unknown("field", key, keys).problems[0]
                self._wrong((*path, key), f"a file of prices has no `{key}`", error.fix)

    def _text(self, row: dict[str, Any], path: tuple[Any, ...], key: str) -> str:
        text = row.get(key)
        if isinstance(text, str) and text.strip():
            return " ".join(text.split())
        self._wrong((*path, key), f"the row has no `{key}`", f"{key}: as text")
        return ""

    def _usd(self, row: dict[str, Any], path: tuple[Any, ...], key: str) -> float | None:
        number = row.get(key)
        if number is None and key != "factor":
            return None
        is_number = not isinstance(number, bool) and isinstance(number, int | float)
        if is_number and math.isfinite(usd := float(number or 0)) and usd > 0:
            return usd
        self._wrong((*path, key), f"`{key}` is {number!r}", "a number above zero, or ~ for none")
        return None

    def _day(self, row: dict[str, Any], path: tuple[Any, ...], key: str) -> datetime.date | None:
        day = row.get(key)
        try:
            return day if isinstance(day, datetime.date) else datetime.date.fromisoformat(str(day))
        except ValueError:
            what = f"`{key}` is {day!r}" if day else f"the row has no `{key}`"
            self._wrong((*path, key), what, f"{key}: when it was read, such as 2026-11-23")
            return None

    def _wrong(self, path: tuple[Any, ...], what: str, fix: str) -> None:
        where = self.lines.get(path) or self.lines.get(path[:-1]) or ""
        self.problems.append(Problem(what, where, fix))
