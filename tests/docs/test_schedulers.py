"""The files with which schedulers of clouds start `rekindle watch --once` (docs/watch.md)."""

import json

import pytest
import yaml

from rekindle.cli.watch import command
from tests.docs.blocks import ROOT

FOLDER = ROOT / "docs" / "watch"


def containers():
    """Of each file the container, and where its volumes are mounted."""
    (task,) = json.loads((FOLDER / "ecs-task.json").read_text())["containerDefinitions"]
    yield (
        task["command"],
        task["environment"],
        [one["containerPath"] for one in task["mountPoints"]],
    )
    run = yaml.safe_load((FOLDER / "cloud-run-job.yaml").read_text())["spec"]["template"]["spec"]
    app = yaml.safe_load((FOLDER / "container-apps-job.yaml").read_text())["properties"]
    for one in (*run["template"]["spec"]["containers"], *app["template"]["containers"]):
        yield one["args"], one["env"], [mount["mountPath"] for mount in one["volumeMounts"]]


@pytest.mark.parametrize(("words", "variables", "mounts"), [*containers()])
def test_a_container_looks_once_with_its_home_on_the_volume(words, variables, mounts):
    assert words[:2] == ["rekindle", "watch"]
    asked = {one["name"]: one["value"] for one in variables}
    (home,) = mounts
    assert asked["REKINDLE_HOME"] == home
    assert words[2].startswith(f"{home}/")
    given = command.make_context(
        "watch", [str(ROOT / "configs" / "digits.yaml"), *words[3:]]
    ).params
    assert (given["once"], given["as_json"], given["yes"]) == (True, True, True)
    assert given["platform"] in ("sagemaker", "vertex", "azureml")


@pytest.mark.parametrize(
    ("file", "service", "operation"),
    [
        ("ecs-task.json", "ecs", "RegisterTaskDefinition"),
        ("eventbridge-schedule.json", "scheduler", "CreateSchedule"),
    ],
)
def test_aws_knows_every_field(file, service, operation):
    session = pytest.importorskip("botocore.session", reason="boto3 is a developer's dependency")
    from botocore.validate import ParamValidator

    shape = session.get_session().get_service_model(service).operation_model(operation).input_shape
    body = json.loads((FOLDER / file).read_text())
    assert ParamValidator().validate(body, shape).generate_report() == ""
    assert "strange" in ParamValidator().validate(body | {"strange": 1}, shape).generate_report()


def test_what_is_started_is_what_was_registered():
    task = json.loads((FOLDER / "ecs-task.json").read_text())
    target = json.loads((FOLDER / "eventbridge-schedule.json").read_text())["Target"]
    assert target["EcsParameters"]["TaskDefinitionArn"].endswith(f"/{task['family']}")
    named = {one["sourceVolume"] for one in task["containerDefinitions"][0]["mountPoints"]}
    assert named == {one["name"] for one in task["volumes"]}
