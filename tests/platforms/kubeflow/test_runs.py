"""Runs looked at, read, stopped and tried again: they really run, behind an API server that is
played."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import PlatformError, UnreachableError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.platforms.kubeflow import client, runs
from rekindle.platforms.kubeflow.client import submit
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.snapshot import ENDED_RUN, RunSnapshot
from rekindle.records import StepRecord
from tests.platforms.local.runs import module
from tests.platforms.marks import mark
from tests.servers.kubeflow.rest import TOKEN, Server, serving
from tests.servers.troubles import Fault

MOST_SECONDS = 120
Served = tuple[Server, KubeflowSpec]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    made = Server(tmp_path / "workflows")
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    with serving(made) as url:
        place = KubeflowSpec(host=url, token="env:KFP_TOKEN")
        # a folder, which KFP has not: it stands for a store
        yield made, place.model_copy(update={"pipeline_root": f"file://{tmp_path}/root"})
        for workflow in made.workflows.values():
            workflow.terminate()


def until(place: KubeflowSpec, id: str, wanted: Any) -> RunSnapshot:
    end = time.monotonic() + MOST_SECONDS
    while not wanted(seen := runs.describe(place, id)):
        assert time.monotonic() < end, seen
        time.sleep(0.05)
    return seen


def step(seen: RunSnapshot, name: str) -> StepRecord:
    return next(one for one in seen.steps if one.name == name)


@pytest.mark.slow
def test_a_run_fails_is_tried_again_read_and_stopped(server: Served, tmp_path: Path) -> None:
    api, place = server
    flag, stay = tmp_path / "flag", tmp_path / "stay"
    stay.touch()
    text = compile_function(module("watched").watched)
    made = compile(text, read(text), {"flag": str(flag), "stay": str(stay)}, place)
    id = submit(made, place, mark("a")).id

    failed = until(place, id, lambda seen: seen.status in ENDED_RUN)
    counted = step(failed, "count")
    assert (failed.status, counted.status, counted.attempts) == ("failed", "failed", 1)
    assert counted.started_at.endswith("+00:00")
    assert "ValueError: there is no flag" in runs.read_log(place, id, counted, "").text

    flag.touch()
    api.faults = [Fault("POST runs:retry", 0, after=True)]
    assert runs.resume(made, place, id, mark("a-1")).id == id
    seen_run = until(
        place, id, lambda seen: any(s.name == "tell" and s.status == "running" for s in seen.steps)
    )
    assert (seen_run.status, step(seen_run, "count").status) == ("running", "succeeded")
    assert runs.resume(made, place, id, mark("a-1")).anew is False
    end, said, cursor = time.monotonic() + MOST_SECONDS, "", ""
    while "line 6" not in said:
        piece = runs.read_log(place, id, step(seen_run, "tell"), cursor)
        said, cursor = said + piece.text, piece.cursor
        assert time.monotonic() < end, said
    assert said.count("line 3\n") == 1, "what was read is not read again"
    assert runs.read_log(place, id, StepRecord(name="x", log="no-such-pod-7"), "5").cursor == "5"
    runs.cancel(place, id)
    stopped = until(place, id, lambda seen: seen.status in ENDED_RUN)
    assert (stopped.status, step(stopped, "tell").status) == ("cancelled", "cancelled")
    runs.cancel(place, id)
    assert api.calls["POST runs:terminate"] == 1

    stay.unlink()
    runs.resume(made, place, id, mark("a-2"))
    done = until(place, id, lambda seen: seen.status in ENDED_RUN)
    assert {one.name: one.status for one in done.steps} == {
        "count": "succeeded",
        "tell": "succeeded",
        "condition-1/never": "skipped",
    }
    assert len(api.runs) == 1
    with pytest.raises(PlatformError, match="the run is SUCCEEDED"):
        runs.resume(made, place, id, mark("a-3"))
    assert [line for line in api.refused if "not found" not in line] == []


def test_a_server_that_does_not_answer_may_be_asked_later(server: Served) -> None:
    api, place = server
    api.faults = [Fault("GET runs", 503) for _ in range(4)]
    with pytest.raises(UnreachableError):
        runs.describe(place, "x")
    with pytest.raises(PlatformError, match="KFP has no run x") as caught:
        runs.describe(place, "x")
    assert not isinstance(caught.value, UnreachableError)


@pytest.mark.slow
def test_a_run_whose_workflow_is_gone_after_an_hour_is_shown_and_tried_again(
    server: Served, tmp_path: Path
) -> None:
    """KFP has its last report, and makes another Workflow of it; pods are gone with their logs."""
    api, place = server
    flag = tmp_path / "flag"
    text = compile_function(module("watched").watched)
    values = {"flag": str(flag), "stay": str(tmp_path / "none")}
    made = compile(text, read(text), values, place)
    id = submit(made, place, mark("a")).id
    failed = until(place, id, lambda seen: seen.status in ENDED_RUN)
    assert failed.status == "failed"

    api.workflows[id].expire()
    assert runs.describe(place, id) == failed
    assert runs.read_log(place, id, step(failed, "count"), "").text == ""

    flag.touch()
    runs.resume(made, place, id, mark("a"))
    done = until(place, id, lambda seen: seen.status in ENDED_RUN)
    assert done.status == "succeeded"
    assert "line 6" in runs.read_log(place, id, step(done, "tell"), "").text
