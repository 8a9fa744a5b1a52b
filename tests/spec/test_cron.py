"""Lines of cron: what is taken, why the rest is not and what to write, and the same line without what
some crons lack."""

from __future__ import annotations

import datetime as dt
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.spec.cron import cron_problem, listed, next_times, starts, unsteady, values, written
from rekindle.spec.schedule import ScheduleSpec

GOOD = [
    "0 3 * * 1",
    "*/15 * * * *",
    "0,30 8-18/2 1-7 jan-mar mon,Wed,fri",
    "59 23 31 12 0",
    "5/10 * * * SUN-sat",
    "0 3 29 feb *",
    "0 3 30,31 2,3 *",
    "0 3 31 2 1",
]
SUNDAY, DAYS, RANGES = "write 0 for Sunday", "name days that every month has", "write two ranges"
FIVE, SHORTER, OUT = "write five fields", "leave seconds and the year out", "write the days out"
WRONG = {
    "": ("0 fields", FIVE),
    "0 3 * *": ("4 fields", FIVE),
    "* * * * * * * *": ("8 fields", FIVE),
    "0 0 3 * * 1": ("6 fields", SHORTER),
    "0 0 3 * * 1 2027": ("7 fields", SHORTER),
    "@reboot": ("1 field,", FIVE),
    "@daily x x x x": ("`@daily` is neither", FIVE),
    "60 * * * *": ("minute: 60 is not in 0-59", FIVE),
    "* 24 * * *": ("hour: 24", FIVE),
    "* * 0 * *": ("day of the month: 0", FIVE),
    "* * * 13 *": ("month: 13", FIVE),
    "* * * foo *": ("foo is not in 1-12", FIVE),
    "* * * * 7": ("day of the week: 7", SUNDAY),
    "* * * * 5-7": ("day of the week: 7", SUNDAY),
    "30-10 * * * *": ("ends before it begins", RANGES),
    "0 22-6 * * *": ("ends before it begins", "`22-23,0-5`"),
    "*/0 * * * *": ("leads nowhere", FIVE),
    "1,,2 * * * *": ("`` is neither", FIVE),
    "-1 * * * *": ("`-1` is neither", FIVE),
    "L * * * *": ("l is not in 0-59", FIVE),
    "mon * * * *": ("minute: mon", FIVE),
    "0 3 L * *": ("day of the month: l", DAYS),
    "0 3 15W * *": ("`15w` is neither", DAYS),
    "0 3 * * 5L": ("`5l` is neither", DAYS),
    "0 3 * * mon#1": ("`mon#1` is neither", DAYS),
    "0 3 ? * 1": ("`?` is neither", "write `*`"),
    "0 3 * * ?": ("`?` is neither", "write `*`"),
    "0 3 */2 * 1": ("some crons want both to fit", OUT),
    "0 3 1 * */2": ("some crons want both", OUT),
    "0 3 31 2,4 *": ("day 31 of month 2,4 never comes", "name a day that the month has"),
    "0 3 30 feb *": ("day 30 of month feb never comes", "name a day that the month has"),
}


@pytest.mark.parametrize("text", GOOD)
def test_what_every_cron_reads_alike_is_taken(text: str) -> None:
    assert cron_problem(text) is None


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_named_with_what_to_write(text: str) -> None:
    problem = cron_problem(text)
    assert problem is not None
    what, fix = problem
    assert WRONG[text][0] in what
    assert WRONG[text][1] in fix
    for line in re.findall(r"`([^`]+)`", fix):
        assert len(line.split()) != 5 or cron_problem(line) is None


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@Weekly ", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        ("@reboot", "@reboot"),
    ],
)
def test_a_name_is_the_line_that_it_stands_for(name: str, line: str) -> None:
    assert ScheduleSpec(cron=name).cron == line


def test_a_line_is_written_in_numbers_ranges_and_lists() -> None:
    assert written("*/30 9-17 * jan-mar,dec mon") == "0,30 9-17 * 1-3,12 1"
    assert written("5/20 * 1-31/10 * *") == "5,25,45 * 1,11,21,31 * *"


numbers = st.sets(st.integers(0, 59), min_size=1).map(lambda found: tuple(sorted(found)))


@given(numbers)
def test_numbers_that_are_listed_are_read_again(found: tuple[int, ...]) -> None:
    assert values(f"{listed(found)} * * * *")[0] == found


@given(st.tuples(*[st.integers(-5, 70)] * 5))
def test_numbers_are_taken_within_their_bounds_only(found: tuple[int, ...]) -> None:
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    fits = all(low <= n <= high for n, (low, high) in zip(found, bounds, strict=True))
    assert (cron_problem(" ".join(map(str, found))) is None) == fits


@given(st.text(max_size=40))
def test_any_text_has_an_answer(text: str) -> None:
    problem = cron_problem(text)
    assert problem is None or all(problem)


field = st.one_of(
    st.just("*"), st.sets(st.integers(1, 6), min_size=1).map(lambda s: listed(tuple(sorted(s))))
)


@given(
    st.tuples(field, field, field, field, field),
    st.datetimes(dt.datetime(2026, 1, 1), dt.datetime(2030, 1, 1)),
)
def test_the_next_starts_are_croniters(fields: tuple[str, ...], moment: dt.datetime) -> None:
    croniter = pytest.importorskip("croniter").croniter
    line, after = " ".join(fields), moment.replace(tzinfo=dt.UTC)
    walk = croniter(line, after).all_next(dt.datetime)
    assert next_times(line, "UTC", after, 5) == [next(walk) for _ in range(5)]


def test_starts_are_shown_in_the_zone_and_in_utc() -> None:
    after = dt.datetime(2027, 3, 26, tzinfo=dt.UTC)
    assert list(starts("30 3 * * *", "Europe/Berlin", after, 3)) == [
        "Fri 2027-03-26 03:30 Europe/Berlin = 2027-03-26 02:30 UTC",
        "Sat 2027-03-27 03:30 Europe/Berlin = 2027-03-27 02:30 UTC",
        "Sun 2027-03-28 03:30 Europe/Berlin = 2027-03-28 01:30 UTC",
    ]
    assert next(starts("30 2 28 3 *", "Europe/Berlin", after, 1)).startswith("Tue 2028-03-28"), (
        "in 2027 the clock skips that time"
    )


UNSTEADY = {
    ("30 2 * * *", "Europe/Berlin"): [
        "2027-03-28 02:30 is skipped",
        "2027-10-31 02:30 comes twice",
    ],
    ("*/20 * * * *", "America/New_York"): [
        "2027-03-14 02:00 is skipped",
        "2027-11-07 01:00 comes twice",
    ],
    ("30 2 * * 1", "Europe/Berlin"): [],
    ("0 4 * * *", "Europe/Berlin"): [],
    ("0 2 * * *", "Asia/Kolkata"): [],
    ("15 2 * * *", "Australia/Lord_Howe"): ["2027-10-03 02:15 is skipped"],
}


@pytest.mark.parametrize(("line", "zone"), UNSTEADY)
def test_times_that_a_change_of_clocks_skips_or_repeats_are_known(line: str, zone: str) -> None:
    assert (
        list(unsteady(line, zone, dt.datetime(2027, 1, 1, tzinfo=dt.UTC))) == UNSTEADY[line, zone]
    )
