"""Messages, docstrings and docs use plain technical English: none of the words below, which hide who acts.

A word between backticks is an identifier and may stay (`anew` is a field). docs/features.md is
generated from rekindle/catalog/features.yaml, so the source is read in its place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GENERATED = {ROOT / "docs" / "features.md"}
PAGES = ("components", "configs", "containers", "docs", "notebooks", "rekindle", "tests")
INSTEAD = {
    r"nobody": "no process, no user, or a passive: `is not known`",
    r"somebody": "another process, another user",
    r"who(?:m)?ever": "the user who, the process that",
    r"anew": "again, or new",
    r"mend(?:s|ed|ing)?": "correct, fix",
    r"reckon\w*": "calculate, estimate",
    r"befall\w*|befell": "happen to",
    r"one's\s+own": "your own, the user's own",
    r"any(?:body|one)": "any user, any process; `any KFP pipeline`",
    r"signs?\s+of\s+life": "heartbeat",
    r"sa(?:y|ys|ying|id)\s+(?:it|that|this|them)\s+again": "retry the command",
    r"(?:is|are)\s+none\s+of": "is not one of, is not a",
}
_WORDS = [
    (re.compile(rf"(?<!`)\b(?:{word})\b(?!`)", re.IGNORECASE), plain)
    for word, plain in INSTEAD.items()
]


def found(text: str) -> Iterator[tuple[int, str]]:
    """Lines of `text`, from 0, with a word that is not plain, and what to write instead."""
    for pattern, plain in _WORDS:
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start())
            yield line, f"`{' '.join(match[0].split())}`; write: {plain}"


def in_strings(source: str) -> Iterator[tuple[int, str]]:
    """The same for string constants of Python, with lines of the file from 1."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for line, what in found(node.value):
                yield min(node.lineno + line, node.end_lineno or node.lineno), what


def test_strings_of_the_code_are_in_plain_words() -> None:
    paths = [
        p
        for top in ("rekindle", "components", "pipelines", "tools")
        for p in (ROOT / top).rglob("*.py")
    ]
    assert len(paths) > 100
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {what}"
        for path in sorted(paths)
        for line, what in in_strings(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_docs_and_tables_are_in_plain_words() -> None:
    paths = {
        *ROOT.glob("*.md"),
        *(page for name in PAGES for page in (ROOT / name).rglob("*.md")),
        *(ROOT / "rekindle").rglob("*.yaml"),
    }
    wrong = [
        f"{path.relative_to(ROOT)}:{line + 1}: {what}"
        for path in sorted(paths - GENERATED)
        for line, what in found(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""One.\n\nNobody\nmended it."""', [3, 4]),
        ('raise E(f"`{name}` is none "\n        f"of {all}")', [1]),
        ('x = "a file of one\'s\\nown"', [1]),
        ('"each one\'s keys, and no sign of\\nlife of anyone"', [1, 1]),
        ('"whether `anew` is set; recommended for the Mendel data"', []),
        ("nobody = 1  # anew", []),
    ],
)
def test_words_are_found_where_they_are(source: str, lines: list[int]) -> None:
    assert sorted(line for line, _ in in_strings(source)) == lines
