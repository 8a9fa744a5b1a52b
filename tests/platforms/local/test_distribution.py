"""Steps on several nodes, from `distribute()` to processes on this machine."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import dsl

import rekindle
from rekindle.cli.main import invoke
from rekindle.errors import RequestError, StepError
from rekindle.ir.compile import compile_function
from rekindle.ir.distribution import Distribution
from rekindle.ir.read.pipeline import read
from rekindle.platforms.local.execute import ignored
from rekindle.report.timeline import last_lines
from tests.platforms.local.runs import graph, module, run, stored
from tests.support.results import outputs


def test_the_second_document_carries_what_was_asked() -> None:
    pipeline = graph("gathered")
    assert pipeline.find("gather").distribution == Distribution(nodes=3)  # type: ignore[union-attr]
    _, second = yaml.safe_load_all(compile_function(module("behaviour").gathered))
    assert second == {
        "platforms": {
            "rekindle": {"deploymentSpec": {"executors": {"exec-gather": {"nodes": 3.0}}}}
        }
    }


def test_every_node_runs_the_body_and_node_rank_0_has_the_outputs(home: Path, folder: Path) -> None:
    pipeline = graph("gathered")
    record = run(pipeline, home, {"folder": str(folder)})
    assert record.step("gather").parameters["Output"] == "3 nodes, heard of [1, 2]"
    assert outputs(pipeline, record) == {"Output": "made by 3 nodes"}
    places = {path.name: path.read_text() for path in folder.iterdir()}
    assert places.keys() == {"node-0", "node-1", "node-2"}
    assert len(set(places.values())) == 3, "nodes write to the same place"
    again = run(pipeline, home, {"folder": str(folder)})
    assert [step.cached for step in again.steps] == [True, True]


@pytest.mark.parametrize("bad", [0, 2])
def test_when_one_node_fails_the_others_end_and_its_log_is_named_and_shown(
    bad: int, home: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StepError, match=f"node {bad}: ValueError: node {bad} is bad") as caught:
        run("gathered", home, {"folder": str(folder), "bad_node": bad}, run_id="r")
    step = stored(home, "r").step("gather")
    assert step.status == "failed"
    there = Path(caught.value.problems[0].where)
    assert f"ValueError: node {bad} is bad" in there.read_text()
    assert (there.parent.name, step.failed_log) == (
        ("gather", "") if not bad else ("node-2", str(there))
    )

    def said(*words: str, code: int = 0) -> str:
        assert invoke([*words, f"--home={home}"]) == code
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert f"ValueError: node {bad} is bad" in said("status")
    assert f"ValueError: node {bad} is bad" in last_lines(there)[0]
    everything = said("logs").splitlines()
    assert f"node {bad} | ValueError: node {bad} is bad" in everything
    alone = said("logs", "--node", str(bad))
    assert f"\nValueError: node {bad} is bad\n" in alone
    assert "Got executor_input" not in alone
    assert "Got executor_input" in said("logs", "--node", str(bad), "--raw")
    assert "its nodes are 0, 1, 2" in said("logs", "--node", "9", code=2)
    assert "is not a length of time" in said("logs", "--since", "soon", code=2)


@pytest.mark.slow
def test_the_time_that_a_distribution_allows_is_kept(home: Path, folder: Path) -> None:
    with pytest.raises(StepError, match=r"timed out after 3\.6 s"):
        run("waits_for_ever", home, {"folder": str(folder)}, grace_seconds=5)
    assert (folder / "terminated").exists()


def test_a_machine_that_is_asked_for_is_said_to_be_ignored() -> None:
    said = str(ignored(graph("waits_for_ever"))[0])
    assert said == "Machines are not chosen, steps run on this one: hang"


@pytest.mark.slow
def test_torchrun_joins_the_ranks_of_all_nodes(home: Path, folder: Path) -> None:
    pipeline = graph("summed")
    assert outputs(pipeline, run(pipeline, home, {"folder": str(folder)})) == {"Output": 3.0}


@dsl.component(base_image="python:3.11", install_kfp_package=False)
def trains(save_to: str) -> str:
    return save_to


@dsl.pipeline
def inner(save_to: str) -> str:
    return trains(save_to=save_to).output


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"nodes": 0}, "runs on 1 to 4,096 nodes"),
        ({"nodes": 2, "gpus_per_node": -1}, "0 to 64 GPUs"),
        ({"nodes": 2, "accelerator": "H100"}, "set gpus_per_node, too"),
        ({"nodes": 2, "spot": True}, "checkpoint='NAME'"),
        ({"nodes": 2, "spot": True, "checkpoint": "x"}, "name one of its inputs: save_to"),
        ({"nodes": 2, "max_run_hours": 0.0}, "needs some time"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_is_written(
    wish: dict[str, Any], says: str
) -> None:
    with pytest.raises(RequestError, match=r"distribute\(trains\)") as caught:

        @dsl.pipeline
        def pipeline(save_to: str) -> None:
            rekindle.distribute(trains(save_to=save_to), **wish)

    assert says in str(caught.value)


def test_only_a_step_with_a_container_can_be_distributed() -> None:
    with pytest.raises(RequestError, match="is a pipeline, and only a step"):

        @dsl.pipeline
        def nested(save_to: str) -> None:
            rekindle.distribute(inner(save_to=save_to), nodes=2)

    with pytest.raises(RequestError, match="is an importer"):

        @dsl.pipeline
        def imports() -> None:
            rekindle.distribute(
                dsl.importer(artifact_uri="/x", artifact_class=dsl.Dataset), nodes=2
            )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "a number of `nodes`"),
        ({"nodes": 2.5}, "which is no int"),
        ({"nodes": 2.0, "spot": "yes"}, "which is no bool"),
        ({"nodes": 2.0, "colour": "red"}, "has no `colour`"),
        ({"nodes": 2.0, "spot": True}, "saves nothing"),
    ],
)
def test_a_second_document_that_makes_no_sense_is_refused(
    settings: dict[str, Any], says: str
) -> None:
    first, second = yaml.safe_load_all(compile_function(module("behaviour").gathered))
    second["platforms"]["rekindle"]["deploymentSpec"]["executors"]["exec-gather"] = settings
    with pytest.raises(RequestError, match=says):
        read(yaml.safe_dump_all([first, second]))
