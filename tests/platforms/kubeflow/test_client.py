"""Runs and recurring runs behind an API server: KFP's own client, over HTTP, against a strict one that
is played here."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from pathlib import Path

import pytest

from rekindle.errors import PlatformError, RequestError, SpecError, UnreachableError
from rekindle.ir.compile import compile_function
from rekindle.ir.read.pipeline import read
from rekindle.masking import masked
from rekindle.outputs import PlannedStep
from rekindle.platforms.kubeflow import client, doctor, runs, schedule
from rekindle.platforms.kubeflow.client import run_name, submit
from rekindle.platforms.kubeflow.compile import compile
from rekindle.platforms.kubeflow.platform import Kubeflow
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.records import StepRecord
from rekindle.spec.model import ScheduleSpec
from tests.platforms.local.runs import module
from tests.platforms.marks import mark
from tests.servers.troubles import Fault
from tests.support.kubeflow_client import IMAGE, Served, definition
from tests.support.kubeflow_client import server as server


def test_a_run_is_there_and_once_for_one_submission(server: Served) -> None:
    api, place = server
    made = definition()
    placed = submit(made, place, mark("a"))
    assert placed.anew
    assert placed.url == f"{place.host}/#/runs/details/{placed.id}"
    run = api.runs[placed.id]
    assert run["display_name"] == run_name(made, "a")
    assert run["service_account"] == "pipeline-runner"
    again = submit(made, place, mark("a"))
    assert (again.id, again.anew) == (placed.id, False)
    others = {submit(made, place, mark("b")).id, submit(definition("b"), place, mark("a")).id}
    assert api.runs.keys() == {placed.id, *others}
    (experiment,) = api.experiments.values()
    assert experiment["display_name"] == "chain"
    assert api.refused == []


def test_of_two_runs_of_one_second_both_submissions_keep_the_same(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of one second is by chance: the later run may come first."""
    api, place = server
    api.in_seconds = True

    def submit_as_another_process(_: float) -> None:
        (body,) = [dict(run) for run in api.runs.values()]
        body = {key: body[key] for key in ("display_name", "experiment_id", "pipeline_spec")}
        api.calls["POST runs"] += 1  # of which the fake makes its ids
        api.create_run({**body, "runtime_config": {}})
        (ours, theirs) = api.runs
        api.runs[theirs]["created_at"] = api.runs[ours]["created_at"]

    monkeypatch.setattr(client.time, "sleep", submit_as_another_process)
    placed = submit(definition(), place, mark("a"))
    first, other = sorted(api.runs, key=lambda id: (api.runs[id]["created_at"], id))
    assert placed.id in (first, other)
    kept = [id for id, run in api.runs.items() if run["state"] == "RUNNING"]
    assert kept == [placed.id]


FAULTS: dict[str, list[Fault]] = {
    "too many calls": [Fault("POST runs", 429)] * 2,
    "a service that is away for a while": [Fault("POST runs", 503) for _ in range(3)],
    "connections that break": [Fault("GET experiments", 0), Fault("POST runs", 0)],
    "an answer that is lost": [Fault("POST runs", 0, after=True)],
    "a gateway that gave up too early": [Fault("POST runs", 504, after=True)],
}


@pytest.mark.parametrize("case", FAULTS)
def test_whatever_befalls_a_submission_is_one_run(case: str, server: Served) -> None:
    api, place = server
    api.faults = list(FAULTS[case])
    placed = submit(definition(), place, mark("a"))
    assert api.faults == []
    assert list(api.runs) == [placed.id]


def test_of_two_that_submit_the_same_at_once_one_run_stays(server: Served) -> None:
    api, place = server
    made = definition()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: submit(made, place, mark("a")).id, range(2)))
    assert both[0] == both[1]
    going = [run["run_id"] for run in api.runs.values() if run["state"] == "RUNNING"]
    assert going == both[:1]


def test_a_pipeline_that_kfp_cannot_take_is_refused_with_its_own_sentence(server: Served) -> None:
    """It answers 500 where it makes no Workflow of it: asked once more, and not called away."""
    api, place = server
    api.faults = [Fault("POST runs", 500)] * 3
    with pytest.raises(PlatformError, match="as the test wants it") as refused:
        submit(definition(), place, mark("a"))
    assert not isinstance(refused.value, UnreachableError)
    assert "the server refuses it for the reason above" in refused.value.problems[0].fix
    assert len(api.faults) == 1


