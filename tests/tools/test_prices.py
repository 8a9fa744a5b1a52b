"""`python -m tools.prices`: what the clouds say now, asked for real over TLS of clouds that are
played here."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.catalog.prices import Price, book, read_book, shipped
from tests.quick import first
from tests.servers.cloud_prices import HOSTS, KEY, Market, item, product, sku
from tests.servers.tls_hosts import Hosts
from tests.servers.troubles import SILENCE, Fault
from tools.prices import pages
from tools.prices.refresh import main, written

ROOT = Path(__file__).parents[2]
NOW, BEFORE = "2026-11-22T08:00:00.000Z", "2026-11-21T08:00:00.000Z"
A3 = {  # a3-highgpu-8g: 208 CPUs, 1872 GiB, 8 GPUs
    "A3 Instance Core": 0.03,
    "A3 Instance Ram": 0.002,
    "Nvidia H100 80GB GPU": 9.0,
    "Spot Preemptible A3 Instance Core": 0.01,
    "Spot Preemptible A3 Instance Ram": 0.001,
    "Nvidia H100 80GB GPU attached to Spot Preemptible VMs": 5.0,
}
A3_USUAL, A3_SPOT = 208 * 0.03 + 1872 * 0.002 + 72, 208 * 0.01 + 1872 * 0.001 + 40


def today() -> datetime.date:
    """Now, and not when this module was imported: tests may run past midnight."""
    return datetime.datetime.now(datetime.UTC).date()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("tls"), HOSTS, lambda asked: Market().answer(asked)) as made:
        yield made


@pytest.fixture
def market(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Market]:
    """What each cloud sells in a region, found by this process as it would find the clouds, by
    somebody with credentials for all."""
    from botocore.retries.standard import ExponentialBackoff

    sold = Market(
        ec2={("p5.48xlarge", "us-east-1"): 50.0, ("g6.xlarge", "us-east-1"): 0.8},
        training={("ml.p5.48xlarge", "us-east-1"): 60.0, ("ml.g6.xlarge", "us-east-1"): 1.1},
        spot=[
            ("p5.48xlarge", "us-east-1a", 20.0, NOW),
            ("p5.48xlarge", "us-east-1b", 30.0, NOW),
            ("p5.48xlarge", "us-east-1c", 25.0, NOW),
            ("p5.48xlarge", "us-east-1c", 12.0, BEFORE),
        ],
        parts={(name, "us-central1"): usd for name, usd in A3.items()},
        azure={("Standard_ND96isr_H100_v5", "eastus"): (90.0, 20.0)},
    )
    hosts.answer = sold.answer
    monkeypatch.chdir(tmp_path)
    for name, value in hosts.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(hosts.folder / "ca.pem"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody-at-all")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("GOOGLE_API_KEY", KEY)
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.0)
    monkeypatch.setattr(pages, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    yield sold
    assert hosts.strangers == []


HOME = Path(".rekindle")
REGIONS = ("--region", "us-east-1", "--region", "us-central1", "--region", "eastus")


def refresh(*words: str) -> int:
    """The exit code, also of words that argparse refuses."""
    try:
        return main(words or REGIONS)
    except SystemExit as error:
        return int(error.code or 0)


def told() -> dict[tuple[str, str], tuple[float | None, float | None]]:
    """What the refreshed file has."""
    return {
        (p.machine, p.region): (p.on_demand_usd_per_hour, p.spot_usd_per_hour)
        for p in read_book([HOME / "prices.yaml"]).prices
    }


def test_the_clouds_are_asked_and_what_they_say_counts(
    market: Market, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refresh() == 0
    assert told() == {
        ("g6.xlarge", "us-east-1"): (0.8, None),
        ("p5.48xlarge", "us-east-1"): (50.0, 25.0),
        ("ml.g6.xlarge", "us-east-1"): (1.1, None),
        ("ml.p5.48xlarge", "us-east-1"): (60.0, None),
        ("a3-highgpu-8g", "us-central1"): (pytest.approx(A3_USUAL), pytest.approx(A3_SPOT)),
        # by the part, but these sizes are sold as spot only
        **{
            (f"a3-highgpu-{n}g", "us-central1"): (None, pytest.approx(A3_SPOT * n / 8))
            for n in (1, 2, 4)
        },
        ("Standard_ND96isr_H100_v5", "eastus"): (90.0, 20.0),
    }
    known = book(HOME)
    found = known.find("p5.48xlarge", "us-east-1")
    assert found is not None
    assert (found.source, found.as_of, found.spot_as_of) == ("Price List API", today(), today())
    assert not found.is_old(today())
    reckoned = known.find("ml.p5.48xlarge", "us-east-1")
    assert reckoned is not None
    assert reckoned.spot_usd_per_hour == pytest.approx(25 * 1.15)
    assert known.find("g5.xlarge", "us-east-1") == shipped().find("g5.xlarge", "us-east-1")
    lines = capsys.readouterr().out.splitlines()
    assert (
        "p5.48xlarge in us-east-1: on demand 55.0400 -> 50.0000, spot 14.8686 -> 25.0000" in lines
    )
    assert "g6.xlarge in us-east-1: on demand 0.8048 -> 0.8000" in lines
    assert "a3-highgpu-2g in us-central1: spot - -> " in "\n".join(lines)
    assert lines[-1] == f"{HOME}/prices.yaml: prices 4 of aws, 4 of gcp, 1 of azure (9 changed)"
    assert market.refused == []
    assert min(market.calls.values()) > 1  # all have more than a page


def test_the_same_again_changes_nothing(market: Market, capsys: pytest.CaptureFixture[str]) -> None:
    assert refresh() == 0
    first = (HOME / "prices.yaml").read_text()
    capsys.readouterr()
    assert refresh() == 0
    assert (HOME / "prices.yaml").read_text() == first
    assert capsys.readouterr().out.splitlines() == [
        f"{HOME}/prices.yaml: prices 4 of aws, 4 of gcp, 1 of azure (nothing changed)"
    ]
    assert [path.name for path in HOME.iterdir()] == ["prices.yaml"]


@pytest.mark.slow
def test_it_is_a_command_whose_file_the_verbs_take(market: Market, tmp_path: Path) -> None:
    market.faults += [Fault("azure", 400, "BadRequest")]
    own = tmp_path / "own.yaml"
    words = [sys.executable, "-m", "tools.prices", *REGIONS, "-o", str(own)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True, capture_output=True
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == f"{own}: prices 4 of aws, 4 of gcp (8 changed)"
    assert "where: https://prices.azure.com/api/retail/prices" in done.stderr
    assert not HOME.exists()
    found = book(own=[own]).find("p5.48xlarge", "us-east-1")
    assert found is not None
    assert (found.on_demand_usd_per_hour, found.source) == (50.0, "Price List API")


def test_without_a_file_it_is_that_of_the_home(
    market: Market, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("REKINDLE_HOME", str(tmp_path / "elsewhere"))
    assert refresh("--region", "eastus") == 0
    found = book(tmp_path / "elsewhere").find("Standard_ND96isr_H100_v5", "eastus")
    assert found is not None
    assert found.on_demand_usd_per_hour == 90.0
    assert not HOME.exists()


def test_a_file_that_cannot_be_written_is_told(
    market: Market, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert refresh("--region", "eastus", "-o", str(tmp_path / "file" / "own.yaml")) == 1
    assert "fix:   check the path" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("call", first(2, ["pricing:", "google:", "ec2:", "azure:"]))
@pytest.mark.parametrize("status", first(1, [429, 503, 0]))
def test_a_cloud_that_is_busy_is_asked_again(market: Market, call: str, status: int) -> None:
    market.faults += [Fault(call, status, "ThrottlingException")] * 3
    assert refresh() == 0
    assert len(told()) == 9
    assert market.faults == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "cloud", "tries"),
    first(
        1,
        [("ec2:", "aws", 5), ("pricing:", "aws", 5), ("google:", "gcp", 4), ("azure:", "azure", 4)],
    ),
)
@pytest.mark.parametrize("status", first(1, [0, 429, 500]))
def test_a_cloud_that_stays_busy_keeps_its_prices_and_the_others_change(
    market: Market,
    capsys: pytest.CaptureFixture[str],
    call: str,
    cloud: str,
    tries: int,
    status: int,
) -> None:
    assert refresh() == 0
    before = told()
    market.ec2[("g6.xlarge", "us-east-1")] = 0.7
    market.azure[("Standard_ND96isr_H100_v5", "eastus")] = (80.0, None)
    for name in A3:
        market.parts[(name, "us-central1")] *= 2
    code = "ThrottlingException" if status == 429 else "InternalFailure"
    market.faults += [Fault(call, status, code)] * 100
    market.calls.clear()
    assert refresh() == 1
    assert sum(n for name, n in market.calls.items() if name.startswith(call)) == tries
    shown = capsys.readouterr()
    assert "the prices that are known stay" in shown.err
    after = told()
    probes = {
        "aws": ("g6.xlarge", "us-east-1"),
        "gcp": ("a3-highgpu-8g", "us-central1"),
        "azure": ("Standard_ND96isr_H100_v5", "eastus"),
    }
    assert [of for of, place in probes.items() if after[place] == before[place]] == [cloud]
    assert set(after) == set(before)


def test_when_nobody_answers_nothing_is_written(
    market: Market, capsys: pytest.CaptureFixture[str]
) -> None:
    market.faults += [Fault("azure", 503)] * 50
    assert refresh("--cloud", "azure", "--region", "eastus") == 1
    assert not (HOME / "prices.yaml").exists()
    assert "HTTP 503" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cloud_that_is_silent_is_left_after_a_while(
    market: Market, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr("tests.servers.troubles._LONGEST_SECONDS", 0.3)
    market.faults += [Fault("azure", SILENCE)] * 50
    assert refresh("--cloud", "azure", "--region", "eastus") == 1
    assert "no answer from prices.azure.com" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "code", "said"),
    [
        ("AWS_ACCESS_KEY_ID", "aws", "aws sso login, or set AWS_PROFILE"),
        ("GOOGLE_API_KEY", "gcp", "make a key that may use cloudbilling.googleapis.com"),
    ],
)
def test_without_credentials_one_is_told_what_to_do(
    market: Market,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without: str,
    code: str,
    said: str,
) -> None:
    monkeypatch.delenv(without)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    if without != "AWS_ACCESS_KEY_ID":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-nobody-at-all")
    assert refresh("--cloud", code) == 2
    assert said in capsys.readouterr().err
    assert not (HOME / "prices.yaml").exists()
    assert refresh() == 1  # the others are asked all the same
    assert said in capsys.readouterr().err
    assert len({region for _, region in told()}) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cloud", "said"),
    [
        (
            Fault("pricing", 400, "AccessDeniedException"),
            "aws",
            "ask for pricing:GetProducts and ec2:",
        ),
        (Fault("ec2", 403, "UnauthorizedOperation"), "aws", "ask for pricing:GetProducts and ec2:"),
        (Fault("ec2", 401, "AuthFailure"), "aws", "a region may have to be enabled first"),
        (Fault("pricing", 400, "ExpiredTokenException"), "aws", "aws sso login"),
        (Fault("google", 403, "SERVICE_DISABLED"), "gcp", "a project that uses cloudbilling"),
        (Fault("google", 400, "API_KEY_INVALID"), "gcp", "a project that uses cloudbilling"),
    ],
)
def test_a_refusal_is_told_with_what_is_missing(
    market: Market, capsys: pytest.CaptureFixture[str], fault: Fault, cloud: str, said: str
) -> None:
    market.faults += [fault] * 2
    region = {"aws": "us-east-1", "gcp": "us-central1"}[cloud]
    assert refresh("--region", region) == 2
    assert said in capsys.readouterr().err
    assert sum(market.calls.values()) <= 4  # asked again it would say the same


def test_the_key_is_not_told(market: Market, capsys: pytest.CaptureFixture[str]) -> None:
    market.faults += [Fault("google", 403)]
    assert refresh("--region", "us-central1") == 2
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err


@pytest.mark.slow
def test_a_region_that_sells_nothing_is_an_error_and_what_is_known_stays(
    market: Market, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refresh() == 0
    before = told()
    for region, cloud in (("us-west-2", "aws"), ("us-west1", "gcp"), ("mars", "azure")):
        assert refresh("--region", region) == 1
        assert (
            f"{cloud} has no price of a machine of the catalog in {region}"
            in capsys.readouterr().err
        )
    assert told() == before


@pytest.mark.slow
def test_of_other_regions_what_was_refreshed_stays(market: Market) -> None:
    assert refresh() == 0
    market.ec2[("p5.48xlarge", "us-west-2")] = 51.0
    market.ec2[("p5.48xlarge", "us-east-1")] = 1.0
    assert refresh("--region", "us-west-2") == 0
    assert told()[("p5.48xlarge", "us-east-1")] == (50.0, 25.0)
    assert told()[("p5.48xlarge", "us-west-2")] == (51.0, None)


@pytest.mark.slow
def test_what_is_sold_no_more_goes_from_what_was_refreshed(
    market: Market, capsys: pytest.CaptureFixture[str]
) -> None:
    market.ec2[("p5e.48xlarge", "us-east-1")] = 44.0
    assert refresh("--region", "us-east-1") == 0
    del market.ec2[("p5e.48xlarge", "us-east-1")]
    capsys.readouterr()
    assert refresh("--region", "us-east-1") == 0
    assert "p5e.48xlarge in us-east-1: on demand 44.0000 -> -" in capsys.readouterr().out
    assert ("p5e.48xlarge", "us-east-1") not in told()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--region", "US-EAST-1"), "`US-EAST-1` is not a region of any cloud"),
        (("--cloud", "azure", "--region", "us-east-1"), "`us-east-1` is not a region of azure"),
        (
            ("--cloud", "aws", "--cloud", "gcp", "--region", "us-east-1"),
            "no region of gcp is named",
        ),
        (("--cloud", "oracle"), "invalid choice: 'oracle'"),
    ],
)
def test_a_wrong_wish_asks_nobody(
    market: Market, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert refresh(*words) == 2
    assert said in capsys.readouterr().err
    assert not market.calls


def test_without_a_region_those_of_the_book_are_asked(
    market: Market, capsys: pytest.CaptureFixture[str]
) -> None:
    market.azure |= {
        ("Standard_NC40ads_H100_v5", region): (7.0, None)
        for region in ("westeurope", "westus3", "eastus2", "japaneast")
    }
    assert refresh("--cloud", "azure") == 0
    assert (
        "asking azure about eastus, westeurope, westus3, eastus2, japaneast"
        in capsys.readouterr().err
    )
    assert len({region for _, region in told()}) == 5
    market.azure[("Standard_NC40ads_H100_v5", "northeurope")] = (7.0, None)
    assert refresh("--region", "northeurope") == 0
    market.azure[("Standard_NC40ads_H100_v5", "northeurope")] = (8.0, None)
    assert refresh("--cloud", "azure") == 0
    assert told()[("Standard_NC40ads_H100_v5", "northeurope")] == (8.0, None)


# what is easily read wrongly


@pytest.mark.slow
def test_spot_counts_zones_that_are_below_on_demand_and_no_others(market: Market) -> None:
    market.spot = [
        ("p5.48xlarge", "us-east-1a", 50.0, NOW),
        ("p5.48xlarge", "us-east-1b", 60.0, NOW),
        ("p5.48xlarge", "us-east-1c", 25.0, NOW),
        ("p5.48xlarge", "us-east-1d", 24.0, NOW),
        ("p5.48xlarge", "us-east-1-bos-1a", 1.0, NOW),  # a local zone
        ("g6.xlarge", "us-east-1a", 0.8, NOW),
        ("g6.xlarge", "us-east-1b", 0.9, NOW),
    ]
    assert refresh("--region", "us-east-1") == 0
    assert told()[("p5.48xlarge", "us-east-1")] == (50.0, 25.0)
    assert told()[("g6.xlarge", "us-east-1")] == (0.8, None)


@pytest.mark.slow
def test_what_has_two_prices_has_none(market: Market) -> None:
    attributes = {
        "instanceName": "ml.g6.xlarge",
        "regionCode": "us-east-1",
        "component": "Training",
    }
    market.more = [product("AmazonSageMaker", attributes, 9.0)]
    assert refresh("--region", "us-east-1") == 0
    assert ("ml.g6.xlarge", "us-east-1") not in told()
    assert ("ml.p5.48xlarge", "us-east-1") in told()


def test_a_price_by_another_unit_is_none(market: Market) -> None:
    attributes = {
        "instanceName": "ml.g5.xlarge",
        "regionCode": "us-east-1",
        "component": "Training",
    }
    market.more = [product("AmazonSageMaker", attributes, 9.0, unit="Seconds")]
    assert refresh("--region", "us-east-1") == 0
    assert ("ml.g5.xlarge", "us-east-1") not in told()


@pytest.mark.parametrize("missing", list(A3))
def test_a_machine_of_which_a_part_has_no_price_has_none(market: Market, missing: str) -> None:
    del market.parts[(missing, "us-central1")]
    assert refresh("--region", "us-central1") == 0
    usual, spot = told()[("a3-highgpu-8g", "us-central1")]
    assert (spot if "Spot" in missing else usual) is None
    assert (usual if "Spot" in missing else spot) is not None


def test_google_parts_of_other_units_regions_and_of_two_prices_do_not_count(market: Market) -> None:
    market.more = [
        sku("G2 Instance Core", "us-central1", 0.02, unit="mo"),
        sku("G2 Instance Ram", "us-central1", 0.003),
        sku("Nvidia L4 GPU", "us-central1", 0.5),
        sku("E2 Instance Core", "us-central1", 0.02),
        sku("E2 Instance Core", "us-central1", 0.03),
        sku("E2 Instance Ram", "us-central1", 0.003),
        sku("A3Ultra Instance Core", "us-east4", 0.03),
        sku("A3Ultra Instance Ram", "us-east4", 0.003),
        sku("H200 141GB GPU", "us-east4", 9.0),
        sku("A4 Nvidia B200 (1 gpu slice)", "us-central1", 16.0),
        sku("Nvidia H100 80GB Mega GPU", "us-central1", 9.5),
    ]
    assert refresh("--region", "us-central1") == 0
    found = told()
    assert found[("a4-highgpu-8g", "us-central1")] == (128.0, None)
    assert {name.partition("-")[0] for name, _ in found} == {"a3", "a4"}
    assert not {name for name, _ in found} & {"a3-megagpu-8g", "a3-ultragpu-8g"}


def test_azure_counts_the_newest_price_of_linux(market: Market) -> None:
    name = "Standard_NC24ads_A100_v4"
    market.more = [
        item(name, "eastus", 3.0, effectiveStartDate="2025-01-01T00:00:00Z"),
        item(name, "eastus", 4.0, effectiveStartDate="2026-10-01T00:00:00Z"),
        item(name, "eastus", 5.0, effectiveStartDate="2025-12-01T00:00:00Z"),
        item(name, "eastus", 0.0, effectiveStartDate="2026-11-01T00:00:00Z"),
        item(name.lower(), "eastus", 1.0),
    ]
    assert refresh("--region", "eastus") == 0
    assert told()[(name, "eastus")] == (4.0, None)
    market.more.append(item(name, "eastus", 4.5, effectiveStartDate="2026-10-01T00:00:00Z"))
    assert refresh("--region", "eastus") == 0
    assert (name, "eastus") not in told()  # two prices are none


def test_azure_does_not_send_one_elsewhere(
    market: Market, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.servers.cloud_prices.AZURE", "prices.azure.com.evil.example")
    monkeypatch.setattr(Market, "_route", lambda self, asked: ("azure", lambda: self._azure(asked)))
    assert refresh("--region", "eastus") == 1
    assert "the next page is said to be elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape", [{"Items": [{"armSkuName": "x"}]}, {"Items": 7}, {"items": []}, []], ids=str
)
def test_an_answer_of_another_form_is_an_error(
    market: Market, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shape: Any
) -> None:
    from tests.servers.tls_hosts import Answer

    monkeypatch.setattr(Market, "_azure", lambda *_: Answer(200, shape))
    assert refresh("--region", "eastus") == 1
    shown = capsys.readouterr().err
    assert "another form" in shown or "has no `Items`" in shown


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    day, path = datetime.date(2026, 11, 23), tmp_path / "own.yaml"
    odd = Price("g5.xlarge", "us-east-1", None, 1e-5, 'a: "b" # \u00e9', day, "c, d", day)
    for rows in (shipped().prices, (), (odd,)):
        path.write_text(written(rows))
        assert read_book([path]).prices == rows


def test_a_wrong_file_of_the_last_time_is_told_before_anybody_is_asked(
    market: Market, capsys: pytest.CaptureFixture[str]
) -> None:
    HOME.mkdir()
    (HOME / "prices.yaml").write_text("prices: [{machine: p5.48xlarge}]\n")
    assert refresh() == 2
    assert f"where: {HOME}/prices.yaml:1" in capsys.readouterr().err
    assert not market.calls
