"""A launcher that is killed anywhere, drained, cancelled or doubled: one job, never two, never an
orphan, and a healthy one is not lost."""

from __future__ import annotations

import pytest

pytest.importorskip("google.cloud.aiplatform_v1", reason="the service's protos are a developer's")

from tests.platforms.vertex.distributed import RUN, Task, check_result, ended, only, running, until
from tests.quick import first

STAGES = [
    "before create",
    "after create",
    "before token",
    "before run",
    "before list",
    "after list",
]


@pytest.mark.slow
@pytest.mark.parametrize("stage", first(1, STAGES))
def test_a_launcher_killed_at_any_call_leaves_one_job(stage: str, task: Task) -> None:
    gate = task.service.hold(stage)
    first = task.launcher()
    assert gate.reached.wait(30)
    first.kill()
    first.wait()
    gate.open.set()
    if "create" in stage:  # the service had the request
        until(lambda: task.service.jobs)
    code, told = ended(task.launcher("2"))
    assert code == 0, told
    assert only(task.service).state == "SUCCEEDED"
    check_result(task, "2", made_by="1" if "create" in stage else "2")


@pytest.mark.slow
@pytest.mark.parametrize("state", first(1, ["RUNNING", "QUEUED", "SUCCEEDED"]))
def test_a_launcher_killed_while_it_follows_is_followed_by_another(state: str, task: Task) -> None:
    task.behave = "wait" if state == "RUNNING" else "ok"
    if state == "QUEUED":
        task.service.capacity.clear()
    first = task.launcher(poll=60 if state == "SUCCEEDED" else 0.1)
    until(lambda: task.service.jobs and only(task.service).state == state)
    until(lambda: state != "RUNNING" or running(task))
    first.kill()
    first.wait()
    second = task.launcher("2")
    lists = task.service.calls["list"]
    until(lambda: task.service.calls["list"] > lists)
    task.service.capacity.set()
    (task.folder / "go").touch()
    code, told = ended(second)
    assert code == 0, told
    assert only(task.service).state == "SUCCEEDED"
    check_result(task, "2", made_by="1")


@pytest.mark.slow
def test_two_launchers_at_once_share_the_older_job(task: Task) -> None:
    task.behave = "wait"
    gate = task.service.hold("after list")
    first = task.launcher()
    assert gate.reached.wait(30)  # it knows of no job, and does not hear of the second's
    second = task.launcher("2")
    until(lambda: running(task))
    gate.open.set()
    until(lambda: len(task.service.jobs) == 2)
    younger = list(task.service.jobs.values())[1]
    younger.wait_for("CANCELLED")
    (task.folder / "go").touch()
    assert [ended(first)[0], ended(second)[0]] == [0, 0]
    assert [job.state for job in task.service.jobs.values()] == ["SUCCEEDED", "CANCELLED"]
    check_result(task, "1", made_by="2")
    check_result(task, "2", made_by="2")


@pytest.mark.slow
def test_a_create_that_arrives_after_its_launcher_died_gives_way(task: Task) -> None:
    task.behave = "wait,wait"
    gate = task.service.hold("before create")
    first = task.launcher()
    assert gate.reached.wait(30)
    first.kill()
    second = task.launcher("2")
    until(lambda: running(task))
    gate.open.set()
    until(lambda: len(task.service.jobs) == 2)
    list(task.service.jobs.values())[1].wait_for("CANCELLED")
    (task.folder / "go").touch()
    assert ended(second)[0] == 0
    assert [job.state for job in task.service.jobs.values()] == ["SUCCEEDED", "CANCELLED"]


@pytest.mark.slow
def test_a_job_that_is_not_listed_yet_is_not_made_twice(task: Task) -> None:
    task.service.unlisted = 6
    code, told = ended(task.launcher())
    assert code == 0, told
    assert len(task.service.jobs) == 1
    assert task.service.calls["get"] > 0


