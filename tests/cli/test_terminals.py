"""Terminals of 20 to 120 columns: pyte, a terminal in Python, shows what a command writes to a real pseudo-terminal, where
nothing that matters may be cut. Pipes, dumb terminals and those without UTF-8 get plain text."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
import pytest

from rekindle.app.runs import summary
from rekindle.cli.run import conclude
from rekindle.records import RunRecord
from tests.quick import first
from tests.report.homes import Home
from tests.report.runs import promoted_digits, refused_reviews

REKINDLE = [sys.executable, "-m", "rekindle.cli.main"]
DIGITS, REVIEWS, BROKEN = (
    "20261121-090800-digits-a1b2",
    "20261121-101500-reviews-c3d4",
    "20261122-080000-broken-e5f6",
)
PIPELINE = """
from kfp import dsl

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def make_the_numbers() -> int:
    return 4

@dsl.component(base_image="python:3.11", install_kfp_package=False)
def wait_for_a_file(number: int, folder: str):
    import pathlib, time
    pathlib.Path(folder, "waits").touch()
    while not pathlib.Path(folder, "go").exists():
        time.sleep(0.01)

@dsl.pipeline(name="two")
def two(folder: str):
    wait_for_a_file(number=make_the_numbers().output, folder=folder)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("terminals") / "home"
    made = Home(folder)
    assert promoted_digits(made).run_id == DIGITS
    assert refused_reviews(made).run_id == REVIEWS
    made.run(
        run_id=BROKEN,
        name="broken",
        status="failed",
        number=9,
        seconds=7500.0,
        started_at="2026-11-22T08:00:00+00:00",
    )
    return folder


