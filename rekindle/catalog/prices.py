"""What a machine costs an hour. prices.yaml has what could be found, with its source and its day;
a file of the same name in the home, and over it the user's other files, override its rows.

Nothing is guessed: no row, no price. The one thing assumed is what SageMaker adds to EC2's price
where SageMaker's own is unknown (`factors` in the YAML); such a price says so."""

import dataclasses
import datetime
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from rekindle.catalog.machines import Cloud, machine
from rekindle.errors import RequestError
from rekindle.spec.platforms import Section
from rekindle.spec.section_errors import checked
from rekindle.spec.yaml_document import Document, read_document
from rekindle.tables import rows

OLD_DAYS = 30
FILE = "prices.yaml"  # in a home: the prices that its plans use
_REGIONS: Mapping[Cloud, str] = {
    "aws": r"[a-z]{2,3}(-[a-z]+){1,2}-\d+",
    "gcp": r"[a-z]+-[a-z]+\d+",
    "azure": r"[a-z]+\d*",
}
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Usd = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True)
class Price:
    """A price; None is unknown, or not sold so. Where spot was read elsewhere it has a source and a
    day of its own. `assumed` says what of it is not a list price."""

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


class Factor(Section):
    """What machines of SageMaker cost in terms of EC2's."""

    machines: Text
    """A regular expression of their names, such as `ml\\.p5.*`."""
    factor: Usd
    """What EC2's price is multiplied by."""
    source: Text
    """Where it was read, or what it was calculated from."""
    as_of: datetime.date
    """The day when it was read."""

    @field_validator("machines")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return pattern


class _Row(Section):
    """A price as files have it."""

    machine: Text
    """The cloud's name of the machine."""
    region: Text
    """The cloud's name of the region."""
    on_demand: Usd | None = None
    """US dollars an hour, `~` where there is no price."""
    spot: Usd | None = None
    """US dollars an hour on spot, `~` where there is no price."""
    source: Text
    """Where it was read."""
    as_of: datetime.date
    """The day when it was read."""
    spot_source: Text = ""
    """Where the price of spot was read, if elsewhere."""
    spot_as_of: datetime.date | None = None
    """The day when the price of spot was read, if on another."""

    @field_validator("machine")
    @classmethod
    def _exists(cls, name: str) -> str:
        try:
            machine(name)
        except RequestError as error:
            raise ValueError(f"{error.problems[0].what}, {error.problems[0].fix}") from None
        return name

    @field_validator("region")
    @classmethod
    def _has_its_form(cls, region: str, info: ValidationInfo) -> str:
        name = info.data.get("machine")
        cloud = machine(name).cloud if name else "local"
        if cloud not in ("local", cloud_of(region)):
            raise ValueError(f"`{region}` is not a region of {cloud}")
        return region

    @model_validator(mode="after")
    def _says_all(self) -> Self:
        if self.on_demand is None and self.spot is None:
            raise ValueError("the row has no price; give it `on_demand` or `spot`")
        if bool(self.spot_source) != (self.spot_as_of is not None):
            raise ValueError("`spot_source` and `spot_as_of` belong together")
        return self


class _File(Section):
    sources: Mapping[str, Any] = Field(default_factory=dict)
    """Anchors for YAML's aliases."""
    factors: tuple[Factor, ...] = ()
    """What machines of SageMaker cost in terms of EC2's."""
    prices: tuple[_Row, ...] = ()
    """One row a line, each with a dash."""


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
        for factor in self._factors.values():
            if re.fullmatch(factor.machines, machine):
                return _reckoned(machine, found, below, factor)
        return found

    def regions(self, machine: str) -> tuple[str, ...]:
        """Where there is a price of the machine, on demand or spot."""
        names = {machine, machine.removeprefix("ml.")}
        return tuple(sorted({region for name, region in self._prices if name in names}))

    def over(self, other: Self) -> Self:
        """`other` with the rows of this one in place of its own."""
        factors = {**self._factors, **other._factors, **self._factors}  # own ones count first
        return type(self)((*other.prices, *self.prices), factors.values())


def book(home: Path | None = None, own: Sequence[Path] = ()) -> PriceBook:
    """What is known: the shipped rows, over them those of `prices.yaml` in `home`, over those the
    files `own`. RequestError, with file and line, for a file that is wrong."""
    in_home = [home / FILE] if home and (home / FILE).exists() else []
    return read_book([*in_home, *own]).over(shipped())


def per_day(machine: str, region: str, count: int) -> tuple[str, float | None]:
    """So many machines in words, and their US dollars a day on demand; None without a price."""
    price = book().find(machine, region)
    usd = price.on_demand_usd_per_hour if price else None
    return f"{count} x {machine}", None if usd is None else 24 * usd * count


@functools.cache
def shipped() -> PriceBook:
    """The rows that come with rekindle, of which a test knows that they are right."""
    return _book(Document(rows(Path(__file__).with_suffix(".yaml")), {}), "prices.yaml")


def read_book(paths: Iterable[Path]) -> PriceBook:
    """The rows of these files, later ones in place of earlier; RequestError for a wrong file."""
    found = PriceBook(())
    for path in paths:
        found = _book(read_document(path), str(path)).over(found)
    return found


def cloud_of(region: str) -> Cloud | None:
    """Whose region it is, by the form of its name."""
    return next((c for c, form in _REGIONS.items() if re.fullmatch(form, region)), None)


def _book(document: Document, origin: str) -> PriceBook:
    file = checked(_File, document.values, document.lines, origin)
    prices = (
        Price(
            r.machine, r.region, r.on_demand, r.spot, r.source, r.as_of, r.spot_source, r.spot_as_of
        )
        for r in file.prices
    )
    return PriceBook(prices, file.factors)


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
        found,
        spot_usd_per_hour=spot,
        spot_source=below.spot_source or below.source,
        spot_as_of=below.spot_as_of or below.as_of,
        assumed=f"spot: {how}",
    )