@pytest.mark.slow
def test_a_create_whose_answer_is_lost_is_looked_for_before_it_is_made_again(task: Task) -> None:
    task.service.failures.append(("create", 503, "LOST", "no answer"))
    code, told = ended(task.launcher())
    assert code == 0, told
    assert "looking whether it is there" in told
    assert len(task.service.jobs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("state", first(1, ["RUNNING", "QUEUED"]))
def test_a_cancelled_run_takes_its_job_along(state: str, task: Task) -> None:
    task.behave = "wait"
    if state == "QUEUED":
        task.service.capacity.clear()
    launcher = task.launcher()
    until(lambda: task.service.jobs and only(task.service).state == state)
    until(lambda: state == "QUEUED" or running(task))
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    task.service.failures.append(("cancel", 503, "UNAVAILABLE", "try again"))
    launcher.terminate()
    code, told = ended(launcher)
    assert code == 143, told
    only(task.service).wait_for("CANCELLED")
    assert not list(task.service.folder.rglob("executor_output.json"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", first(1, STAGES))
def test_a_run_cancelled_at_any_call_of_its_launcher_leaves_nothing(stage: str, task: Task) -> None:
    task.behave = "wait"
    gate = task.service.hold(stage)
    launcher = task.launcher()
    assert gate.reached.wait(30)
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    launcher.terminate()
    gate.open.set()
    code, told = ended(launcher)
    assert code == 143, told
    for job in task.service.jobs.values():
        job.wait_for("CANCELLED")


@pytest.mark.slow
@pytest.mark.parametrize("stage", first(1, STAGES))
def test_a_launcher_drained_at_any_call_leaves_one_job(stage: str, task: Task) -> None:
    gate = task.service.hold(stage)
    first = task.launcher()
    assert gate.reached.wait(30)
    first.terminate()
    gate.open.set()
    assert ended(first)[0] == 143
    code, told = ended(task.launcher("2"))
    assert code == 0, told
    assert only(task.service).state == "SUCCEEDED"


@pytest.mark.slow
def test_a_task_that_is_cancelled_by_itself_takes_its_job_along(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task))
    details = [{"taskName": "fit", "state": "CANCELLING"}, {"taskName": "b", "state": "RUNNING"}]
    task.service.runs[RUN]["jobDetail"] = {"taskDetails": details}
    launcher.terminate()
    assert ended(launcher)[0] == 143
    only(task.service).wait_for("CANCELLED")


@pytest.mark.slow
@pytest.mark.parametrize("asked", first(1, ["the run goes on", "nobody knows"]))
def test_a_drained_launcher_leaves_its_job_to_the_next(asked: str, task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task))
    if asked == "nobody knows":
        task.service.denied.add("run")
    launcher.terminate()
    code, told = ended(launcher)
    assert code == 143, told
    assert "goes on" in told
    task.service.denied.clear()
    assert only(task.service).state == "RUNNING"
    (task.folder / "go").touch()
    assert ended(task.launcher("2"))[0] == 0
    check_result(task, "2", made_by="1")


@pytest.mark.parametrize("run", first(1, ["deleted", "failed"]))
@pytest.mark.parametrize("state", first(1, ["RUNNING", "QUEUED"]))
def test_a_job_without_a_launcher_ends_with_the_run(state: str, run: str, task: Task) -> None:
    task.behave = "wait"
    if state == "QUEUED":
        task.service.capacity.clear()
    launcher = task.launcher()
    until(lambda: task.service.jobs and only(task.service).state == state)
    launcher.kill()
    launcher.wait()
    if run == "failed":
        task.service.runs[RUN]["state"] = "PIPELINE_STATE_FAILED"
    else:
        task.service.runs.clear()
    task.service.capacity.set()
    only(task.service).wait_for("FAILED")
    until(lambda: any("the run is over" in x["textPayload"] for x in only(task.service).lines))


@pytest.mark.slow
def test_a_launcher_of_a_run_that_is_being_cancelled_starts_nothing(task: Task) -> None:
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    assert ended(task.launcher())[0] == 143
    assert not task.service.jobs


@pytest.mark.slow
def test_a_run_that_was_deleted_takes_its_job_along(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher(poll=60)
    until(lambda: running(task))
    task.service.runs.clear()
    launcher.terminate()
    assert ended(launcher)[0] == 143
    only(task.service).wait_for("CANCELLED")


@pytest.mark.slow
def test_a_launcher_cancelled_while_the_service_fails_still_cancels(task: Task) -> None:
    task.behave = "wait"
    launcher = task.launcher()
    until(lambda: running(task))
    task.service.failures += [("list", 503, "UNAVAILABLE", "try again")] * 5
    until(lambda: len(task.service.failures) <= 3)
    task.service.runs[RUN]["state"] = "PIPELINE_STATE_CANCELLING"
    launcher.terminate()
    code, told = ended(launcher)
    assert code == 143, told
    only(task.service).wait_for("CANCELLED")
