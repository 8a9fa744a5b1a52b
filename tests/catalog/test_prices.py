"""The book of prices: what each row must say, what overrides what, and what nobody knows."""

from __future__ import annotations

import datetime
import itertools
import re
from pathlib import Path

import pytest
import yaml

from rekindle.catalog import prices as module
from rekindle.catalog.machines import machine
from rekindle.catalog.prices import Price, PriceBook, book, cloud_of, read_book, shipped
from rekindle.errors import RequestError, SpecError

DAY = datetime.date(2026, 11, 23)
ROWS = yaml.safe_load(Path(module.__file__).with_suffix(".yaml").read_text())


def price(name: str, region: str, usual: float | None, spot: float | None = None) -> Price:
    return Price(name, region, usual, spot, "a test", DAY)


def file(folder: Path, text: str, name: str = "own.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "row", ROWS["prices"] + ROWS["factors"], ids=lambda row: row.get("machine") or row["machines"]
)
def test_every_row_has_a_source_and_a_day(row: dict[str, object]) -> None:
    assert len(str(row["source"])) > 10
    assert isinstance(row["as_of"], datetime.date)
    assert datetime.date(2024, 11, 1) <= row["as_of"] <= datetime.date.today()
    assert ("spot_source" in row) == ("spot_as_of" in row)


