"""The reason of a failure, read back from logs as steps really write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rekindle.launch.events import error_in_log


def log_of(code: str, *more: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True)
    return done.stdout + done.stderr


CHAIN = "try:\n  1/0\nexcept ZeroDivisionError as e:\n  raise RuntimeError('outer')"
TYPED = "from rekindle.errors import DataError\nraise DataError('bad', where='f.csv:3', fix='look')"
LOGS = {
    "raise ValueError('no luck')": ("ValueError", "no luck"),
    "raise ValueError('two\\nlines\\n  more')": ("ValueError", "two\nlines\n  more"),
    "raise KeyError": ("KeyError", ""),
    "import json; json.loads('x')": (
        "JSONDecodeError",
        "Expecting value: line 1 column 1 (char 0)",
    ),
    CHAIN: ("RuntimeError", "outer"),
    CHAIN + " from e": ("RuntimeError", "outer"),
    "class A:\n  class Odd(Exception): pass\nraise A.Odd('nested')": ("Odd", "nested"),
    TYPED: ("DataError", "bad\n  where: f.csv:3\n  fix:   look"),
    "print('a'); print(); print('b'); raise SystemExit(3)": ("", "a\nb"),
    "": ("", ""),
}


LOST = (
    "{said}\nE1125 21:29:44.340000 7914 torch/distributed/elastic/multiprocessing/api.py:1002] failed"
    " (exitcode: 1) local_rank: 0 (pid: 7927) of binary: python\n{ours}"
)
OURS = "from rekindle.errors import StepError\nraise StepError('rank 0 ended with exit code 1; after 3 restarts', fix='look')"


def test_a_peer_that_lost_the_rank_at_fault_is_not_the_reason() -> None:
    """As torch prefixes tracebacks where ranks have met."""
    failed, lost = (
        log_of("raise ValueError('no luck')"),
        log_of("raise RuntimeError('Connection closed by peer')"),
    )
    said = "".join(
        f"[rank{rank}]: {line}\n"
        for rank, text in ((0, failed), (1, lost))
        for line in text.splitlines()
    )
    found = error_in_log(LOST.format(said=said, ours=log_of(OURS)))[1]
    assert found.startswith("rank 0 ended with exit code 1: ValueError: no luck; after 3 restarts")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import sys; print('epoch 1'); sys.stdout.flush(); raise SystemExit('no rate')",
            "no rate",
        ),
        ("raise ValueError('no luck')", "ValueError: no luck"),
    ],
)
def test_what_a_script_said_before_it_left_is_the_reason_that_its_rank_ended(code, words) -> None:
    stopped = "W1125 21:29:44.1 7914 torch/distributed/elastic/x.py:1] Sending process 1 SIGTERM"
    log = LOST.format(said=f"{log_of(code)}{stopped}", ours=log_of(OURS))
    told = f"rank 0 ended with exit code 1: {words}; after 3 restarts\n  fix:   look"
    assert error_in_log(log) == ("StepError", told)
    before = (
        "  fix: see the step's log\n::rekindle {'text': '...; restarting all ranks (3 of 3)'}\n"
    )
    silent = LOST.format(said=f"{log_of(code)}{before}", ours=log_of(OURS))
    assert error_in_log(silent)[1].startswith("rank 0 ended with exit code 1; after 3"), "no word"
    by_mpirun = f"{log_of(code)}{'-' * 74}\nmpirun detected that one or more processes exited\n{log_of(OURS)}"
    traced = words if "raise ValueError" in code else ""
    assert error_in_log(by_mpirun)[1].startswith(
        f"rank 0 ended with exit code 1{f': {traced}' if traced else ''}; after 3"
    )
    assert error_in_log(log_of(OURS))[1].startswith("rank 0 ended with exit code 1; after 3")


@pytest.mark.parametrize(("code", "expected"), LOGS.items())
def test_the_last_exception_and_its_whole_message(code: str, expected: tuple[str, str]) -> None:
    assert error_in_log(log_of(code)) == expected


def test_events_and_log_lines_after_a_traceback_are_no_part_of_the_message() -> None:
    log = log_of("raise ValueError('one')")
    after = "::rekindle {}\n2026-01-01 10:00:00 something\nW1121 09:00:00.123 torch\n"
    assert error_in_log("before\n" + log + after) == ("ValueError", "one")


def test_a_messenger_is_not_the_reason() -> None:
    run = "import subprocess as s, sys; s.run([sys.executable, '-c', {!r}], check=True)"
    child = run.format("raise ValueError(7)")
    assert error_in_log(log_of(child)) == ("ValueError", "7")
    alone = "import subprocess; subprocess.run(['false'], check=True)"
    assert error_in_log(log_of(alone))[0] == "CalledProcessError"


RANKS = """\
[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "train.py", line 3, in <module>
[rank0]:   File "train.py", line 3, in <module>
[rank0]:     main()
[rank1]:     main()
[rank0]: ValueError: loss is NaN
[rank0]:   at step 3
[rank1]: ValueError: loss is NaN
[rank1]:   at step 3
W1121 09:12:33.123000 77 torch/distributed/elastic/multiprocessing/api.py:908] Sending process 80
E1121 09:12:33.123000 77 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1)
Traceback (most recent call last):
  File "/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
"""


def test_torchrun_does_not_hide_the_reason() -> None:
    assert error_in_log(RANKS) == ("ValueError", "loss is NaN\n  at step 3")


def test_kfps_dump_of_its_input_is_not_the_reason() -> None:
    log = (
        "[KFP Executor 2026-11-21 10:00:00,000 INFO]: Got executor_input:\n{\n"
        '    "inputs": {}\n}\nlast words\n'
    )
    assert error_in_log(log) == ("", "last words")


def test_a_torn_traceback_does_not_confuse() -> None:
    assert error_in_log("Traceback (most recent call last):\n  File x")[0] == ""
    assert error_in_log("Traceback (most recent call last):\n  File x\n??? !!!") == (
        "",
        "Traceback (most recent call last):\n  File x\n??? !!!",
    )
