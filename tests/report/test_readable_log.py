"""Logs as a person reads them: no plumbing, events as sentences, nodes merged by time; nothing else is changed or lost."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.launch.events import MARK
from rekindle.report.readable_log import PROGRESS_SECONDS, Line, lines_of, merged, shown

NOON = 1_795_600_000.0
EXECUTOR = """[KFP Executor 2026-11-25 10:02:09,301 INFO]: Looking for component `tell` in x.py
[KFP Executor 2026-11-25 10:02:09,303 INFO]: Got executor_input:
{
    "inputs": {
        "deep": {}
    }
}
hello
[KFP Executor 2026-11-25 10:02:09,400 WARNING]: artifacts are old
[KFP Executor 2026-11-25 10:02:09,500 INFO]: Wrote executor output file to y.json.
"""


def event(kind="progress", at=NOON, prefix="", **fields):
    return f"{prefix}{MARK}{json.dumps({'event': kind, **fields, 'at': at})}\n"


def progress(step, at=NOON, **fields):
    return event(step=step, steps=60, loss=1 / step, at=at, **fields)


def text_of(*pieces, live=False, **fields):
    return "".join(shown(lines_of(pieces), live=live, names={}, **fields))


def test_what_launchers_print_is_left_out_and_what_steps_print_stays():
    assert text_of(EXECUTOR) == "hello\n10:02:09 artifacts are old\n"


@pytest.mark.parametrize("nodes", ["[node {}] ", "[algo-{}] "])
def test_lines_that_a_platform_mixed_keep_the_node_that_it_wrote_before_them(nodes):
    first = [nodes.format(1) + line for line in EXECUTOR.splitlines()]
    second = [nodes.format(2) + line for line in EXECUTOR.splitlines()]
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert text_of("\n".join(mixed)) == "".join(
        f"{nodes.format(n)}{text}\n"
        for text in ("hello", "10:02:09 artifacts are old")
        for n in (1, 2)
    )
    said = text_of(event("notice", prefix=nodes.format(1), text="two\nlines"))
    assert [line.startswith(nodes.format(1)) for line in said.splitlines()] == [True, True]


def test_events_are_sentences_with_a_time():
    said = text_of(event("notice", text="two\nlines"), progress(60, samples_per_second=1234.5))
    assert re.fullmatch(
        r"(\d\d:\d\d:\d\d) two\n\1 lines\n\1 step 60/60  loss 0.0167  1,234 samples/s\n", said
    ), said
    assert text_of(progress(3, at=0)) == "step 3/60  loss 0.3333\n", (
        "of a version that said no time"
    )


def test_a_pipe_gets_progress_every_few_seconds_and_the_last_one():
    steps = [progress(step, at=NOON + step) for step in range(1, 61)]
    shown_steps = [int(s) for s in re.findall(r"step (\d+)/60", text_of(*steps))]
    assert shown_steps == [*range(1, 60, int(PROGRESS_SECONDS)), 60]
    broken = text_of(*steps[:4], "Traceback\n")
    assert re.findall(r"step (\d+)|(Traceback)", broken) == [
        ("1", ""),
        ("4", ""),
        ("", "Traceback"),
    ]


def test_on_a_terminal_progress_is_one_line_that_moves():
    said = text_of(progress(1), progress(2), "done\n", progress(3), live=True)
    assert said.count("\n") == 3
    assert re.sub(r"\d\d:\d\d:\d\d ", "", said.replace("\r\x1b[2K", "<")) == (
        "<step 1/60  loss 1.0000<step 2/60  loss 0.5000\ndone\n<step 3/60  loss 0.3333\n"
    )


def test_a_terminal_is_steered_by_colours_only_and_a_pipe_gets_what_there_is():
    assert (
        text_of("\x1b[31mred\x1b[0m \x1b[2Jgone\n", live=True)
        == "\x1b[31mred\x1b[0m \\x1b[2Jgone\n"
    )
    assert text_of("\x1b[2Jgone\n") == "\x1b[2Jgone\n"


def test_nodes_are_merged_by_the_time_of_their_events():
    first = [
        event("notice", text="a", at=NOON),
        "A\n",
        event("notice", text="c", at=NOON + 2),
        "C\n",
    ]
    second = [event("notice", text="b", at=NOON + 1), "B\n", event("notice", text="d", at=NOON + 3)]
    names = {0: "node 0 | ", 1: "node 1 | "}
    said = "".join(shown(merged({0: first, 1: second}), live=False, names=names))
    short = re.sub(r"\d\d:\d\d:\d\d ", "", said).splitlines()
    assert short == [
        "node 0 | a",
        "node 0 | A",
        "node 1 | b",
        "node 1 | B",
        "node 0 | c",
        "node 0 | C",
        "node 1 | d",
    ]


def test_since_leaves_out_what_came_before():
    old, new = event("notice", text="old"), event("notice", text="new", at=NOON + 60)
    said = text_of("first\n", old, new, "last\n", since=NOON + 30)
    assert re.sub(r"\d\d:\d\d:\d\d ", "", said) == "new\nlast\n"


def test_since_shows_a_traceback_behind_the_last_event_however_old_that_is():
    old, trace = event("notice", text="old"), "Traceback\n"
    assert text_of("first\n", old, trace, since=NOON + 30) == trace
    assert text_of("plain\n", "lines\n", since=NOON) == "plain\nlines\n"
    followed = [*lines_of([old, trace]), Line(NOON + 40, 0, "", "pause"), *lines_of(["more\n"])]
    said = list(shown(iter(followed), live=False, names={}, since=NOON + 30))
    assert said == [trace, "more\n"]


def test_time_left_may_be_days():
    assert "  25:00:01 left" in text_of(progress(1, eta_seconds=90_001.5))


@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=8
    ),
    st.integers(1, 7),
)
def test_other_lines_come_out_as_they_went_in_however_they_are_cut(lines, size):
    lines = [line for line in lines if not line.startswith("[KFP Executor") and MARK not in line]
    text = "".join(f"{line}\n" for line in lines)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert text_of(*pieces) == text


def test_a_line_that_only_looks_like_an_event_is_shown():
    assert text_of(f"{MARK}{{broken\n") == f"{MARK}{{broken\n"
    assert text_of("no end of line") == "no end of line\n"
