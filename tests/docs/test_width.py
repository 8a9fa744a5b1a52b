"""Prose of every Markdown file is at most 120 columns wide, so that it is read and compared as text.

Tables and code may be wider, and so may a line that cannot be broken: one picture,
one link target or one code span."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, pages

WIDEST = 120
_FENCE = re.compile(r"^\s*(`{3,}|~{3,})")
_INDIVISIBLE = re.compile(r"\[?!\[[^\]]*\]\([^)]*\)|`[^`]*`")


def too_wide(text: str) -> Iterator[tuple[int, str]]:
    """Lines of prose, from 1, that are wider than they have to be."""
    fence = ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence):
                fence = ""
        elif mark:
            fence = mark[1]
        elif len(line) > WIDEST and not line.lstrip().startswith("|") and _can_be_broken(line):
            yield number, line


def _can_be_broken(line: str) -> bool:
    """Whether anything stands beside the one thing on this line that is too wide for any line."""
    return " " in _INDIVISIBLE.sub("x", line.strip())


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_is_at_most_120_columns_wide(page: Path) -> None:
    assert list(too_wide(page.read_text(encoding="utf-8"))) == []


LONG = "word " * 30


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (f"# Title\n\n{LONG}\n- {LONG}\n", [3, 4]),
        (f"```text\n{LONG}\n```\n{LONG}", [4]),
        (f"  ~~~\n  {LONG}\n  ```\n  {LONG}\n  ~~~\n", []),
        (f"| {LONG} | {LONG} |", []),
        (f"<https://example.com/{'a' * 120}>", []),
        (f"see <https://example.com/{'a' * 120}>", [1]),
        (f"`{LONG}`;", []),
        (f"`{LONG}` and more", [1]),
        (f"[![{LONG}](a.svg)](a.svg)", []),
    ],
)
def test_a_line_is_too_wide_where_it_can_be_broken(text: str, lines: list[int]) -> None:
    assert [number for number, _ in too_wide(text)] == lines
