"""Training jobs: several hosts, spot machines that go, secrets, the registry; executed against the
container contract."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rekindle.errors import UnsupportedError
from tests.platforms.local.runs import module
from tests.platforms.sagemaker.conftest import Submit
from tests.servers.aws.container import Failed
from tests.servers.aws.sagemaker import Pipelines
from tests.support.moto import KEYS
from tests.support.sagemaker_compile import compiled, definition
from tests.support.sagemaker_execution import what_came_of_it, what_came_of_it_here
from tests.support.two_steps import spread

BEHAVIOUR = module("behaviour")


@pytest.mark.slow
def test_a_training_job_of_two_spot_machines() -> None:
    made = definition(compiled(BEHAVIOUR.taken_away, {"save_to": "s3://lake/c"}, spot_wait_hours=2))
    counted, repeated, gate = made["Steps"]
    job = counted["Arguments"]
    assert (counted["Type"], repeated["Type"], gate["Type"]) == (
        "Training",
        "Processing",
        "Condition",
    )
    assert job["ResourceConfig"] == {
        "InstanceCount": 2,
        "InstanceType": "ml.m5.xlarge",
        "VolumeSizeInGB": 30,
    }
    assert job["EnableManagedSpotTraining"] is True
    assert job["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 86_400,
        "MaxWaitTimeInSeconds": 93_600,
    }
    assert "CheckpointConfig" not in job
    assert counted["RetryPolicies"][0]["ExceptionType"][0] == "SageMaker.CAPACITY_ERROR"
    (one,) = gate["Arguments"]["Conditions"]
    file = {"Get": f"Steps.{repeated['Name']}.PropertyFiles.result"}
    assert one["LeftValue"]["Std:JsonGet"]["PropertyFile"] == file


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "told"), [(2, "efa"), (1, None)])
def test_hosts_that_have_to_talk_are_told_how(nodes: int, told: str | None) -> None:
    files = compiled(spread(nodes, gpus_per_node=8, accelerator="H100")).files
    (task,) = (json.loads(text) for name, text in files.items() if name.endswith("task.json"))
    assert task["env"].get("FI_PROVIDER") == told


@pytest.mark.slow
def test_every_host_runs_the_body_and_the_first_has_the_outputs(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    execution = service.execute(submitted(BEHAVIOUR.gathered, {"folder": str(there)}))
    assert sorted(path.name for path in there.iterdir()) == ["node-0", "node-1", "node-2"]
    expected = what_came_of_it_here(tmp_path / "home", BEHAVIOUR.gathered, {"folder": str(here)})
    assert what_came_of_it(execution, service.s3) == expected
    assert expected["gather"][0] == {"Output": "3 nodes, heard of [1, 2]"}


@pytest.mark.slow
def test_a_host_that_fails_ends_the_job_with_its_message(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    made = submitted(BEHAVIOUR.gathered, {"folder": str(tmp_path), "bad_node": 2})
    with pytest.raises(Failed, match=r"^gather: ValueError: node 2 is bad, exit code 1"):
        service.execute(made)


@pytest.mark.slow
def test_spot_machines_that_are_taken_away_cost_no_work(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    made = submitted(BEHAVIOUR.taken_away, {"save_to": str(tmp_path)})
    saved = [tmp_path / f"saved-{node}" for node in (0, 1)]
    service.taken_away["count-to"] = lambda: all(
        path.exists() and path.read_text() == "5" for path in saved
    )
    execution = service.execute(made)
    assert execution.jobs["count-to"].statuses == ["Interrupted", "Completed"]
    starts = [(tmp_path / f"starts-{node}").read_text().split() for node in (0, 1)]
    assert starts == [["0", "5"], ["0", "5"]]
    assert execution.conditions == {"if-condition-1": True}
    assert execution.result("condition-1-keep", service.s3)["parameters"] == {
        "Output": "no token, 10"
    }


@pytest.mark.slow
def test_a_step_with_a_gpu_leaves_what_a_step_without_one_does(
    service: Pipelines, submitted: Submit, tmp_path: Path
) -> None:
    made = submitted(BEHAVIOUR.on_a_gpu, {})
    assert made["Steps"][0]["Arguments"]["ResourceConfig"]["InstanceType"] == "ml.g4dn.xlarge"
    execution = service.execute(made)
    expected = what_came_of_it_here(tmp_path / "home", BEHAVIOUR.on_a_gpu, {})
    assert what_came_of_it(execution, service.s3) == expected
    assert all(job.cached for job in service.execute(made).jobs.values())


@pytest.mark.slow
def test_a_secret_is_named_in_the_definition_and_known_to_the_step(
    service: Pipelines, submitted: Submit, aws: str, tmp_path: Path
) -> None:
    import boto3

    (tmp_path / "saved-0").write_text("10")
    (tmp_path / "saved-1").write_text("10")
    store = boto3.client("secretsmanager", endpoint_url=aws, **KEYS)
    arn = store.create_secret(Name="hub", SecretString="very secret")["ARN"]
    made = submitted(BEHAVIOUR.taken_away, {"save_to": str(tmp_path)}, secrets={"HF_TOKEN": arn})
    assert made["Steps"][0]["Arguments"]["Environment"]["REKINDLE_SECRET_HF_TOKEN"] == arn
    assert "very secret" not in str(made)
    result = service.execute(made).result("condition-1-keep", service.s3)
    assert result["parameters"] == {"Output": "very secret, 10"}
    with pytest.raises(UnsupportedError, match=r"platforms\.sagemaker\.secrets"):
        submitted(BEHAVIOUR.tells_a_secret, {}, secrets={"OTHER": arn})
    made = submitted(BEHAVIOUR.tells_a_secret, {}, secrets={"HF_TOKEN": arn})
    (job,) = service.execute(made).jobs
    result = service.execute(made).result(job, service.s3)
    assert result["parameters"] == {"Output": "very secret"[::-1]}, "of AWS here"
