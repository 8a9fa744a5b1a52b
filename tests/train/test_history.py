"""The loss curve and the ledger: cut, damaged, carried along with a checkpoint."""

import gzip
import json
import os

import pytest

from rekindle.errors import CheckpointError
from rekindle.records import HistoryRow
from rekindle.train import manifest
from rekindle.train.dcp import File
from rekindle.train.history import ExampleLedger, History, forget_steps, read_history
from rekindle.train.manifest import Checkpoint
from tests.support.ledger import read_ledger


def rows(*steps):
    return "".join(
        f'{{"step":{s},"epoch":0,"loss":{s},"lr":0,"grad_norm":0,"samples_per_second":1}}\n'
        for s in steps
    )


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        (rows(1, 2, 3, 4, 5), 0),
        (rows(1, 2, 3), 2),
        (rows(1, 2, 3, 4, 5)[:-70], 1),
        (rows(2, 3, 4, 5), 1),
        (rows(1, 2) + "no JSON\n" + rows(4, 5), 1),
        (rows(1, 2) + "\udcff\udcfe\n" + rows(4, 5), 1),
        (rows(1, 2, 3) + '{"step": 4}\n' + rows(5, 6), 1),
        (rows(1, 2, 3) + "\n[]\n" + rows(4, 5), 0),
        ("", 5),
    ],
)
def test_a_curve_that_was_cut_or_damaged_is_repaired_and_said_to_lack_steps(
    content, missing, tmp_path
):
    history = History(tmp_path / "history.jsonl")
    history.path.write_text(content, errors="surrogateescape")
    problem = history.resume(5)
    assert problem.startswith(f"the loss curve lacks {missing} of 5 steps" if missing else "")
    assert bool(problem) == bool(missing)
    history.append(HistoryRow.model_validate_json(rows(6)))
    assert len(list(read_history(history.path))) == 6 - missing
    assert all(json.loads(line) for line in history.path.read_text().splitlines())


def test_a_validation_that_came_late_is_added_to_the_last_row_only(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.write_text(rows(1, 2, 3))
    history.amend(2, {"validation_loss": 9.0})
    history.amend(3, {"validation_loss": 0.5, "validation_accuracy": 0.75})
    found = [
        (row.step, row.validation_loss, row.validation_accuracy)
        for row in read_history(history.path)
    ]
    assert found == [(1, None, None), (2, None, None), (3, 0.5, 0.75)]


def test_a_ledger_with_a_damaged_line_says_so_and_is_repaired(tmp_path):
    ledger = ExampleLedger(tmp_path, 0)
    for step in (1, 2, 3):
        ledger.append(step, [f"id-{step}"])
    with ledger.path.open("ab") as file:
        file.write(b"\xff\n{}\n")
    assert forget_steps(tmp_path, after=2).startswith("2 line(s) of the ledger")
    assert forget_steps(tmp_path, after=2) == ""
    assert read_ledger(tmp_path) == {1: ["id-1"], 2: ["id-2"]}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (gzip.compress(b"x" * 101), "larger than 100 bytes"),
        (b"no gzip", "cannot be read: Not a gzipped file"),
        (gzip.compress(os.urandom(90))[:-20], "cannot be read"),
        (gzip.compress(b"\xff"), "cannot be read: 'utf-8' codec"),
    ],
    ids=["too large", "no gzip", "cut", "no text"],  # the time and chance are in the contents
)
def test_a_curve_in_a_checkpoint_that_is_too_large_or_damaged_is_refused(
    content, error, tmp_path, monkeypatch
):
    monkeypatch.setattr(manifest, "_MOST_HISTORY_BYTES", 100)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / manifest.HISTORY).write_bytes(content)
    found = Checkpoint(str(tmp_path), "step-1", 1, {}, (File(manifest.HISTORY, 1, ""),))
    with pytest.raises(CheckpointError, match=error):
        found.history()
    (tmp_path / "step-1" / manifest.HISTORY).write_bytes(gzip.compress(b"x" * 100))
    assert found.history() == "x" * 100


def test_a_curve_that_came_with_a_checkpoint_replaces_what_is_here(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.path.write_text(rows(1, 2, 3))
    history.resume(2)
    assert [row.step for row in read_history(history.path)] == [1, 2]
    history.resume(5, rows(1, 2, 3, 4, 5, 6))
    assert [row.step for row in read_history(history.path)] == [1, 2, 3, 4, 5]
    fresh = History(tmp_path / "elsewhere" / "history.jsonl")
    fresh.resume(2, rows(1, 2))
    assert [row.step for row in read_history(fresh.path)] == [1, 2]
