"""Durations, partial dates, rolling windows and partitions."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.data.window import (
    Partitions,
    Window,
    floor,
    parse_duration,
    parse_time,
    parse_window,
    resolve,
    shift,
)
from rekindle.errors import DataError, RequestError
from rekindle.spec.model import WindowSpec

TIMES = st.datetimes(dt.datetime(1990, 1, 1), dt.datetime(2100, 1, 1))
UNITS = st.sampled_from(["hour", "day", "week", "month", "year"])

RESOLVED = {
    "the newest month is included whole": (
        {"size": "3 months"},
        "2026-05-17T09:30:00",
        "2026-03-01T00:00:00/2026-06-01T00:00:00",
    ),
    "an offset goes back by size where nothing else is said": (
        {"size": "3 months", "offset": 2},
        "2026-05-17",
        "2025-09-01T00:00:00/2025-12-01T00:00:00",
    ),
    "windows may overlap": (
        {"size": "6 months", "every": "1 month", "offset": 1},
        "2026-05-17",
        "2025-11-01T00:00:00/2026-05-01T00:00:00",
    ),
    "days end at midnight": (
        {"size": "30 days"},
        "2026-03-01T23:59:59",
        "2026-01-31T00:00:00/2026-03-02T00:00:00",
    ),
    "weeks begin on Monday": (
        {"size": "1 week"},
        "2026-01-01",
        "2025-12-29T00:00:00/2026-01-05T00:00:00",
    ),
    "an explicit day is included": (
        {"size": "1 month", "end": "2026-03-31"},
        None,
        "2026-03-01T00:00:00/2026-04-01T00:00:00",
    ),
    "an explicit month is included": (
        {"size": "1 year", "end": "2024-02"},
        None,
        "2023-03-01T00:00:00/2024-03-01T00:00:00",
    ),
    "an explicit year is included": (
        {"size": "2 years", "end": "2025"},
        None,
        "2024-01-01T00:00:00/2026-01-01T00:00:00",
    ),
    "an explicit minute is included": (
        {"size": "1 hour", "end": "2026-01-01T09:59"},
        None,
        "2026-01-01T09:00:00/2026-01-01T10:00:00",
    ),
    "a month before the 31st of March ends in February": (
        {"size": "1 month", "end": "2026-03-30"},
        None,
        "2026-02-28T00:00:00/2026-03-31T00:00:00",
    ),
}


@pytest.mark.parametrize(("fields", "newest", "expected"), RESOLVED.values(), ids=list(RESOLVED))
def test_a_window_resolves_to_an_interval(fields, newest, expected):
    window = resolve(WindowSpec(**fields), newest and parse_time(newest))
    assert str(window) == expected
    assert parse_window(expected) == window


@given(TIMES, UNITS, st.integers(1, 40), st.integers(0, 30))
def test_windows_as_long_as_their_distance_tile_time(newest, unit, count, offset):
    size = f"{count} {unit}s"
    later = resolve(WindowSpec(size=size, offset=offset), newest)
    earlier = resolve(WindowSpec(size=size, offset=offset + 1), newest)
    assert earlier.end == later.start
    assert later.start < later.end


@given(TIMES, UNITS)
def test_the_latest_window_holds_the_newest_record_and_nothing_newer_than_its_unit(newest, unit):
    window = resolve(WindowSpec(size=f"1 {unit}"), newest)
    assert newest in window
    assert window.start == floor(newest, unit)
    assert window.end not in window


@given(TIMES, st.integers(0, 500))
def test_moving_months_forth_and_back_keeps_the_month(time, months):
    there = shift(time, parse_duration("1 month") * months)
    back = shift(there, parse_duration("1 month") * months, back=True)
    assert (back.year, back.month) == (time.year, time.month)
    assert (there.year * 12 + there.month) - (time.year * 12 + time.month) == months


@given(TIMES)
def test_a_time_survives_its_text(time):
    assert parse_time(time.isoformat()) == time
    assert parse_time(time.isoformat() + "+02:00") == time - dt.timedelta(hours=2)


@pytest.mark.parametrize("text", ["", "soon", "2026-13", "2026-02-30", "26-01-01", "2026-3"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_time(text)


@pytest.mark.parametrize(
    "text", ["2026", "2026-01-01/2025-01-01", "2026-01-01T00:00:00Z/2026-02-01T00:00:00Z", "a/b"]
)
def test_what_is_no_window_is_refused(text):
    with pytest.raises(RequestError, match="is not a window"):
        parse_window(text)


def test_a_window_before_all_time_is_refused():
    with pytest.raises(DataError, match="before all time"):
        resolve(WindowSpec(size="99999 years", offset=10_000), dt.datetime(2026, 1, 1))
    with pytest.raises(RequestError, match=r"2026-02-30.*is not a date"):
        resolve(WindowSpec(size="1 day", end="2026-02-30"), None)
    with pytest.raises(DataError, match="there is none"):
        resolve(WindowSpec(size="1 day"), None)


PARTITIONS = {
    "months": ("d/{window}/x.csv", "1 month", "d/2026-03/x.csv", dt.datetime(2026, 3, 1)),
    "a month that is none": ("d/{window}/x.csv", "1 month", "d/2026-13/x.csv", None),
    "another folder": ("d/{window}/x.csv", "1 month", "d/latest/x.csv", None),
    "hive": (
        "y={window:%Y}/m={window:%m}/*.pq",
        "1 month",
        "y=2026/m=03/a.pq",
        dt.datetime(2026, 3, 1),
    ),
    "hours": ("d/{window}.jsonl", "6 hours", "d/2026-03-01T18.jsonl", dt.datetime(2026, 3, 1, 18)),
    "plain text around": (
        "d/v1-{window:%Y%m%d}/**/*.csv",
        "1 day",
        "d/v1-20260301/a/b.csv",
        dt.datetime(2026, 3, 1),
    ),
    "dots are dots": ("d/{window:%Y.%m}/x", "1 month", "d/2026-03/x", None),
}


@pytest.mark.parametrize(
    ("path", "every", "file", "expected"), PARTITIONS.values(), ids=list(PARTITIONS)
)
def test_a_partition_is_recognised_by_its_path(path, every, file, expected):
    assert Partitions.of(path, WindowSpec(size=every)).time_of(file) == expected


def test_the_latest_partition_is_the_end():
    spec = WindowSpec(size="2 weeks", every="1 week")
    assert Partitions.of("d/{window}/x", spec).unit == "day"
    window = resolve(spec, dt.datetime(2026, 4, 6), "day")
    assert window == Window(dt.datetime(2026, 3, 24), dt.datetime(2026, 4, 7))
    assert dt.datetime(2026, 3, 30) in window
    assert Partitions.of("{window:%H}/{window:%Y}/{window:%m}-{window:%d}", spec).unit == "hour"


def test_a_format_without_order_is_refused():
    for name in ("%B", "x", "%Y/%m"):
        with pytest.raises(RequestError, match="not a format of a time"):
            Partitions.of(f"d/{{window:{name}}}/x", WindowSpec(size="1 month"))
