"""What `make coverage` publishes, from the report of the tool."""

from __future__ import annotations

import pytest

from tests import covered
from tests.covered import Coverage

REPORT = {
    "files": {
        path: {"summary": {"num_statements": statements, "covered_lines": reached}}
        for path, statements, reached in (
            ("rekindle/data/split.py", 100, 99),
            ("rekindle/data/hub.py", 1_000, 900),
            ("rekindle/database.py", 10, 0),
            ("rekindle/evaluate/scores/base.py", 200, 200),
            ("rekindle/cli/main.py", 50, 1),
        )
    }
}
FIGURES = {"data": Coverage(1_100, 999), "evaluate": Coverage(200, 200)}


def test_the_files_of_a_package_are_added_up_and_no_others() -> None:
    assert covered.by_package(REPORT, ["data", "evaluate"]) == FIGURES


def test_a_page_says_what_was_measured_and_the_figure_is_read_from_it() -> None:
    text = covered.page(FIGURES)
    rows = text.splitlines()[-3:]
    assert rows == [
        "| `data` | 1,100 | 90 % |",
        "| `evaluate` | 200 | 100 % |",
        "| all | 1,300 | 92 % |",
    ]
    assert covered.published(text) == "tests reach 92 % of 1,300 statements in 2 packages"


@pytest.mark.parametrize(("reached", "percent"), [(0, 0), (999, 99), (1_000, 100)])
def test_a_hundred_percent_means_all(reached: int, percent: int) -> None:
    assert Coverage(1_000, reached).percent == percent


def test_the_published_page_has_a_figure() -> None:
    text = covered.PUBLISHED.read_text(encoding="utf-8")
    assert text.startswith(covered.HEAD)
    assert covered.published(text)
