"""What checks found, as the table that docs/gpu.md holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.here import FAIL, Row

BEGIN, END = "<!-- results: make test-gpu writes them -->", "<!-- end of results -->"
EMPTY = "| check | what was seen | figure | result |\n|---|---|---|---|\n| | no GPU has run the checks yet | | |"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one check found in so many seconds; `facts` are those of the machine."""

    check: str
    seconds: float
    rows: tuple[Row, ...]
    facts: Mapping[str, str]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.result == FAIL]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / f"{self.check}.json").write_text(text + "\n")

    @classmethod
    def read(cls, path: Path) -> Result:
        given: dict[str, Any] = json.loads(path.read_text())
        rows = tuple(Row(**row) for row in given.pop("rows"))
        return cls(rows=rows, **given)


def read_all(folder: Path, names: Sequence[str]) -> list[Result]:
    """The results in a folder, in the order of `names`."""
    paths = (folder / f"{name}.json" for name in names)
    return [Result.read(path) for path in paths if path.exists()]


def markdown(results: Sequence[Result], titles: Mapping[str, str]) -> str:
    """A header and a table for each machine and commit."""
    if not results:
        return EMPTY
    machines: list[Mapping[str, str]] = []
    for result in results:
        machines += [] if result.facts in machines else [result.facts]
    parts = []
    for facts in machines:
        same = [one for one in results if one.facts == facts]
        minutes, rows = sum(one.seconds for one in same) / 60, [r for one in same for r in one.rows]
        listed = "\n".join(f"- {name}: {value}" for name, value in facts.items() if value)
        failed = sum(len(one.failed) for one in same)
        parts += [
            f"{listed}\n- took: {minutes:.1f} minutes\n- failed: {failed} of {len(rows)} rows\n",
            "| check | what was seen | figure | result |\n|---|---|---|---|",
        ]
        for result in same:
            for number, row in enumerate(result.rows):
                name = "" if number else f"{titles[result.check]} ({result.seconds:.0f} s)"
                cells = map(_cell, (name, row.seen, row.figure, row.result))
                parts.append("| " + " | ".join(cells) + " |")
        parts.append("")
    parts.pop()
    return "\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def write_into(page: Path, table: str) -> None:
    """Put the table between the marks of the page."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no marks {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}")