def test_every_source_is_used_and_no_row_stands_twice() -> None:
    used = {row.get(key) for row in ROWS["prices"] for key in ("source", "spot_source")}
    assert used - {None} == set(ROWS["sources"].values())
    places = [(row["machine"], row["region"]) for row in ROWS["prices"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("each", shipped().prices, ids=lambda p: f"{p.machine} {p.region}")
def test_a_price_is_of_a_machine_in_a_region_of_its_cloud(each: Price) -> None:
    assert machine(each.machine).cloud == cloud_of(each.region)
    usual, spot = each.on_demand_usd_per_hour, each.spot_usd_per_hour
    assert usual or spot
    assert spot is None or usual is None or 0.1 * usual < spot < usual


def test_more_costs_more() -> None:
    """A slip of a digit shows: in a family, more CPUs and no fewer GPUs cost more."""
    rows = [p for p in shipped().prices if p.on_demand_usd_per_hour]
    families = re.compile(r"(ml\.)?([a-z]+\d[a-z0-9]*)[.-]")
    of = {p: found[0] for p in rows if (found := families.match(p.machine))}
    compared = 0
    for small, large in itertools.permutations(of, 2):
        less, more = machine(small.machine), machine(large.machine)
        if of[small] != of[large] or small.region != large.region or less.gpus > more.gpus:
            continue
        if less.vcpus and more.vcpus and less.vcpus < more.vcpus and less.gpu == more.gpu:
            compared += 1
            assert (small.on_demand_usd_per_hour or 0) < (large.on_demand_usd_per_hour or 0)
    assert compared > 150


# What H100 machines cost, read a second time, where it could be elsewhere than the row says.
# p5: two public tables of EC2's prices have 6.88 for p5.4xlarge, and eight times that. ml.p5: another
# project's table of SageMaker's prices has 63.296, 1.15 times that. ND96isr_H100_v5: rows of the
# Retail Prices API in another project's tests (Linux 98.32, spot 18.169536; Windows 102.736). NC40ads
# and NC80adis in eastus: a note of the API's prices (6.98, 13.96). a3-highgpu-8g: a note has 11.0613
# a GPU with local SSDs, 0.08 more. The others are typed in again from notes of the row's own source.
SECOND_READING = {
    ("p5.4xlarge", "us-east-1"): (6.88, None),
    ("p5.4xlarge", "us-east-2"): (6.88, None),
    ("p5.4xlarge", "us-west-2"): (6.88, None),
    ("p5.48xlarge", "us-east-1"): (8 * 6.88, 14.8686),
    ("p5.48xlarge", "us-east-2"): (8 * 6.88, 15.5483),
    ("p5.48xlarge", "us-west-2"): (8 * 6.88, 21.7228),
    ("ml.p5.4xlarge", "us-east-1"): (1.15 * 6.88, None),
    ("ml.p5.48xlarge", "us-east-1"): (1.15 * 8 * 6.88, 1.15 * 14.8686),
    ("a3-highgpu-1g", "us-central1"): (None, 6.571),
    ("a3-highgpu-8g", "us-central1"): (8 * 10.9791, 8 * 6.571),
    ("Standard_NC40ads_H100_v5", "eastus"): (6.98, None),
    ("Standard_NC80adis_H100_v5", "eastus"): (2 * 6.98, None),
    ("Standard_NC40ads_H100_v5", "westeurope"): (9.08, None),
    ("Standard_NC80adis_H100_v5", "westeurope"): (2 * 9.08, None),
    ("Standard_ND96isr_H100_v5", "eastus"): (98.32, 18.169536),
    ("Standard_ND96isr_H100_v5", "westeurope"): (1.3 * 98.32, None),
    ("Standard_ND96isr_H100_v5", "westus3"): (98.32, None),
}


def test_a_second_reading_of_what_h100_machines_cost() -> None:
    of_h100 = {
        (p.machine, p.region): p
        for p in shipped().prices
        if (machine(p.machine).gpu or "").startswith("H100")
    }
    assert set(of_h100) == set(SECOND_READING)
    for place, (usual, spot) in SECOND_READING.items():
        found = shipped().find(*place)
        assert found is not None
        assert found.on_demand_usd_per_hour == (usual and pytest.approx(usual, rel=1e-4)), place
        assert found.spot_usd_per_hour == (spot and pytest.approx(spot, rel=1e-4)), place


def test_there_is_no_price_of_what_nobody_could_confirm() -> None:
    assert shipped().find("p5.48xlarge", "eu-west-3") is None
    assert shipped().find("a3-megagpu-8g", "us-central1") is None
    a4 = shipped().find("a4-highgpu-8g", "us-central1")
    assert a4 is not None
    assert a4.on_demand_usd_per_hour is None
    assert a4.spot_usd_per_hour == 39.63


@pytest.mark.parametrize(
    ("days", "is_old"), [(0, False), (30, False), (31, True), (400, True), (-1, False), (-2, True)]
)
def test_a_price_of_more_than_thirty_days_ago_is_old_and_so_is_one_of_the_future(
    days: int, is_old: bool
) -> None:
    each = price("p5.48xlarge", "us-east-1", 1.0)
    today = DAY + datetime.timedelta(days=days)
    assert each.age_days(today) == days
    assert each.is_old(today) is is_old


def test_spot_that_was_read_elsewhere_has_an_age_of_its_own() -> None:
    early = DAY - datetime.timedelta(days=40)
    each = Price("g5.xlarge", "us-east-1", 2.0, 1.0, "a", DAY, "b", early)
    assert (each.age_days(DAY), each.age_days(DAY, spot=True)) == (0, 40)
    assert not each.is_old(DAY)
    assert each.is_old(DAY, spot=True)
    assert not price("g5.xlarge", "us-east-1", 2.0, 1.0).is_old(DAY, spot=True)


@pytest.mark.parametrize(
    ("usual", "spot", "shown"),
    [(2.0, 1.9, 1.9), (2.0, 2.0, None), (2.0, 3.0, None), (None, 3.0, 3.0), (2.0, None, None)],
)
def test_spot_that_is_not_below_on_demand_is_none(
    usual: float | None, spot: float | None, shown: float | None
) -> None:
    assert price("g5.xlarge", "us-east-1", usual, spot).spot_usd_per_hour == shown


def test_a_later_file_overrides_an_earlier_row_and_leaves_the_others(tmp_path: Path) -> None:
    row = (
        "{{machine: {}, region: us-east-1, on_demand: {}, source: our contract, as_of: 2026-11-01}}"
    )
    first = file(
        tmp_path,
        f"prices:\n- {row.format('p5.48xlarge', 40)}\n- {row.format('g5.xlarge', 3)}\n",
        "1.yaml",
    )
    second = file(tmp_path, f"prices: [{row.format('p5.48xlarge', '20_0e-1')}]\n", "2.yaml")
    known = read_book([first, second])
    assert [(p.machine, p.on_demand_usd_per_hour) for p in known.prices] == [
        ("p5.48xlarge", 20.0),
        ("g5.xlarge", 3.0),
    ]
    both = book(own=[first, second])
    found = both.find("p5.48xlarge", "us-east-1")
    assert found == Price(
        "p5.48xlarge", "us-east-1", 20.0, None, "our contract", datetime.date(2026, 11, 1)
    )  # whole: the spot price that is shipped is of another on-demand price
    assert both.find("p5.48xlarge", "us-west-2") == shipped().find("p5.48xlarge", "us-west-2")
    assert read_book([]).prices == ()


def test_prices_of_the_home_stand_below_ones_own_and_above_what_is_shipped(tmp_path: Path) -> None:
    row = "{{machine: {}, region: us-east-1, on_demand: {}, source: ours, as_of: 2026-11-02}}"
    rows = ", ".join((row.format("g5.xlarge", 9), row.format("g6.xlarge", 8)))
    file(tmp_path, f"prices: [{rows}]", "prices.yaml")
    known = book(tmp_path, [file(tmp_path, f"prices: [{row.format('g6.xlarge', 7)}]")])
    shown = {
        name: known.find(name, "us-east-1") for name in ("g5.xlarge", "g6.xlarge", "g6e.xlarge")
    }
    assert [p and p.on_demand_usd_per_hour for p in shown.values()] == [9.0, 7.0, 1.861]
    assert book(tmp_path / "elsewhere").prices == shipped().prices


def test_sagemaker_without_a_price_is_reckoned_from_ec2_and_says_so() -> None:
    known = PriceBook([price("p5en.48xlarge", "us-east-2", 60.0, 20.0)]).over(
        PriceBook((), shipped()._factors.values())
    )
    found = known.find("ml.p5en.48xlarge", "us-east-2")
    assert found is not None
    assert found.machine == "ml.p5en.48xlarge"
    assert found.on_demand_usd_per_hour == pytest.approx(69.0)
    assert found.spot_usd_per_hour == pytest.approx(23.0)
    assert found.assumed.startswith("1.15 times EC2's (ours:")
    assert found.source == "a test"
    assert known.regions("ml.p5en.48xlarge") == ("us-east-2",)
    assert known.find("ml.p5en.48xlarge", "us-east-1") is None
    assert PriceBook(known.prices).find("ml.p5en.48xlarge", "us-east-2") is None  # no factor


def test_sagemakers_own_price_counts_and_only_its_spot_is_reckoned() -> None:
    found = shipped().find("ml.p5.48xlarge", "us-east-1")
    below = shipped().find("p5.48xlarge", "us-east-1")
    assert found is not None
    assert below is not None
    assert found.on_demand_usd_per_hour == 63.296
    assert found.assumed.startswith("spot: 1.15 times EC2's")
    assert (found.spot_source, found.spot_as_of) == (below.spot_source, below.spot_as_of)
    own = PriceBook([price("ml.p5.48xlarge", "us-east-1", 63.0, 30.0)]).over(shipped())
    assert own.find("ml.p5.48xlarge", "us-east-1") == price(
        "ml.p5.48xlarge", "us-east-1", 63.0, 30.0
    )


def test_a_factor_can_be_overridden(tmp_path: Path) -> None:
    own = file(
        tmp_path,
        r"factors: [{machines: 'ml\.p5en\..*', factor: 2, source: ours, as_of: 2026-11-01}]",
    )
    found = book(own=[own]).find("ml.p5en.48xlarge", "us-east-1")
    assert found is not None
    assert found.on_demand_usd_per_hour == 2 * 63.296
    other = book(own=[own]).find("ml.p6-b200.48xlarge", "us-east-1")
    assert other is not None
    assert other.assumed.startswith("1.15")


@pytest.mark.parametrize(
    ("region", "cloud"),
    [
        ("us-east-1", "aws"),
        ("eu-central-1", "aws"),
        ("us-gov-west-1", "aws"),
        ("us-central1", "gcp"),
        ("northamerica-northeast1", "gcp"),
        ("me-west1", "gcp"),
        ("eastus", "azure"),
        ("westus3", "azure"),
        ("swedencentral", "azure"),
        ("US East", None),
        ("", None),
    ],
)
def test_a_region_says_whose_it_is(region: str, cloud: str | None) -> None:
    assert cloud_of(region) == cloud


GOOD = "machine: p5.48xlarge, region: us-east-1, on_demand: 1, source: ours, as_of: 2026-11-01"


@pytest.mark.parametrize(
    ("row", "what", "fix"),
    [
        (
            GOOD.replace("p5.48", "p5.84"),
            "machine: the catalog has no machine `p5.84xlarge`, such as ",
            "name of the machine",
        ),
        (
            GOOD.replace("us-east-1", "us-east1"),
            "region: `us-east1` is not a region of aws",
            "name of the region",
        ),
        (
            GOOD.replace("on_demand", "ondemand"),
            "ondemand: unknown key",
            "did you mean `on_demand`?",
        ),
        (
            GOOD.replace("on_demand: 1,", ""),
            "the row has no price; give it `on_demand` or `spot`",
            "a line",
        ),
        (
            GOOD.replace(": 1,", ": -1,"),
            "on_demand: should be greater than 0, not -1",
            "a number above 0: US dollars an hour",
        ),
        (
            GOOD.replace(": 1,", ": 0,"),
            "on_demand: should be greater than 0, not 0",
            "a number above 0",
        ),
        (
            GOOD.replace(": 1,", ": '1',"),
            "on_demand: should be a valid number, not '1'",
            "a number",
        ),
        (
            GOOD.replace(": 1,", ": true,"),
            "on_demand: should be a valid number, not True",
            "a number",
        ),
        (
            GOOD.replace(": 1,", ": .nan,"),
            "on_demand: should be a finite number, not nan",
            "a number",
        ),
        (
            GOOD.replace(": 1,", ": .inf,"),
            "on_demand: should be a finite number, not inf",
            "a number",
        ),
        (GOOD.replace("source: ours, ", ""), "source: is missing", "add `source:`"),
        (
            GOOD.replace("ours", "' '"),
            "source: should have at least 1 character",
            "write text: Where it was read",
        ),
        (GOOD.replace(", as_of: 2026-11-01", ""), "as_of: is missing", "add `as_of:`"),
        (
            GOOD.replace("2026-11-01", "yesterday"),
            "as_of: should be a valid date",
            "write a date, such as 2026-11-23",
        ),
        (
            GOOD.replace("2026-11-01", "2026-02-30"),
            "as_of: should be a valid date",
            "such as 2026-11-23",
        ),
        (
            GOOD + ", spot_as_of: 2026-11-01",
            "`spot_source` and `spot_as_of` belong together",
            "a line",
        ),
        (GOOD + ", spot_source: there", "`spot_source` and `spot_as_of` belong together", "a line"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(
    tmp_path: Path, row: str, what: str, fix: str
) -> None:
    path = file(tmp_path, f"prices:\n  - {{{GOOD}}}\n  - {{{row}}}\n")
    with pytest.raises(RequestError) as refused:
        read_book([path])
    problems = refused.value.problems
    assert any(what in p.what and fix in p.fix for p in problems), problems
    assert {p.where for p in problems} == {f"{path}:3"}


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    text = "pricess: []\nprices:\n  - machine: x\n    region: us-east-1\n  - 7\nfactors: {}\n"
    with pytest.raises(SpecError) as refused:
        read_book([file(tmp_path, text)])
    told = [(p.what, p.where.rpartition(":")[2]) for p in refused.value.problems]
    assert ("pricess: unknown key", "1") in told
    assert any(
        "prices.0.machine: the catalog has no machine `x`" in what and line == "3"
        for what, line in told
    )
    assert ("prices.0.source: is missing", "3") in told
    assert any("prices.1: should be" in what and line == "5" for what, line in told)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("prices: 7", "prices: should be a valid array, not 7"),
        (
            r"factors: [{machines: '(', factor: 1, source: a, as_of: 2026-11-01}]",
            "no regular expression",
        ),
        (
            r"factors: [{machines: 'ml.*', factor: ~, source: a, as_of: 2026-11-01}]",
            "factors.0.factor: should be a valid number",
        ),
        ("prices: [", "not valid YAML"),
        ("- 1", "a config is a mapping"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(RequestError, match=re.escape(what)):
        read_book([file(tmp_path, text)])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="file not found"):
        read_book([tmp_path / "none.yaml"])
