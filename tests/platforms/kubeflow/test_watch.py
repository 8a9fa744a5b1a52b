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
from rekindle.platforms.kubeflow import client, watch
from rekindle.platforms.kubeflow.client import submit
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.watch import OVER, Look
from rekindle.records import StepRecord
from rekindle.spec.places import KubeflowSpec
from tests.platforms.local.runs import module
from tests.platforms.marks import mark
from tests.servers.kfp_rest import TOKEN, Server, serving
from tests.servers.troubles import Fault

MOST_SECONDS = 30
Served = tuple[Server, KubeflowSpec]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Served]:
    made = Server(tmp_path / "workflows")
    monkeypatch.setenv("KFP_TOKEN", TOKEN)
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    with serving(made) as url:
        yield (
            made,
            KubeflowSpec(host=url, token="env:KFP_TOKEN", pipeline_root=f"file://{tmp_path}/root"),
        )
        for workflow in made.workflows.values():
            workflow.terminate()


def until(place: KubeflowSpec, id: str, wanted: Any) -> Look:
    end = time.monotonic() + MOST_SECONDS
    while not wanted(seen := watch.look(place, id)):
        assert time.monotonic() < end, seen
        time.sleep(0.05)
    return seen


def step(seen: Look, name: str) -> StepRecord:
    return next(one for one in seen.steps if one.name == name)


@pytest.mark.slow
def test_a_run_fails_is_tried_again_read_and_stopped(server: Served, tmp_path: Path) -> None:
    api, place = server
    flag, stay = tmp_path / "flag", tmp_path / "stay"
    stay.touch()
    text = compile_function(module("watched").watched)
    made = compile(text, read(text), {"flag": str(flag), "stay": str(stay)}, place)
    id = submit(made, place, mark("a")).id

    failed = until(place, id, lambda seen: seen.status in OVER)
    counted = step(failed, "count")
    assert (failed.status, counted.status, counted.attempts) == ("failed", "failed", 1)
    assert counted.started_at.endswith("+00:00")
    assert "ValueError: there is no flag" in watch.read_log(place, id, counted, "").text

    flag.touch()
    api.faults = [Fault("POST runs:retry", 0, after=True)]
    assert watch.resume(made, place, id, mark("a-1")).id == id
    runs = until(
        place, id, lambda seen: any(s.name == "tell" and s.status == "running" for s in seen.steps)
    )
    assert (runs.status, step(runs, "count").status) == ("running", "succeeded")
    assert watch.resume(made, place, id, mark("a-1")).anew is False
    end, said, cursor = time.monotonic() + MOST_SECONDS, "", ""
    while "line 6" not in said:
        piece = watch.read_log(place, id, step(runs, "tell"), cursor)
        said, cursor = said + piece.text, piece.cursor
        assert time.monotonic() < end, said
    assert said.count("line 3\n") == 1, "what was read is not read again"
    assert watch.read_log(place, id, StepRecord(name="x", log="no-such-pod-7"), "5").cursor == "5"
    watch.cancel(place, id)
    stopped = until(place, id, lambda seen: seen.status in OVER)
    assert (stopped.status, step(stopped, "tell").status) == ("cancelled", "cancelled")
    watch.cancel(place, id)
    assert api.calls["POST runs:terminate"] == 1

    stay.unlink()
    watch.resume(made, place, id, mark("a-2"))
    done = until(place, id, lambda seen: seen.status in OVER)
    assert {one.name: one.status for one in done.steps} == {
        "count": "succeeded", "tell": "succeeded", "condition-1/never": "skipped",
    }  # fmt: skip
    assert len(api.runs) == 1
    with pytest.raises(PlatformError, match="the run is SUCCEEDED"):
        watch.resume(made, place, id, mark("a-3"))
    assert [(one.mark, one.placed.id) for one in watch.found(made, place)] == [(mark("a"), id)]
    assert [line for line in api.refused if "not found" not in line] == []


def test_a_server_that_does_not_answer_may_be_asked_later(server: Served) -> None:
    api, place = server
    api.faults = [Fault("GET runs", 503) for _ in range(4)]
    with pytest.raises(UnreachableError):
        watch.look(place, "x")
    with pytest.raises(PlatformError, match="what is there") as caught:
        watch.look(place, "x")
    assert not isinstance(caught.value, UnreachableError)
