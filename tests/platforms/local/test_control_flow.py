"""Loops and exit handlers as a run records them; their outputs are compared with kfp.local's in
test_same_as_kfp_local.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.errors import StepError, UnsupportedError
from rekindle.platforms.local.execute import ignored
from rekindle.spec.installed import platform_names
from tests.platforms.local.runs import graph, run, stored
from tests.support.results import outputs


def test_each_turn_has_steps_of_its_own_and_all_come_from_the_cache_again(home: Path) -> None:
    pipeline = graph("loop_over_an_output", "same")
    first, second = (run(pipeline, home) for _ in range(2))
    assert [step.name for step in first.steps] == [
        "words",
        "for-loop-1/0/greet",
        "for-loop-1/0/greet-2",
        "for-loop-1/1/greet",
        "for-loop-1/1/greet-2",
        "for-loop-1/2/greet",
        "for-loop-1/2/greet-2",
        "joined",
    ]
    assert [step.cached for step in first.steps] == [False] * 8
    assert [step.cached for step in second.steps] == [True] * 8
    assert outputs(pipeline, first) == outputs(pipeline, second)


def test_a_loop_over_nothing_says_so_and_gives_an_empty_list(home: Path) -> None:
    pipeline = graph("loop_over_an_argument", "same")
    record = run(pipeline, home, {"items": []})
    assert record.step("for-loop-1/greet").reason == "there is nothing to loop over"
    assert outputs(pipeline, record) == {"Output": ""}


def test_an_exit_handler_is_told_that_all_went_well(home: Path, folder: Path) -> None:
    record = run("watched", home, {"folder": str(folder)})
    assert record.status == "succeeded"
    assert (folder / "status").read_text() == "SUCCEEDED exit-handler-1 None"


def test_an_exit_handler_runs_after_a_failure_and_is_told_of_it(home: Path, folder: Path) -> None:
    with pytest.raises(StepError, match="bad is bad"):
        run("watched", home, {"folder": str(folder), "text": "bad"}, run_id="r")
    record = stored(home, "r")
    assert record.status == "failed"
    assert (folder / "status").read_text() == "FAILED exit-handler-1 ValueError: bad is bad"
    found = {step.name: (step.status, step.reason) for step in record.steps}
    assert found["exit-handler-1/count"] == ("skipped", "`exit-handler-1/fail-if` failed")
    assert found["note"][0] == "succeeded"


def test_what_ignores_a_failure_runs_and_so_does_what_follows_it(home: Path, folder: Path) -> None:
    with pytest.raises(StepError, match="bad is bad"):
        run("tolerant", home, {"folder": str(folder)}, run_id="r")
    assert sorted(path.name for path in folder.iterdir()) == ["after", "later"]
    found = {step.name: (step.status, step.reason) for step in stored(home, "r").steps}
    assert found["count-3"] == ("skipped", "`fail-if` failed")


def test_a_turn_that_fails_ends_its_loop_and_the_exit_handler_runs(
    home: Path, folder: Path
) -> None:
    with pytest.raises(StepError, match="bad is bad"):
        run("one_turn_fails", home, {"folder": str(folder)}, run_id="r")
    assert sorted(path.name for path in folder.iterdir()) == ["good", "status"]
    assert (folder / "status").read_text().startswith("FAILED exit-handler-1 ValueError: bad")
    skipped = {step.name for step in stored(home, "r").steps if step.status == "skipped"}
    turns = "exit-handler-1/for-loop-3"
    assert skipped == {f"{turns}/1/count", f"{turns}/2/fail-if", f"{turns}/2/count"}


def test_what_only_a_cluster_has_is_refused_all_at_once_before_anything_runs(home: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        run("wants_a_volume", home, {"folder": "x"})
    told = [str(problem) for problem in caught.value.problems]
    assert len(told) == 2
    assert "`count` uses persistent volume claims, which local refuses" in told[0]
    assert "executors.exec-count.pvcMount" in told[0]
    # of the platforms that are installed, Kubeflow alone mounts volumes
    way_out = "run the pipeline on kubeflow" if "kubeflow" in platform_names() else "take it out"
    assert way_out in told[0]
    assert "secrets as files" in told[1]
    assert not home.exists()


def test_secrets_of_a_cluster_are_named_before_the_run() -> None:
    said = ignored(graph("knows_a_secret"))
    assert str(said[0]) == (
        "Secrets of a cluster are not read, the variables come from this environment: count"
    )
