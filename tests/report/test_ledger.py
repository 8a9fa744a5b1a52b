"""The list of runs comes from an index, which is never believed against the records."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from rekindle.app.runs import all_runs, find_run
from rekindle.cli.main import invoke
from rekindle.errors import RequestError
from rekindle.outputs import Runs
from rekindle.records import RunRecord
from rekindle.report.index import render_index
from rekindle.report.ledger import INDEX, Entry, ledger
from tests.report.many import many

COUNT = 12


@pytest.fixture
def home(tmp_path: Path) -> Path:
    many(tmp_path / "home", COUNT)
    return tmp_path / "home"


def from_records(home: Path) -> list[Entry]:
    """What the ledger has to be, made without an index."""
    found = [Entry.of(RunRecord.read(path)) for path in (home / "runs").glob("*/run.json")]
    return sorted(found, key=lambda entry: (entry.number, entry.moment, entry.run_id))


def test_with_an_index_no_record_is_read_again(home: Path) -> None:
    first = ledger(home)
    assert list(first.entries) == from_records(home)
    for path in (home / "runs").glob("*/run.json"):  # in place, all times put back
        before = path.stat()
        path.write_bytes(b"x" * before.st_size)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(ledger(home).unreadable) == COUNT, "the ctime says that they were written"


def test_what_changed_is_read_again(home: Path) -> None:
    ledger(home)
    path = home / "runs" / "digits-000005" / "run.json"
    RunRecord.read(path).model_copy(update={"status": "failed"}).write(path)
    shutil.rmtree(home / "runs" / "digits-000006")
    again = ledger(home)
    assert list(again.entries) == from_records(home)
    assert [entry.status for entry in again.entries].count("failed") == 1
    assert len(again.entries) == COUNT - 1


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_index_changes_nothing(home: Path, seed: int) -> None:
    ledger(home)
    index, chance = home / "runs" / INDEX, random.Random(seed)
    content = bytearray(index.read_bytes())
    for _ in range(3):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    index.write_bytes(content[: chance.choice([len(content), chance.randrange(len(content))])])
    assert list(ledger(home).entries) == from_records(home)
    assert list(ledger(home).entries) == from_records(home)


def test_an_index_that_cannot_be_written_is_done_without(home: Path) -> None:
    (home / "runs" / INDEX).mkdir()
    assert list(ledger(home).entries) == from_records(home)


def test_runs_says_the_same_with_and_without_an_index(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for _ in range(2):
        assert invoke(["runs", "--json", f"--home={home}"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    rows = Runs.model_validate(answers[0]).runs
    assert [row.run_id for row in rows] == [run.run_id for run in all_runs(home)][::-1]
    assert all(Path(row.card).parent.is_dir() for row in rows)
    assert invoke(["runs", f"--home={home}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "started", "status", "time", "metric", "gate", "model"]
    run, _, _, status, *_ = lines[1].split()
    assert (run, status) == ("digits-000012", "succeeded")
    assert find_run(home, "digits-000012").run_id == find_run(home, "latest").run_id


def test_a_version_is_found_by_the_run_that_made_it(home: Path) -> None:
    models = [(entry.run_id, entry.summary["model"]) for entry in ledger(home).entries]
    made = [(run_id, model) for run_id, model in models if model]
    assert made
    first = {(model["name"], model["version"]): run_id for run_id, model in reversed(made)}
    for (name, version), run_id in first.items():
        assert find_run(home, f"{name}@{version}").run_id == run_id
    with pytest.raises(RequestError, match="there is no run `digits@999`"):
        find_run(home, "digits@999")


def test_older_runs_are_on_pages_that_a_new_run_does_not_change(tmp_path: Path) -> None:
    home = tmp_path / "home"
    many(home, 620)
    render_index(home)
    pages = {path.name: path.read_text() for path in home.glob("index*.html")}
    assert {name: text.count('<span class="name">') for name, text in pages.items()} == {
        "index-1.html": 200,
        "index-2.html": 200,
        "index.html": 220,
    }
    assert 'href="index-2.html"' in pages["index.html"]
    assert 'href="index-1.html"' in pages["index-2.html"]
    written = {name: (home / name).stat().st_mtime_ns for name in pages}
    path = home / "runs" / "digits-000100" / "run.json"
    RunRecord.read(path).model_copy(update={"status": "failed"}).write(path)
    ledger(home)  # another reader sees it first
    render_index(home)
    changed = [name for name in pages if (home / name).stat().st_mtime_ns != written[name]]
    assert sorted(changed) == ["index-1.html", "index.html"]
