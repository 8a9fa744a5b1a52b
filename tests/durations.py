"""How long tests take: `python tests/durations.py JUNIT.xml --check`, or `--publish quick|all`.

Machines are shared, and the same one is three times as fast an hour later. So a run looks at the machine's pace every ten seconds
(conftest.py): the processor time that compiling one file takes. Seconds are given at a pace of 10 ms. durations.md has them by
folder; `--check` fails where a run's tests took 30 % longer in all, and names the files that take most."""

from __future__ import annotations

import argparse
import collections
import re
import statistics
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

PUBLISHED = Path(__file__).with_name("durations.md")
ALLOWED = 1.3
PACE_MS = 10.0
# the share of tests' time in which they and their processes compute, which the pace changes; the rest is waiting. Measured on
# 2026-11-26 by os.times() around each test: 2,235 of 2,587 s
COMPUTING = 0.86
SHOWN = 10
COLUMNS = ("quick", "all")
HEAD = """# Seconds of tests

By folder, set-up included, on two cores with nothing else to do; two processes run side by side. They are given for a
machine that compiles `argparse.py` in 10 ms: a slower one takes longer by as much. Written by
`python tests/durations.py build/tests.xml --publish quick` (or `all`); CI fails where `make test` takes 30 % longer
than the first column.

| folder | `make test` | `make test-all` |
|---|---:|---:|
"""


def seconds_by_file(junit: Path) -> dict[str, float]:
    """Of each file of tests, at a pace of `PACE_MS`; as they were where the pace was not looked at."""
    root = ET.parse(junit)
    found = [each.get("value", 0) for each in root.iter("property") if each.get("name") == "pace"]
    pace = statistics.mean(map(float, found)) if found else PACE_MS
    scale = COMPUTING * PACE_MS / pace + 1 - COMPUTING
    files: dict[str, float] = collections.Counter()
    for case in root.iter("testcase"):
        name = case.get("classname", "")
        files[name.split(".Test")[0]] += scale * float(case.get("time", 0))
    return files


def by_folder(files: dict[str, float]) -> dict[str, float]:
    """The same by the folder below `tests`."""
    found: dict[str, float] = collections.Counter()
    for name, seconds in files.items():
        words = name.split(".")
        found[words[1] if len(words) > 2 else "."] += seconds
    return found


def published() -> dict[str, dict[str, float]]:
    """By column and folder."""
    found: dict[str, dict[str, float]] = {column: {} for column in COLUMNS}
    text = PUBLISHED.read_text(encoding="utf-8") if PUBLISHED.exists() else ""
    for folder, *numbers in re.findall(r"^\| `([^`]+)` \| ([\d,]*) \| ([\d,]*) \|$", text, re.M):
        for column, number in zip(COLUMNS, numbers, strict=True):
            if number:
                found[column][folder] = float(number.replace(",", ""))
    return found


def publish(column: str, folders: dict[str, float]) -> None:
    """Replace one column."""
    table = published() | {column: dict(folders)}

    def row(name: str, of: list[float | None]) -> str:
        return f"| {name} | {' | '.join('' if n is None else f'{n:,.0f}' for n in of)} |\n"

    names = sorted({name for each in table.values() for name in each})
    lines = [row(f"`{name}`", [table[c].get(name) for c in COLUMNS]) for name in names]
    lines.append(row("all", [sum(table[c].values()) or None for c in COLUMNS]))
    PUBLISHED.write_text(HEAD + "".join(lines), encoding="utf-8")


def check(files: dict[str, float]) -> str:
    """What is wrong, or nothing."""
    total, known = sum(files.values()), sum(published()["quick"].values())
    if not known or total <= ALLOWED * known:
        return ""
    most = sorted(files, key=lambda name: -files[name])[:SHOWN]
    shown = "\n".join(f"  {files[name]:6.1f} s  {name}" for name in most)
    return f"tests took {total:,.0f} s, and {known:,.0f} s are published in tests/durations.md; the longest:\n{shown}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--publish", choices=COLUMNS)
    asked = parser.parse_args()
    files = seconds_by_file(asked.junit)
    if asked.publish:
        publish(asked.publish, by_folder(files))
    if asked.check and (problem := check(files)):
        sys.exit(problem)


if __name__ == "__main__":
    main()
