"""`schedule`: a line of cron, a time zone, and what becomes of late starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import SpecError
from rekindle.spec.load import load_target
from rekindle.spec.schedule import ScheduleSpec, findings

HEAD = "name: digits\ntask: image_classification\ndata: {source: 'sklearn:digits'}\n"
ZONES = {
    "Europe/Berlim": "did you mean `Europe/Berlin`?",
    "CEST": "did you mean `CET`?",
    "+02:00": "such as Europe/Berlin",
    "europe/berlin": "did you mean `Europe/Berlin`?",
    "W. Europe Standard Time": "such as Europe/Berlin",
    "EST": "name America/New_York, or UTC",
    "MST": "name America/Denver",
    "HST": "name Pacific/Honolulu",
    "localtime": "such as Europe/Berlin",
    "Factory": "such as Europe/Berlin",
}


def test_a_config_says_what_is_wrong_with_its_schedule_and_where(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(HEAD + "schedule:\n  cron: 0 25 * * *\n  timezone: Europe/Berlim\n")
    with pytest.raises(SpecError) as caught:
        load_target(config)
    first, second = caught.value.problems
    assert (first.where, second.where) == (f"{config}:5", f"{config}:6")
    assert "hour: 25 is not in 0-23" in first.what
    assert "did you mean `Europe/Berlin`?" in second.fix
    config.write_text(HEAD + "schedule: {cron: 0 3 * * 1}\n")
    assert load_target(config).schedule == ScheduleSpec(cron="0 3 * * 1", timezone="UTC")


@pytest.mark.parametrize("zone", ZONES)
def test_a_zone_that_is_none_or_not_what_one_means_is_named_with_another(zone: str) -> None:
    ((field, what, fix),) = findings(ScheduleSpec(cron="0 3 * * 1", timezone=zone))
    assert (field, zone in what) == ("timezone", True)
    assert ZONES[zone] in fix


@pytest.mark.parametrize(
    "zone", ["UTC", "Etc/UTC", "Asia/Kolkata", "Etc/GMT+5", "EST5EDT", "US/Eastern"]
)
def test_a_zone_that_is_one_is_taken(zone: str) -> None:
    assert list(findings(ScheduleSpec(cron="0 3 * * 1", timezone=zone))) == []


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("schedule: {}", "schedule.cron"),
        ("schedule: {cron: ''}", "schedule.cron"),
        ("schedule: {cron: 0 3 * * 1, overlap: kill}", "schedule.overlap"),
        ("schedule: {cron: 0 3 * * 1, catchup: true}", "catch_up"),
        ("schedule: {cron: 0 3 * * 1, when_unchanged: run}", "when_unchanged"),
    ],
)
def test_what_the_section_does_not_have_is_refused(line: str, says: str, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(f"{HEAD}{line}\n")
    with pytest.raises(SpecError) as caught:
        load_target(config)
    assert says in str(caught.value)
