"""What a run on a stock KFP left in the cluster's own store is read through KFP's UI, or it is said that
it cannot be."""

from __future__ import annotations

import copy
import json
from urllib.parse import parse_qs

import pytest

from rekindle.errors import PlatformError, UnreachableError
from rekindle.platforms.kubeflow import runs
from rekindle.records import Evidence, StepRecord
from tests.support.kubeflow_recorded import STEPS, Replay, recorded, replay_of

FOLDER = "minio://mlpipeline/v2/artifacts/continuous-training/ID/evaluate/1"
OUTPUTS = {"evaluation": f"{FOLDER}/evaluation", "plots": f"{FOLDER}/plots"}


class StockKfp(Replay):
    """A recorded run, and a UI in front of its API with some files."""

    files: dict[str, str]
    fault: tuple[int, str] | None = None

    def answer(self, path: str, query: str) -> tuple[int, str]:
        if path != "GET /artifacts/get":
            return super().answer(path, query)
        if self.fault:
            return self.fault
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        assert asked["source"] == "minio"
        assert asked["namespace"] == "kubeflow"
        key = f"minio://{asked['bucket']}/{asked['key']}"
        if key in self.files:
            return 200, self.files[key][: int(asked["peek"])]
        inside = [name for name in self.files if name.startswith(f"{key}/")]
        if inside:
            name = key.rpartition("/")[2]
            return 200, (
                f'Directory artifact "{name}" — {len(inside)} file(s). Download to view contents.\n'
            )
        return 404, f"No objects found at {asked['bucket']}/{asked['key']}"


def stock_kfp(outputs: dict[str, str], files: dict[str, str]) -> tuple[StockKfp, str]:
    """The recorded run of digits, whose driver planned these artifacts; and its id."""
    recording = recorded("rekindle-success")
    executor_input = {
        "inputs": {},
        "outputs": {
            "artifacts": {name: {"artifacts": [{"uri": uri}]} for name, uri in outputs.items()}
        },
    }
    words = ["/kfp-launcher/launch", "--executor_input", json.dumps(executor_input), "--", "sh"]
    patch = json.dumps({"containers": [{"name": "main", "command": words}]})
    workflow = copy.deepcopy(recording["workflow"])
    for node in workflow["status"]["nodes"].values():
        if ".evaluate-driver" in node["name"] and node["type"] == "Pod":
            node["outputs"] = {"parameters": [{"name": "pod-spec-patch", "value": patch}]}
    replay = replay_of(recording, STEPS["digits"], workflow)
    made = StockKfp(replay.answers)
    made.files = files
    return made, recording["run"]["run_id"]


def evidence() -> Evidence:
    return Evidence(
        run_key="1" * 16,
        promote=True,
        reason="Accuracy 0.97 meets the floor of 0.9.",
        checks=(),
        metrics={"accuracy": 0.97},
        rows=180,
        examples="sha256:1",
    )


STEP = StepRecord(name="evaluate", status="succeeded")


def test_evidence_in_the_clusters_own_store_is_found_and_read() -> None:
    text = evidence().to_json()
    kfp, id = stock_kfp(OUTPUTS, {OUTPUTS["evaluation"]: text, f"{OUTPUTS['plots']}/a.png": "x"})
    with kfp.serving() as place:
        artifacts = runs.artifacts(place, id, STEP)
        assert {name: a.metadata["record"] for name, a in artifacts.items()} == {
            "evaluation": "evidence"
        }
        content = runs.read(place, artifacts["evaluation"].uri)
    assert Evidence.model_validate_json(content) == evidence()


def test_a_record_in_a_folder_is_found_by_its_name() -> None:
    file = f"{OUTPUTS['evaluation']}/evidence.json"
    kfp, id = stock_kfp(OUTPUTS, {file: evidence().to_json()})
    with kfp.serving() as place:
        artifacts = runs.artifacts(place, id, STEP)
        assert artifacts["evaluation"].metadata["record"] == "evidence"
        assert runs.read(place, file)
        with pytest.raises(FileNotFoundError):
            runs.read(place, OUTPUTS["evaluation"])
        with pytest.raises(FileNotFoundError):
            runs.read(place, f"{FOLDER}/nothing")


FAULTS: dict[str, tuple[tuple[int, str], type[PlatformError], str]] = {
    "a host that is the API server alone": (
        (404, "404 page not found"),
        PlatformError,
        "set platforms.kubeflow.host to KFP's UI",
    ),
    "a user whom the UI does not know": (
        (401, "Authentication required for artifact access"),
        PlatformError,
        "set platforms.kubeflow.token",
    ),
    "a login page": (
        (200, "<html>Log in</html>"),
        PlatformError,
        "set platforms.kubeflow.token, or a host behind the login",
    ),
    "a store that the UI does not reach": (
        (500, "Failed to get object in bucket: Error: connect ECONNREFUSED"),
        UnreachableError,
        "svc/ml-pipeline-ui",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_read_is_said_with_what_to_do(case: str) -> None:
    fault, kind, fix = FAULTS[case]
    kfp, id = stock_kfp(OUTPUTS, {})
    kfp.fault = fault
    with kfp.serving() as place, pytest.raises(kind) as refused:
        runs.artifacts(place, id, STEP)
    (problem,) = refused.value.problems
    assert fix in problem.fix


def test_a_patch_of_another_form_has_no_artifacts() -> None:
    kfp, id = stock_kfp({}, {})
    with kfp.serving() as place:
        assert runs.artifacts(place, id, STEP) == {}