class Terminal:
    """A command on a terminal of so many columns."""

    def __init__(self, words, columns, cwd=None, **environment):
        self.columns, self.screen = columns, pyte.Screen(columns, 400)
        self.written, self.stream = b"", pyte.ByteStream(self.screen)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        unset = ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR", "CI")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            [*REKINDLE, *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=cwd,
            env={**kept, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        os.close(slave)

    def read(self):
        """The next piece; False at the end."""
        try:
            piece = os.read(self.master, 4096)
        except OSError:  # the other end is closed
            return False
        self.written += piece
        self.stream.feed(piece)
        return bool(piece)

    def finish(self):
        """Its exit code."""
        while self.read():
            pass
        os.close(self.master)
        return self.process.wait(30)

    @property
    def rows(self):
        return [row.rstrip() for row in self.screen.display if row.strip()]

    @property
    def flat(self):
        """All text; words that the right margin breaks are whole."""
        return "".join(self.screen.display)


def on(columns, words, code=0, **environment):
    terminal = Terminal(words, columns, **environment)
    assert terminal.finish() == code, terminal.rows
    return terminal


@pytest.mark.slow
@pytest.mark.parametrize("columns", first(1, [20, 120, 60, 80]))
def test_lists_and_tables_cut_nothing(home, columns):
    listed = on(columns, ["runs", f"--home={home}"]).flat
    for text in (
        DIGITS,
        REVIEWS,
        BROKEN,
        "succeeded",
        "failed",
        "2 h 5 min",
        "promoted",
        "refused",
        "digits v",
    ):
        assert text in listed
    steps = on(columns, ["status", DIGITS, f"--home={home}"])
    narrow = "".join(row[3:10].strip() for row in steps.rows)  # where names are folded
    steps = narrow if columns == 20 else steps.flat
    for text in ("fingerprint", "ingest", "shard", "finetune", "evaluate", "register"):
        assert text in steps
    compared = on(columns, ["compare", DIGITS, REVIEWS, f"--home={home}"])
    for text in ("accuracy", "macro_f1", "promoted", "has no scores by example"):
        assert text in re.sub(r" +", " ", compared.flat)


def test_each_reason_of_a_refusal_has_its_line(home, capsys):
    record = RunRecord.read(home / "runs" / REVIEWS / "run.json")
    result = summary(record, home)
    conclude(record, result)
    (said,) = re.findall(
        r"^gate    refused: (.*?)^\w", capsys.readouterr().out, re.MULTILINE | re.DOTALL
    )
    assert [line.strip() for line in said.splitlines()] == result.gate.reason.split("; ")
    assert len(said.splitlines()) > 1


@pytest.mark.parametrize("columns", first(1, [20, 60, 120]))
def test_an_error_is_whole(home, columns):
    said = on(columns, ["status", "unknown-run", f"--home={home}"], 2).flat
    for text in ("error: ", "unknown-run", f"the latest is {BROKEN}", "`rekindle gc` left"):
        assert text in said


@pytest.mark.slow
@pytest.mark.parametrize("columns", first(1, [60, 80, 120]))
def test_a_run_leaves_whole_lines_and_no_trace_of_its_live_table(tmp_path, columns):
    (tmp_path / "two.py").write_text(PIPELINE)
    (tmp_path / "go").touch()
    terminal = Terminal(
        ["run", "two.py:two", "--set", f"arguments.folder={tmp_path}"], columns, tmp_path
    )
    assert terminal.finish() == 0, terminal.rows
    for step in ("make-the-numbers", "wait-for-a-file"):
        assert sum(step in row for row in terminal.rows) == 1, terminal.rows
    assert not [row for row in terminal.rows if "steps done" in row or "…" in row], terminal.rows
    assert "\x1b[?25h" in terminal.written.decode()  # the cursor is back


@pytest.mark.slow
def test_control_c_leaves_the_table_and_the_cursor(tmp_path):
    (tmp_path / "two.py").write_text(PIPELINE)
    terminal = Terminal(
        ["run", "two.py:two", "--set", f"arguments.folder={tmp_path}"], 80, tmp_path
    )
    try:
        while not (tmp_path / "waits").exists():
            assert terminal.read()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.finish() == 130, terminal.rows
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(terminal.process.pid, signal.SIGKILL)
    rows = "\n".join(terminal.rows)
    assert re.search(r"✓ +make-the-numbers", rows), rows
    assert re.search(r"■ +wait-for-a-file", rows), rows
    assert "interrupted" in rows
    assert "rekindle resume" in rows or "same command" in rows, rows
    assert terminal.written.decode().rindex("\x1b[?25h") > terminal.written.decode().rindex(
        "\x1b[?25l"
    )


@pytest.mark.slow
def test_a_progress_line_is_redrawn_in_place(tmp_path):
    """While a step runs there is one table, however often it was drawn."""
    (tmp_path / "two.py").write_text(PIPELINE)
    terminal = Terminal(
        ["run", "two.py:two", "--set", f"arguments.folder={tmp_path}"], 80, tmp_path
    )
    while not (tmp_path / "waits").exists():
        assert terminal.read()
    until = time.monotonic() + 30
    while terminal.written.count(b"steps done") < 6:
        assert terminal.read()
        assert time.monotonic() < until
    while not terminal.rows[-1].startswith("1 of 2 steps done"):
        assert terminal.read()
    assert sum("steps done" in row for row in terminal.rows) == 1
    (tmp_path / "go").touch()
    assert terminal.finish() == 0, terminal.rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        pytest.param({"NO_COLOR": "1"}, marks=pytest.mark.slow),
        {"TERM": "dumb"},
        pytest.param(
            {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}, marks=pytest.mark.slow
        ),
    ],
    ids=["NO_COLOR", "dumb", "ascii"],
)
def test_plain_terminals_get_plain_text(home, environment):
    for words, code in ((["runs"], 0), (["status", REVIEWS], 0), (["status", "unknown-run"], 2)):
        terminal = on(80, [*words, f"--home={home}"], code, **environment)
        assert terminal.rows
        if "PYTHONIOENCODING" in environment:
            assert terminal.written.isascii()
        else:
            assert b"\x1b[3" not in terminal.written


def test_a_pipe_gets_whole_lines_without_colour(home):
    for words in (["runs"], ["status", DIGITS], ["compare", DIGITS, REVIEWS]):
        done = subprocess.run(
            [*REKINDLE, *words, f"--home={home}"], capture_output=True, check=True
        )
        assert b"\x1b" not in done.stdout + done.stderr
    listed = subprocess.run(
        [*REKINDLE, "runs", f"--home={home}"], capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        "run",
        BROKEN,
        REVIEWS,
        DIGITS,
    ]


def test_a_reader_that_leaves_ends_nothing_with_a_traceback(home):
    command = f"{' '.join(REKINDLE)} runs --home={home} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr


def test_an_option_that_is_not_there_is_an_error_like_others(home):
    said = on(80, ["runs", "--colour", f"--home={home}"], 2).rows
    assert said[0].startswith("error: No such option"), said
    assert any("see `rekindle runs --help`" in row for row in said)
