"""A home is moved, copied, called by bytes that are no text, and its clock jumps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rekindle.app.runs import all_runs, find_run
from rekindle.cli.main import invoke
from rekindle.errors import RekindleError, StepError
from rekindle.records import RunRecord, moved
from tests.platforms.local.runs import run, stored


def cached(record: RunRecord) -> dict[str, bool]:
    return {step.name: step.cached for step in record.steps}


def arguments(home: Path, folder: Path) -> dict[str, str]:
    """As the shipped pipeline has them: the home itself, and a place in it inside of JSON."""
    settings = json.dumps({"init_from": str(home / "artifacts/model")})
    return {"home": str(home), "settings": settings, "folder": str(folder)}


def test_in_a_home_that_was_moved_everything_is_cached_and_logs_are_found(
    home: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("odd", home, {"folder": str(folder)}, run_id="one")
    elsewhere = home.rename(home.with_name("home2"))
    record = run("odd", elsewhere, {"folder": str(folder)})
    assert cached(record) == {"odd-text": True, "is-odd": True}
    capsys.readouterr()
    assert invoke(["logs", "one", "--step", "odd-text", "--home", str(elsewhere)]) == 0
    assert "\ufffd" in capsys.readouterr().out


def test_places_in_the_home_count_by_where_they_are_in_it(home: Path, folder: Path) -> None:
    run("placed", home, arguments(home, folder), run_id="one")
    elsewhere = home.rename(home.with_name("home2"))
    (step,) = run("placed", elsewhere, arguments(elsewhere, folder)).steps
    assert step.cached
    assert step.parameters["Output"] == str(elsewhere / "state")
    assert step.artifacts["out"].metadata["beside"] == f"file://{elsewhere}/beside"
    other = arguments(elsewhere, folder) | {"settings": json.dumps({"init_from": "elsewhere"})}
    assert not run("placed", elsewhere, other).steps[0].cached


def test_a_copy_of_a_home_uses_nothing_of_the_original(home: Path, folder: Path) -> None:
    first = run("chain", home, {"folder": str(folder)}, run_id="one")
    copy = home.with_name("copy")
    shutil.copytree(home, copy)
    shutil.rmtree(home / "artifacts")
    record = run("chain", copy, {"folder": str(folder)})
    assert set(cached(record).values()) == {True}
    for shown in (record, stored(copy, "one")):
        artifact = shown.step("make").artifacts["data"]
        assert Path(artifact.uri).is_relative_to(copy)
        assert (Path(artifact.uri) / "a.txt").read_text() == "abc"
    (Path(record.step("make").artifacts["data"].uri) / "a.txt").write_text("abd")
    assert not run("chain", copy, {"folder": str(folder)}).step("make").cached
    assert stored(copy, "one").step("make").log == first.step("make").log.replace(
        str(home), str(copy)
    )


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("/a/home", "/b"),
        ("/a/home/x", "/b/x"),
        ("file:///a/home/x", "file:///b/x"),
        ("sqlite:////a/home/mlflow.db", "sqlite:////b/mlflow.db"),
        ('{"x": "/a/home"}', '{"x": "/b"}'),
        ("/a/home2", "/a/home2"),
        ("/a/home-2/x", "/a/home-2/x"),
        ("/x/a/home", "/x/a/home"),
        ("/a/home.old", "/a/home.old"),
        ("", ""),
    ],
)
def test_only_places_in_the_home_are_taken_for_such(text: str, now: str) -> None:
    value = {"x": [text, 1, None], "y": text}
    assert moved(value, "/a/home", "/b") == {"x": [now, 1, None], "y": now}


def test_a_lone_surrogate_goes_from_step_to_step_and_ends_no_run(home: Path, folder: Path) -> None:
    for _ in range(2):
        record = run("odd", home, {"folder": str(folder)}, run_id="one")
        assert record.step("is-odd").parameters["Output"] is True
        assert record.step("odd-text").parameters["Output"] == "a \ud800 b"
        assert stored(home, "one").step("odd-text").parameters["Output"] == r"a \ud800 b"
    assert (folder / "odd").read_text() == "x"


def test_what_a_step_prints_ends_no_run_whatever_the_locale(home: Path, folder: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    record = run("odd", home, {"folder": str(folder)}, env=env)
    assert "\\ud800 \u4e2d\n".encode() in Path(record.step("odd-text").log).read_bytes()


def test_links_to_themselves_and_names_that_are_no_utf8_may_be_outputs(home: Path) -> None:
    run("tangled", home, {})
    assert cached(run("tangled", home, {})) == {"tangle": True}


def test_a_home_whose_name_is_no_utf8_is_one_like_any_other(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    run("odd", home, {"folder": str(folder)}, run_id="one")
    record = run("odd", home, {"folder": str(folder)})
    assert set(cached(record).values()) == {True}
    capsys.readouterr()
    assert invoke(["logs", "one", "--step", "odd-text", "--home", str(home)]) == 0
    assert invoke(["status", "one", "--json", "--home", str(home)]) == 0
    assert len(find_run(home, "one").steps) == 2


def test_the_latest_run_is_the_one_that_began_last_whatever_the_clock_said(
    home: Path, folder: Path
) -> None:
    run("odd", home, {"folder": str(folder)}, run_id="a")
    record = stored(home, "a")
    future = record.model_copy(update={"started_at": "2030-01-01T00:00:00+00:00"})
    future.write(home / "runs" / "a" / "run.json")
    run("odd", home, {"folder": str(folder)}, run_id="b")
    assert [one.run_id for one in all_runs(home)] == ["a", "b"]
    assert find_run(home, "latest").run_id == "b"
    assert [one.number for one in all_runs(home)] == [1, 2]


@pytest.mark.parametrize(
    ("inodes", "says"),
    [
        (13, "no inodes left"),
        # a record that is being replaced takes one for a moment
        (19, r"No space left on device: .*ephemeral|task\.json: No space left on device"),
        (21, "No space left on device"),
    ],
)
def test_a_disk_without_inodes_is_named_as_the_reason(
    tmp_path: Path, inodes: int, says: str
) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={inodes}", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        with pytest.raises(StepError, match=says):
            run("speaking", tmp_path / "home")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_record_that_cannot_be_read_is_left_out(home: Path, folder: Path) -> None:
    run("odd", home, {"folder": str(folder)}, run_id="a")
    (home / "runs" / "b" / "run.json").mkdir(parents=True)
    assert [one.run_id for one in all_runs(home)] == ["a"]
    with pytest.raises(RekindleError, match="there is no run `b`"):
        find_run(home, "b")
