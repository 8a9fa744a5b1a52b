"""Pipeline jobs for Azure ML: loaded and validated by azure-ai-ml, and executed as it would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import RequestError
from tests.platforms.local.runs import FLAT
from tests.quick import first
from tests.servers.azure.jobs import Failed, Workspace
from tests.support.azureml_compile import (
    BEHAVIOUR,
    SAME,
    compiled,
    job_of,
    stored,
    validated,
    what_came_of_it,
)
from tests.support.azureml_compile import workspace as workspace
from tests.support.sagemaker_execution import what_came_of_it_here
from tests.support.two_steps import changed, spread
from tests.support.two_steps import pipeline as two_steps


def here(home: Path, pipeline: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        name.replace("-", "_"): outcome
        for name, outcome in what_came_of_it_here(home, pipeline, arguments).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("case", FLAT)
def test_every_step_leaves_what_it_leaves_here(
    case: str, workspace: Workspace, tmp_path: Path
) -> None:
    pipeline, arguments, *_ = {**SAME.CASES, **SAME.KNOWN_BUGS}[case]
    file = stored(compiled(pipeline, arguments), tmp_path)
    validated(file)
    found = what_came_of_it(workspace.run(file))
    assert found == {
        name if name[0].isalpha() else f"x{name}": outcome
        for name, outcome in here(tmp_path / "home", pipeline, arguments).items()
    }


@pytest.mark.parametrize("n", first(1, [3, 1]))
def test_a_branch_that_is_not_taken_leaves_word_of_it(
    n: int, workspace: Workspace, tmp_path: Path
) -> None:
    done = workspace.run(stored(compiled(two_steps, {"n": n}), tmp_path))
    assert what_came_of_it(done) == here(tmp_path / "home", two_steps, {"n": n})
    assert done.keys() == {"make", "condition_1_use"}


def test_values_are_never_read_by_the_shell(workspace: Workspace, tmp_path: Path) -> None:
    text = 'it\'s "q" $(touch /tmp/owned) `x` ${HOME} é\n$HOME\\'
    file = stored(compiled(two_steps, {"n": 3, "text": text}), tmp_path)
    done = workspace.run(file, n=3, text=text)
    told = (done["make"] / "log-0").read_text()
    assert json.dumps(text)[1:-1].replace("\\u00e9", "é") in told.replace("\\u00e9", "é")
    assert not Path("/tmp/owned").exists()


def test_every_node_runs_the_body_and_the_first_has_the_outputs(
    workspace: Workspace, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    made = compiled(BEHAVIOUR.gathered, {"folder": str(there)})
    file = stored(made, tmp_path)
    sent = validated(file)["properties"]["jobs"]["gather"]
    assert sent["resources"]["instance_count"] == 3
    assert sent["distribution"] == {
        "distribution_type": "PyTorch",
        "process_count_per_instance": 1,
    }
    found = what_came_of_it(workspace.run(file))
    assert found["gather"][0] == {"Output": "3 nodes, heard of [1, 2]"}
    assert sorted(path.name for path in there.iterdir()) == ["node-0", "node-1", "node-2"]


def test_a_node_that_fails_ends_the_job(workspace: Workspace, tmp_path: Path) -> None:
    made = compiled(BEHAVIOUR.failing, {"folder": str(tmp_path)})
    with pytest.raises(Failed, match="ValueError: no"):
        workspace.run(stored(made, tmp_path))


def test_spot_machines_with_gpus_are_serverless(tmp_path: Path) -> None:
    made = compiled(spread(2, gpus_per_node=8, accelerator="H100", max_run_hours=2))
    (job,) = job_of(made)["jobs"].values()
    assert job["resources"] == {
        "instance_count": 2,
        "instance_type": "Standard_ND96isr_H100_v5",
        "shm_size": "16g",
    }
    assert job["limits"] == {"timeout": 7_200}
    made = compiled(BEHAVIOUR.taken_away, {"save_to": "x"})
    job = job_of(made)["jobs"]["count_to"]
    assert job["queue_settings"] == {"job_tier": "spot"}
    validated(stored(made, tmp_path))
    named = job_of(compiled(spread(1, gpus_per_node=1), gpu_compute="gpus"))
    assert named["jobs"]["make"]["compute"] == "azureml:gpus"


WRONG: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "an image without a digest": (
        two_steps,
        {"n": 1},
        {"image": "a.azurecr.io/b:1"},
        "is a mutable tag",
    ),
    "a missing argument": (two_steps, {}, {}, "needs `n`"),
    "more CPUs than there are": (
        changed(set_cpu_limit=["500"]),
        {},
        {},
        "no machine has the 500 CPUs",
    ),
    "an unknown accelerator": (
        changed(set_accelerator_type=["NVIDIA_X99"], set_accelerator_limit=[1]),
        {},
        {},
        "1 GPUs X99",
    ),
    "spot on a cluster": (
        BEHAVIOUR.taken_away,
        {"save_to": "x"},
        {"compute": "cpus"},
        "one tier for all",
    ),
    "an exit handler": (BEHAVIOUR.watched, {"folder": "x"}, {}, "exit handlers"),
    "a volume": (BEHAVIOUR.wants_a_volume, {"folder": "x"}, {}, "persistent volume claims"),
    "a loop over an output": (SAME.loop_over_an_output, {}, {}, "parallel_for"),
    "retries of several nodes": (spread(2, retry=True), {}, {}, "without the others"),
    "an image without Python": (BEHAVIOUR.containers, {}, {}, "busybox has no python3"),
    "an importer": (SAME.imported, {"uri": "/x"}, {}, "importers"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_request_is_refused_with_its_place_and_a_way_out(case: str) -> None:
    made, arguments, place, says = WRONG[case]
    with pytest.raises(RequestError) as caught:
        compiled(made, arguments, **place)
    assert caught.value.exit_code == 2
    assert says in str(caught.value)
    for problem in caught.value.problems:
        assert problem.where, problem
