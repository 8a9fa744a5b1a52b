"""What a machine costs an hour. prices.yaml has what could be found, with its source and
its day; a file of the same name in the home, and over it the user's other files, override
its rows.

Nothing is guessed: no row, no price. The one thing assumed is what SageMaker adds to
EC2's price where SageMaker's own is unknown (`factors` in the YAML); such a price says
so."""

import dataclasses
import datetime
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from rekindle.catalog.machines import Cloud, machine
from rekindle.errors import RequestError
from rekindle.spec.section import Section
from rekindle.spec.section_errors import checked
from rekindle.spec.yaml_document import Document, read_document
from rekindle.tables import rows

OLD_DAYS = 30
FILE = "prices.yaml"  # in a home: the prices that its plans use
# `us-gov-east-1`, `europe-west4`, `eastus2`: no two clouds name a region alike
_REGIONS: Mapping[Cloud, str] = {
    "aws": r"[a-z]{2,3}(-[a-z]+){1,2}-\d+",
    "gcp": r"[a-z]+-[a-z]+\d+",
    "azure": r"[a-z]+\d*",
}
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Usd = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclasses.dataclass(frozen=True)
class Price:
    """A price; None is unknown, or not sold so. Where spot was read elsewhere it has a
    source and a day of its own. `assumed` says what of it is not a list price."""

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
        spot = self.spot_usd_per_hour
        on_demand = self.on_demand_usd_per_hour
        # spot machines are reclaimed, so that nothing speaks for one that is not cheaper
        if spot is not None and on_demand is not None and spot >= on_demand:
            object.__setattr__(self, "spot_usd_per_hour", None)

    def age_days(self, today: datetime.date, *, spot: bool = False) -> int:
        """Days since the price, or the one of spot, was read at its source."""
        read_on = self.as_of
        if spot and self.spot_as_of:
            read_on = self.spot_as_of
        return (today - read_on).days

    def is_old(self, today: datetime.date, *, spot: bool = False) -> bool:
        """Whether it is to be marked: of more than 30 days ago,
        or of a day that has not come."""
        # in another time zone it may be tomorrow already
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
        # a machine that is wrong has an error of its own
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
        self._prices = {(price.machine, price.region): price for price in prices}
        self._factors = {factor.machines: factor for factor in factors}

    @property
    def prices(self) -> tuple[Price, ...]:
        return tuple(self._prices.values())

    def find(self, machine: str, region: str) -> Price | None:
        """The price of the machine there, by the platform's own name for it. What the
        book lacks of `ml.p5.48xlarge` is calculated from the price of p5.48xlarge, and
        marked as assumed."""
        own = self._prices.get((machine, region))
        ec2 = self._prices.get((machine.removeprefix("ml."), region))
        # the same row: the name is not one of SageMaker's
        if own is ec2 or ec2 is None:
            return own
        if own is not None and own.spot_usd_per_hour is not None:
            return own
        for factor in self._factors.values():
            if re.fullmatch(factor.machines, machine):
                return _sagemaker_price(machine, own, ec2, factor)
        return own

    def regions(self, machine: str) -> tuple[str, ...]:
        """Where there is a price of the machine, on demand or spot."""
        names = {machine, machine.removeprefix("ml.")}
        return tuple(sorted({region for name, region in self._prices if name in names}))

    def over(self, other: Self) -> Self:
        """`other` with the rows of this one in place of its own."""
        # a factor keeps its first place in a dict, and the first that matches counts: own
        # ones
        factors = {**self._factors, **other._factors, **self._factors}
        return type(self)((*other.prices, *self.prices), factors.values())


def book(home: Path | None = None, own: Sequence[Path] = ()) -> PriceBook:
    """What is known: the shipped rows, over them those of `prices.yaml` in `home`, over
    those the files `own`. RequestError, with file and line, for a file that is wrong."""
    paths = list(own)
    if home and (home / FILE).exists():
        paths.insert(0, home / FILE)
    return read_book(paths).over(shipped())


def per_day(machine: str, region: str, count: int) -> tuple[str, float | None]:
    """So many machines in words, and their US dollars a day on demand;
    None without a price."""
    machines = f"{count} x {machine}"
    price = book().find(machine, region)
    if price is None or price.on_demand_usd_per_hour is None:
        return machines, None
    return machines, 24 * price.on_demand_usd_per_hour * count


@functools.cache
def shipped() -> PriceBook:
    """The rows that come with rekindle, of which a test knows that they are right."""
    return _book(Document(rows(Path(__file__).with_suffix(".yaml")), {}), "prices.yaml")


def read_book(paths: Iterable[Path]) -> PriceBook:
    """The rows of these files, later ones in place of earlier;
    RequestError for a wrong file."""
    rows_so_far = PriceBook(())
    for path in paths:
        rows_so_far = _book(read_document(path), str(path)).over(rows_so_far)
    return rows_so_far


def cloud_of(region: str) -> Cloud | None:
    """Whose region it is, by the form of its name."""
    for cloud, pattern in _REGIONS.items():
        if re.fullmatch(pattern, region):
            return cloud
    return None


def _book(document: Document, origin: str) -> PriceBook:
    """The rows of a file of prices; RequestError for a wrong one,
    with its `origin` and line."""
    file = checked(_File, document.values, document.lines, origin)
    prices = [
        Price(
            machine=row.machine,
            region=row.region,
            on_demand_usd_per_hour=row.on_demand,
            spot_usd_per_hour=row.spot,
            source=row.source,
            as_of=row.as_of,
            spot_source=row.spot_source,
            spot_as_of=row.spot_as_of,
        )
        for row in file.prices
    ]
    return PriceBook(prices, file.factors)


def _sagemaker_price(machine: str, own: Price | None, ec2: Price, factor: Factor) -> Price:
    """A price of SageMaker by EC2's: all of it,
    or spot only where there is an `own` one."""

    def times(usd: float | None) -> float | None:
        return None if usd is None else round(usd * factor.factor, 6)

    spot = times(ec2.spot_usd_per_hour)
    basis = f"{factor.factor:g} times EC2's ({factor.source})"
    if own is None:
        return dataclasses.replace(
            ec2,
            machine=machine,
            on_demand_usd_per_hour=times(ec2.on_demand_usd_per_hour),
            spot_usd_per_hour=spot,
            assumed=basis,
        )
    if spot is None:
        return own
    return dataclasses.replace(
        own,
        spot_usd_per_hour=spot,
        spot_source=ec2.spot_source or ec2.source,
        spot_as_of=ec2.spot_as_of or ec2.as_of,
        assumed=f"spot: {basis}",
    )