REFUSALS: dict[str, tuple[Fault, str]] = {
    "no permission": (Fault("POST runs", 403), "ask for the rights to run pipelines"),
    "no such API": (Fault("GET experiments", 404), "host is the API of Kubeflow Pipelines"),
    "something the service does not like": (Fault("POST runs", 400), "bug in rekindle"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_helped_is_said_with_a_way_out(case: str, server: Served) -> None:
    api, place = server
    fault, says = REFUSALS[case]
    api.faults = [fault]
    with pytest.raises(PlatformError, match=says) as caught:
        submit(definition(), place, mark("a"))
    assert caught.value.problems[0].where == f"{place.host}, namespace kubeflow"
    assert api.runs == {}


def test_what_the_config_lacks_and_tokens_that_are_not_good_are_said(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, place = server
    with pytest.raises(SpecError, match=r"set platforms\.kubeflow\.host"):
        submit(definition(), KubeflowSpec(), mark("a"))
    monkeypatch.setenv("KFP_TOKEN", "of somebody else")
    with pytest.raises(PlatformError, match="name a token that is good"):
        submit(definition(), place, mark("a"))
    monkeypatch.delenv("KFP_TOKEN")
    with pytest.raises(SpecError, match="export KFP_TOKEN"):
        submit(definition(), place, mark("a"))
    assert api.runs == {}


STEP = StepRecord(name="gather", log="pod-1")
CALLS: dict[str, Callable[[KubeflowSpec], object]] = {
    "submit": lambda place: submit(definition(), place, mark("a")),
    "describe": lambda place: runs.describe(place, "r"),
    "cancel": lambda place: runs.cancel(place, "r"),
    "resume": lambda place: runs.resume(definition(), place, "r", mark("a")),
    "log": lambda place: runs.read_log(place, "r", STEP, ""),
    "artifacts": lambda place: runs.artifacts(place, "r", STEP),
    "list schedules": schedule.list_schedules,
    "pause a schedule": lambda place: schedule.pause_schedule(place, "n"),
    "delete a schedule": lambda place: schedule.delete_schedule(place, "n"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_login_page_in_place_of_an_answer_is_no_answer(call: str, server: Served) -> None:
    """KFP's client makes an object without fields of it: a cancel seemed to be done."""
    api, place = server
    api.login_page = True
    with pytest.raises(PlatformError, match="something before KFP wants a login"):
        CALLS[call](place)
    with pytest.raises(RequestError, match="or wants a login: HTTP 200"):
        doctor.api(place)


def test_in_a_kubeflow_for_several_users_all_is_in_the_namespace_of_the_config(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not in that of a file that kfp keeps in the home, which may be another user's."""
    import kfp

    api, place = server
    api.multi_user = True
    api.namespaces = {"team-a", "team-b"}
    context = tmp_path / "context.json"
    context.write_text('{"namespace": "team-b"}')
    monkeypatch.setattr(kfp.Client, "_LOCAL_KFP_CONTEXT", str(context))
    mine = place.model_copy(update={"namespace": "team-a", "service_account": "default-editor"})
    made = definition()
    placed = submit(made, mine, mark("a"))
    assert not submit(made, mine, mark("a")).anew
    assert [one["namespace"] for one in api.experiments.values()] == ["team-a"]
    assert runs.describe(mine, placed.id).status == "running"
    theirs = mine.model_copy(update={"namespace": "team-b"})
    assert submit(made, theirs, mark("a")).anew
    wanted = ScheduleSpec(cron="0 3 * * *", overlap="queue")
    schedule.set_schedule(made, mine, wanted, "nightly")
    assert [one.id for one in schedule.list_schedules(mine)] == ["nightly"]
    assert schedule.list_schedules(theirs) == ()
    assert schedule.delete_schedule(mine, "nightly")
    strangers = mine.model_copy(update={"namespace": "team-c"})
    with pytest.raises(PlatformError, match="rights to run pipelines in the namespace team-c"):
        submit(made, strangers, mark("a"))


def set_nightly(place: KubeflowSpec) -> object:
    wanted = ScheduleSpec(cron="0 3 * * *", overlap="queue")
    return schedule.set_schedule(definition(), place, wanted, "nightly")


@pytest.mark.parametrize(
    ("request_name", "call"),
    [
        ("POST experiments", CALLS["submit"]),
        ("POST runs", CALLS["submit"]),
        ("POST recurringruns", set_nightly),
    ],
)
def test_what_was_made_and_has_no_id_is_no_answer(
    request_name: str, call: Callable[[KubeflowSpec], object], server: Served
) -> None:
    api, place = server
    api.answers_nothing = request_name
    with pytest.raises(PlatformError, match="KFP's server answered something that is no"):
        call(place)


def test_a_token_in_a_file_may_rotate_while_a_run_is_followed(
    server: Served, tmp_path: Path
) -> None:
    api, place = server
    file = tmp_path / "token"
    file.write_text(f"{api.token}\n")
    rotating = place.model_copy(update={"token": f"file:{file}"})
    placed = submit(definition(), rotating, mark("a"))
    api.token = "the next one"
    with pytest.raises(PlatformError, match=r"runs go on without it.*file:PATH"):
        runs.describe(place, placed.id)
    with pytest.raises(PlatformError, match="name a token that is good"):
        runs.describe(rotating, placed.id)
    file.write_text(api.token)
    assert runs.describe(rotating, placed.id).status == "running"
    assert masked(f"what {api.token} may do") == "what *** may do"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "the token cannot be read"), ("\n", "is empty")]
)
def test_a_file_without_a_token_is_said(
    content: str | None, message: str, server: Served, tmp_path: Path
) -> None:
    _, place = server
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SpecError, match=message):
        runs.describe(place.model_copy(update={"token": f"file:{file}"}), "r")


def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_SECONDS", 0.01)
    nowhere = KubeflowSpec(host="http://127.0.0.1:9")
    with pytest.raises(PlatformError, match="host answers; retry the command"):
        submit(definition(), nowhere, mark("a"))


def test_what_will_be_made_is_said_before() -> None:
    made, place = (
        definition(),
        KubeflowSpec(host="http://kfp", image=IMAGE, artifact_root="s3://b/r"),
    )
    planned = Kubeflow(place).preview(made, "a")
    assert planned.id == run_name(made, "a")
    assert all(one.machine == "pod" for one in planned.steps)
    text = compile_function(module("behaviour").gathered)
    spread = compile(text, read(text), {"folder": "x"}, place)
    assert Kubeflow(place).preview(spread, "a").steps[0] == PlannedStep("gather", "node", 3)


def test_a_cancel_whose_answer_is_lost_is_done_though_the_next_one_is_refused(
    server: Served,
) -> None:
    """KFP refuses to terminate what is being terminated (run_store.go, TerminateRun)."""
    api, place = server
    id = submit(definition(), place, mark("a")).id
    api.faults = [Fault("POST runs:terminate", 0, after=True)]
    runs.cancel(place, id)
    assert api.faults == []
    assert any("Row not found" in line for line in api.refused)
    assert runs.describe(place, id).status == "cancelled"
