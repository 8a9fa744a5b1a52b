"""`schedule`: five fields of cron, and a time zone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.errors import SpecError
from rekindle.spec.load import load_spec
from rekindle.spec.schedule import cron_problem

GOOD = [
    "0 3 * * 1",
    "*/15 * * * *",
    "0,30 8-18/2 1-7 jan-mar mon,Wed,fri",
    "59 23 31 12 0",
    "5/10 * * * SUN-sat",
]
WRONG = {
    "": "0 fields", "0 3 * *": "4 fields", "0 0 3 * * 1": "6 fields", "@daily x x x x": "`@daily` is neither",
    "60 * * * *": "minute: 60 is not in 0-59", "* 24 * * *": "hour: 24", "* * 0 * *": "day of the month: 0",
    "* * * 13 *": "month: 13", "* * * foo *": "foo is not in 1-12", "* * * * 7": "day of the week: 7",
    "30-10 * * * *": "ends before it begins", "*/0 * * * *": "leads nowhere", "1,,2 * * * *": "`` is neither",
    "-1 * * * *": "`-1` is neither", "L * * * *": "l is not in 0-59", "mon * * * *": "minute: mon",
}  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_what_cron_has_is_taken(text: str) -> None:
    assert cron_problem(text) == ""


@pytest.mark.parametrize("text", WRONG)
def test_what_cron_has_not_is_refused_by_its_field(text: str) -> None:
    assert WRONG[text] in cron_problem(text)


@given(st.tuples(*[st.integers(-5, 70)] * 5))
def test_numbers_are_taken_within_their_bounds_only(numbers: tuple[int, ...]) -> None:
    bounds = ((0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
    fits = all(low <= n <= high for n, (low, high) in zip(numbers, bounds, strict=True))
    assert (cron_problem(" ".join(map(str, numbers))) == "") == fits


@given(st.text(max_size=40))
def test_any_text_has_an_answer(text: str) -> None:
    assert isinstance(cron_problem(text), str)


def test_a_config_says_what_is_wrong_with_its_schedule_and_where(tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    head = "name: digits\ntask: image_classification\ndata: {source: 'sklearn:digits'}\n"
    config.write_text(head + "schedule:\n  cron: 0 25 * * *\n  timezone: Europe/Berlim\n")
    with pytest.raises(SpecError) as caught:
        load_spec(config)
    first, second = caught.value.problems
    assert (first.where, second.where) == (f"{config}:5", f"{config}:6")
    assert "hour: 25 is not in 0-23" in first.what
    assert "did you mean `Europe/Berlin`?" in second.fix
    config.write_text(head + "schedule: {cron: 0 3 * * 1}\n")
    loaded = load_spec(config).schedule
    assert loaded is not None
    assert loaded.timezone == "UTC"
