"""How much of each package its tests reach: `python -m tests.covered` prints the published figure.

`make coverage` measures the packages whose tests call them in their own process. Tests of the others start processes, as
users do, which the tracer of one process does not see: a figure of theirs would say nothing. `python -m tests.covered
REPORT.json PACKAGE...` writes coverage.md from the report of `coverage json`.

It is a target of its own because tracing costs: under Python 3.11 `tests/spec` and `tests/ir` took 124 s of processor
time instead of 93, and `make test` is near its bound of time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).with_name("coverage.md")
HEAD = """# Statements that tests reach

`make coverage` runs the tests in the folders of these names that are not slow, and counts the statements of the
packages that they reach in their own process. What they reach in a process that they start is not counted, so these
are lower bounds, and packages whose tests start processes, as users do (`app`, `cli`, `launch`, `platforms`, `serve`,
`train`), are left out. No bound fails CI: the table shows where to look.

| package | statements | reached |
|---|---:|---:|
"""
_ROW = re.compile(r"^\| (\S+) \| ([\d,]+) \| (\d+) % \|$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Of one package, or of all."""

    statements: int
    reached: int

    @property
    def percent(self) -> int:
        """Rounded down: 100 means all."""
        return 100 * self.reached // self.statements


def by_package(report: Mapping[str, Any], packages: Sequence[str]) -> dict[str, Coverage]:
    """The figures of `packages`, from a report of `coverage json`."""
    figures = {}
    for package in packages:
        summaries = [
            file["summary"]
            for path, file in report["files"].items()
            if path.startswith(f"rekindle/{package}/")
        ]
        figures[package] = Coverage(
            sum(summary["num_statements"] for summary in summaries),
            sum(summary["covered_lines"] for summary in summaries),
        )
    return figures


def page(figures: Mapping[str, Coverage]) -> str:
    """The text of coverage.md."""
    total = Coverage(
        sum(each.statements for each in figures.values()),
        sum(each.reached for each in figures.values()),
    )
    rows = [*((f"`{package}`", each) for package, each in sorted(figures.items())), ("all", total)]
    return HEAD + "".join(
        f"| {name} | {each.statements:,} | {each.percent} % |\n" for name, each in rows
    )


def published(text: str) -> str:
    """The figure of all packages in a page, in a sentence."""
    rows = {name: (statements, percent) for name, statements, percent in _ROW.findall(text)}
    statements, percent = rows["all"]
    return f"tests reach {percent} % of {statements} statements in {len(rows) - 1} packages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, nargs="?")
    parser.add_argument("packages", nargs="*")
    given = parser.parse_args()
    if given.report:
        report = json.loads(given.report.read_text(encoding="utf-8"))
        PUBLISHED.write_text(page(by_package(report, given.packages)), encoding="utf-8")
    text = PUBLISHED.read_text(encoding="utf-8")
    for package, _, percent in _ROW.findall(text):
        print(f"{package.strip('`'):10} {percent:>3} %")
    print(f"{published(text)} (tests/coverage.md)")


if __name__ == "__main__":
    main()
