"""How a run behaves: side by side, failing, retried, timed out, preempted, refused."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rekindle.app.pipeline import read_pipeline
from rekindle.errors import PreemptedError, RequestError, StepError
from rekindle.ir.read.pipeline import read
from rekindle.platforms.local.execute import ignored
from rekindle.platforms.local.store import is_alive
from rekindle.records import Ignored, RunRecord
from rekindle.spec.load import load_target
from tests.platforms.local.runs import graph, run, stored
from tests.support.local_execute import alive
from tests.support.read_pipeline import executor, minimal
from tests.support.results import outputs


def test_independent_steps_run_at_the_same_time(home: Path, folder: Path) -> None:
    record = run("meeting", home, {"folder": str(folder)})
    assert [step.parameters["Output"] for step in record.steps] == ["met", "met"]


def test_the_card_can_tell_the_order_of_steps_that_take_less_than_a_second(
    home: Path, folder: Path
) -> None:
    record = run("meeting", home, {"folder": str(folder)})
    assert all(re.fullmatch(r".*:\d\d\.\d{3}\+00:00", step.started_at) for step in record.steps)


def test_every_wrong_argument_is_named_at_once_and_nothing_is_written(home: Path) -> None:
    arguments = {"a": "three", "bb": 1, "s": 4, "items": {"x": 1}, "f": float("nan"), "b": 1}
    with pytest.raises(RequestError) as caught:
        run(graph("all_kinds", "same"), home, arguments)
    told = {problem.where: str(problem) for problem in caught.value.problems}
    assert told.keys() == {"a", "bb", "s", "items", "f", "b"}
    assert "did you mean `b`?" in told["bb"]
    assert "4 is not text" in told["s"]
    assert not home.exists()


def test_the_resource_of_a_job_is_one_name_that_begins_with_the_pipelines(home: Path) -> None:
    name = "says-its-job-r-1"
    record = run("says_its_job", home, run_id="r-1", env={**os.environ, name: "seen"})
    assert [step.parameters["Output"] for step in record.steps] == ["nees"], "read, and reversed"


def test_a_missing_argument_is_named(home: Path) -> None:
    with pytest.raises(RequestError, match="needs `folder`"):
        run("chain", home)
    assert not home.exists()


def test_a_failed_step_lets_its_siblings_finish_and_skips_the_rest(
    home: Path, folder: Path
) -> None:
    with pytest.raises(StepError) as caught:
        run("failing", home, {"folder": str(folder)}, run_id="r", max_parallel=2)
    record = stored(home, "r")
    by_name = {step.name: step for step in record.steps}
    assert record.status == "failed"
    assert by_name["fail"].status == "failed"
    assert by_name["fail"].error == "ValueError: no\nluck"
    assert by_name["count-3"].status == "skipped"
    assert by_name["count-3"].reason == "`fail` failed"
    assert by_name["count"].status == "succeeded"
    assert by_name["condition-1/count-2"].status in ("skipped", "succeeded")
    assert "step `fail` failed: ValueError: no\nluck" in str(caught.value)
    assert "Traceback" not in str(caught.value)
    log = caught.value.problems[0].where
    assert "Traceback" in Path(log).read_text()


def test_a_step_that_runs_while_another_fails_still_ends_well(home: Path, folder: Path) -> None:
    with pytest.raises(StepError):
        run("failing_beside", home, {"folder": str(folder)}, run_id="r")
    assert stored(home, "r").step("slow-make").status == "succeeded"
    assert run_again_is_cached(home, folder)


def run_again_is_cached(home: Path, folder: Path) -> bool:
    with pytest.raises(StepError):
        run("failing_beside", home, {"folder": str(folder)}, run_id="again")
    return stored(home, "again").step("slow-make").cached


def test_a_killed_step_is_called_killed(home: Path) -> None:
    with pytest.raises(StepError, match="killed by signal 9"):
        run("killed", home)


def test_a_failed_attempt_is_retried_as_often_as_the_pipeline_says(
    home: Path, folder: Path
) -> None:
    record = run(graph("retried", "same"), home, {"folder": str(folder)})
    assert record.steps[0].attempts == 3
    assert "attempt 2 failed" in Path(record.steps[0].log).read_text()


def test_retries_end(home: Path, folder: Path) -> None:
    with pytest.raises(StepError, match="exit code 3"):
        run("retrying", home, {"folder": str(folder)}, run_id="r")
    assert stored(home, "r").steps[0].attempts == 3


@pytest.mark.slow
def test_a_step_over_its_time_is_stopped_with_all_it_started(home: Path, folder: Path) -> None:
    with pytest.raises(StepError, match="timed out after 4 s"):
        run("timing_out", home, {"folder": str(folder)}, grace_seconds=5)
    assert (folder / "terminated").exists()
    assert not alive(folder)


def test_exit_code_75_means_preempted_and_is_not_retried(home: Path, folder: Path) -> None:
    with pytest.raises(PreemptedError) as caught:
        run("leaving", home, {"folder": str(folder)}, run_id="r")
    record = stored(home, "r")
    assert caught.value.exit_code == 75
    assert record.status == "preempted"
    assert [step.status for step in record.steps] == ["cancelled", "skipped"]
    assert record.steps[0].attempts == 1
    assert "resumes" in record.error


def test_a_step_ends_well_whose_library_still_reads_ahead(home: Path) -> None:
    record = run("abandoning", home)
    assert record.steps[0].parameters["Output"] == "done"
    assert "waited for\nregistered" in Path(record.steps[0].log).read_text()


def test_events_reach_the_caller_and_stay_in_the_log(home: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    record = run("speaking", home, on_event=lambda step, event: events.append((step, event)))
    assert events == [
        ("speaks", {"event": "progress", "step": 1, "steps": 2}),
        ("speaks", {"event": "progress", "step": 2, "steps": 2}),
    ]
    assert "::rekindle {broken" in Path(record.steps[0].log).read_text()


def test_every_change_is_on_disk_before_the_caller_sees_it(home: Path, folder: Path) -> None:
    seen: list[tuple[str, ...]] = []

    def look(record: RunRecord) -> None:
        assert stored(home, record.run_id) == record
        assert is_alive(home, record.run_id)
        seen.append(tuple(step.status for step in record.steps))

    record = run("chain", home, {"folder": str(folder)}, on_change=look)
    assert seen[0] == ("pending",) * 3
    assert seen[-1] == ("succeeded",) * 3
    assert stored(home, record.run_id) == record
    assert not is_alive(home, record.run_id)


def test_the_environment_given_is_the_steps_and_is_written_nowhere(home: Path) -> None:
    env = {**os.environ, "TOKEN": "s3cret-value"}
    pipeline = graph("environment")
    record = run(pipeline, home, {"name": "TOKEN"}, env=env)
    assert outputs(pipeline, record) == {"Output": "eulav-terc3s"}
    assert not [p for p in home.rglob("*") if p.is_file() and b"s3cret-value" in p.read_bytes()]


def test_packages_that_are_here_are_not_installed(home: Path) -> None:
    pipeline = graph("with_packages")
    record = run(pipeline, home)
    assert outputs(pipeline, record) == {"Output": "ran"}
    assert pipeline.steps()[0].container.requirements == ("pydantic>=2",)


@pytest.mark.slow
def test_pip_gets_the_options_of_the_pipeline(home: Path) -> None:
    with pytest.raises(RequestError, match="step `unsatisfied` cannot be installed") as caught:
        run("without_packages", home, env={**os.environ, "PIP_RETRIES": "0"})
    (problem,) = caught.value.problems
    assert "pip install --index-url https://example.invalid/simple --trusted-host" in problem.fix
    assert not (home / "runs").exists()


def test_steps_share_a_workspace_that_goes_with_the_run(home: Path) -> None:
    pipeline = graph("shares_workspace")
    for run_id in ("one", "two"):  # nothing of it comes from the cache
        record = run(pipeline, home, run_id=run_id)
        assert outputs(pipeline, record) == {"Output": "left"}
        assert {step.reason for step in record.steps} == {"it works in the workspace of the run"}
        assert not (home / "runs" / run_id / "workspace").exists()
    with pytest.raises(StepError, match="as asked"):
        run(pipeline, home, {"fail": True}, run_id="three")
    assert (home / "runs" / "three" / "workspace" / "left.txt").read_text() == "left"


def test_container_components_run_as_processes(home: Path) -> None:
    pipeline = graph("containers")
    record = run(pipeline, home)
    assert outputs(pipeline, record) == {"Output": "<a b>"}
    logs = sorted(Path(s.log).read_text() for s in record.steps if s.component.startswith("greets"))
    assert logs == ["hello, you !?\n", "nobody !?\n"]


def test_an_output_put_elsewhere_is_brought_home(home: Path, folder: Path) -> None:
    record = run("moved", home, {"folder": str(folder)})
    assert record.steps[1].parameters["Output"] == "moved"
    assert Path(record.steps[0].artifacts["data"].uri).is_relative_to(home)


def test_an_output_that_was_promised_and_not_written_fails_the_step(home: Path) -> None:
    with pytest.raises(StepError, match="did not write its output `out`"):
        run("promising", home)


def test_a_false_condition_skips_with_the_condition_as_the_reason(home: Path, folder: Path) -> None:
    pipeline = graph("branching")
    record = run(pipeline, home, {"folder": str(folder), "go": False})
    assert outputs(pipeline, record) == {"value": 2}
    reasons = {s.name: s.reason for s in record.steps if s.status == "skipped"}
    assert list(reasons.values()) == ["its condition is false: go == true"]


def test_a_condition_that_cannot_be_decided_fails_the_run(home: Path, folder: Path) -> None:
    with pytest.raises(StepError, match="needs `word`, which has no value") as caught:
        run("undecidable", home, {"folder": str(folder)}, run_id="r")
    assert caught.value.problems[0].where == "root.dag.tasks.condition-1.triggerPolicy.condition"
    record = stored(home, "r")
    assert record.status == "failed"
    assert "running" not in {step.status for step in record.steps}
    assert run("undecidable", home, {"folder": str(folder), "word": "go"}).status == "succeeded"


def test_a_caller_that_breaks_ends_the_run_and_its_processes(home: Path, folder: Path) -> None:
    def break_once(record: RunRecord) -> None:
        if (folder / "pids").exists():
            raise RuntimeError("no terminal")

    def wait_for_it(record: RunRecord) -> None:
        while record.steps[1].attempts and not (folder / "pids").exists():
            pass
        break_once(record)

    with pytest.raises(RuntimeError):
        run("hanging", home, {"folder": str(folder)}, run_id="r", on_change=wait_for_it)
    assert not alive(folder)
    assert stored(home, "r").status == "failed"
    assert "no terminal" in stored(home, "r").error


def test_not_a_number_travels_and_opens_no_gate(home: Path) -> None:
    pipeline = graph("nan")
    for _ in range(2):
        record = run(pipeline, home)
        assert outputs(pipeline, record) == {"Output": True}
        assert [s.status for s in record.steps if s.component.startswith("kill")] == ["skipped"] * 2
    assert record.steps[0].cached


def test_what_this_machine_does_not_honour_is_said() -> None:
    assert ignored(graph("accelerated")) == (
        Ignored(what="CPU and memory limits are not enforced", asked_by=("kill-itself",)),
        Ignored(what="Accelerators are not provided", asked_by=("kill-itself",)),
        Ignored(
            what="Images are not used, steps run in this Python environment",
            asked_by=("python:3.11",),
        ),
    )


def test_the_image_of_the_shipped_pipeline_is_no_news() -> None:
    spec = load_target(Path(__file__).parents[3] / "configs" / "digits.yaml")
    shipped = read_pipeline(spec).graph
    assert [row for row in ignored(shipped) if "mage" in row.what] == []


@pytest.mark.slow
def test_one_run_id_is_one_run(home: Path, folder: Path) -> None:
    def again(record: RunRecord) -> None:
        with pytest.raises(RequestError, match="already going on"):
            run("chain", home, {"folder": str(folder)}, run_id="r")

    run("speaking", home, run_id="r", on_change=again)


@pytest.mark.parametrize("run_id", ["../x", "a/b", "", ".hidden"])
def test_a_run_id_is_no_path(run_id: str, home: Path) -> None:
    with pytest.raises(RequestError, match="not a run id"):
        run("speaking", home, run_id=run_id)


def test_a_placeholder_in_the_default_of_a_component_is_filled_in(home: Path) -> None:
    spec = minimal()
    text = {"parameterType": "STRING"}
    task = "{{$.pipeline_task_name}}"
    spec["components"] = {
        "comp-a": {
            "executorLabel": "exec-a",
            "inputDefinitions": {"parameters": {"n": {**text, "defaultValue": f"I am {task}"}}},
            "outputDefinitions": {"parameters": {"Output": text}},
        }
    }
    command = ["sh", "-c", 'printf "%s" "$0" > "$1"', "{{$.inputs.parameters['n']}}"]
    command += ["{{$.outputs.parameters['Output'].output_file}}"]
    spec["deploymentSpec"] = {"executors": {"exec-a": executor(command=command)}}
    spec["root"]["dag"]["tasks"] = {"a": {"componentRef": {"name": "comp-a"}}}
    record = run(read(yaml.safe_dump(spec)), home)
    assert record.steps[0].parameters == {"Output": "I am a"}
