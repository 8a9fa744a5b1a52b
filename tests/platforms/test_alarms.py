"""Alarms and dashboards: written to CloudWatch as moto plays it, to Cloud Monitoring and Azure Monitor as strict fakes
do, and as files; again, after the config changed, and after they were edited there by hand."""

from __future__ import annotations

import copy
import json

import pytest
import yaml

from rekindle.app import alarms
from rekindle.cli.main import invoke
from rekindle.platforms.api import platform_of
from rekindle.platforms.kubeflow.section import KubeflowSpec
from rekindle.platforms.sagemaker.section import SageMakerSpec
from rekindle.platforms.submission import Definition
from rekindle.platforms.vertex.section import VertexSpec
from rekindle.spec.model import Spec
from rekindle.spec.platforms import PlatformsSpec
from tests.docs.blocks import ROOT
from tests.platforms.azureml.conftest import service as azure_service  # noqa: F401 - a fixture
from tests.quick import first
from tests.servers.google.monitoring import Monitored
from tests.servers.google.rest import HOSTS, PROJECT, REGION, key_file
from tests.servers.tls_hosts import Hosts
from tests.support.azureml_client import PLACE as AZURE
from tests.support.moto import aws as aws
from tests.support.sagemaker_compile import PLACE as AWS

TOPIC = "arn:aws:sns:eu-central-1:123456789012:on-call"


class Service:
    """One service with what a test does to it by hand."""

    def __init__(self, name, settings, definition, kept, edit):
        self.name, self.settings, self.definition = name, settings, definition
        self.kept, self.edit = kept, edit

    def written(self, folder, *, force=False, name="reviews", **deploy):
        spec = Spec(name=name, platforms=PlatformsSpec(**{self.name: self.settings}), deploy=deploy)
        there = alarms.monitoring(
            platform_of(self.name, spec.platforms), spec, Definition(self.definition), folder
        )
        found = alarms.compared(there, spec)
        return (
            there,
            found,
            [(one.name, one.state) for one in alarms.write(there, found, force=force)],
        )


@pytest.fixture
def cloudwatch(aws, monkeypatch):
    boto3 = pytest.importorskip("boto3", reason="boto3 is a developer's dependency")
    for name, value in {
        "AWS_ENDPOINT_URL": aws,
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
    }.items():
        monkeypatch.setenv(name, value)
    api = boto3.client("cloudwatch", region_name=AWS["region"])
    settings = SageMakerSpec(**AWS, alarm_actions=(TOPIC,))

    def kept():
        found = api.describe_alarms()["MetricAlarms"]
        boards = [one["DashboardName"] for one in api.list_dashboards()["DashboardEntries"]]
        return {one["AlarmName"]: one for one in found} | dict.fromkeys(boards)

    def edit(name):
        fields = (
            "AlarmName",
            "AlarmDescription",
            "Namespace",
            "MetricName",
            "Dimensions",
            "Statistic",
            "Period",
            "EvaluationPeriods",
            "Threshold",
            "TreatMissingData",
            "ComparisonOperator",
        )
        there = kept()[name]
        api.put_metric_alarm(**{key: there[key] for key in fields} | {"Threshold": 3.0})

    yield Service("sagemaker", settings, {"reviews.json": b"{}"}, kept, edit)
    api.delete_alarms(AlarmNames=[name for name, one in kept().items() if one])
    for name in kept():
        api.delete_dashboards(DashboardNames=[name])


@pytest.fixture
def cloud_monitoring(tmp_path, monkeypatch):
    with Hosts(tmp_path, HOSTS, lambda asked: made.service.answer(asked)) as made:
        for name, value in made.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(key_file(tmp_path)))
        made.service = service = Monitored(tmp_path / "bucket")
        settings = VertexSpec(
            project=PROJECT,
            region=REGION,
            artifact_root="gs://lake/rekindle",
            alarm_actions=(f"projects/{PROJECT}/notificationChannels/1",),
        )

        def kept():
            policies = {
                one["userLabels"]["rekindle"]: one
                for one in service.alarms["alertPolicies"].values()
            }
            return policies | service.alarms["dashboards"]

        def edit(name):
            kept()[name]["combiner"] = "AND"

        found = Service("vertex", settings, {"pipeline.json": b"{}"}, kept, edit)
        found.service = service
        yield found
        assert [line for line in service.refused if "there is no rekindle-" not in line] == []


@pytest.fixture
def azure_monitor(azure_service):  # noqa: F811
    def kept():
        return {path.rpartition("/")[2]: one for path, one in azure_service.alarms.items()}

    def edit(name):
        kept()[name]["properties"]["severity"] = 0

    azure_service.alarms.clear()
    text = yaml.safe_dump({"experiment_name": "reviews"}).encode()
    settings = AZURE.model_copy(
        update={"alarm_actions": ("/subscriptions/x/actionGroups/on-call",)}
    )
    return Service("azureml", settings, {"job.yaml": text}, kept, edit)


@pytest.fixture
def files(tmp_path):
    folder = tmp_path / "alarms" / "reviews"

    def kept():
        return {file.name: yaml.safe_load(file.read_text()) for file in folder.glob("*")}

    def edit(name):
        (folder / name).write_text(
            (folder / name).read_text().replace("severity: warning", "severity: page")
        )

    return Service("kubeflow", KubeflowSpec(), {"pipeline.yaml": b""}, kept, edit)


@pytest.fixture(params=["cloudwatch", "cloud_monitoring", "azure_monitor", "files"])
def service(request):
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_written_again_changed_edited_and_deleted(service, tmp_path):
    there, found, told = service.written(tmp_path)
    assert {state for _, state in told} == {"created"}
    assert sorted(service.kept()) == sorted(one.name for one in found)
    before = copy.deepcopy(service.kept())
    _, _, told = service.written(tmp_path)
    assert {state for _, state in told} == {"unchanged"}
    assert service.kept() == before

    edited = found[0].name
    service.edit(edited)
    by_hand = copy.deepcopy(service.kept()[edited])
    _, _, told = service.written(tmp_path)
    assert [state for _, state in told] == ["edited", *["unchanged"] * (len(told) - 1)]
    assert service.kept()[edited] == by_hand, "what people changed stays"
    _, _, told = service.written(tmp_path, force=True)
    assert told[0] == (edited, "changed")
    assert service.written(tmp_path)[2][0] == (edited, "unchanged")

    for one in found:
        there.remove(one.kind, one.name)
        there.remove(one.kind, one.name)
    assert service.kept() == {}


@pytest.mark.parametrize("name", first(1, ["cloudwatch", "cloud_monitoring"]))
def test_only_the_alarms_that_the_config_moves_are_changed(request, name, tmp_path):
    service = request.getfixturevalue(name)
    service.written(tmp_path)
    told = dict(service.written(tmp_path, max_error_rate=0.2)[2])
    assert [one for one, state in told.items() if state == "changed"] == ["rekindle-reviews-errors"]
    assert {*told.values()} == {"changed", "unchanged"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cloudwatch", "cloud_monitoring"])
@pytest.mark.parametrize("actions", first(1, [True, False]))
def test_fields_that_are_zero_or_empty_are_no_edits(request, name, actions, tmp_path):
    """Google's JSON leaves out what is 0, "" or an empty list."""
    service = request.getfixturevalue(name)
    if not actions:
        service.settings = service.settings.model_copy(update={"alarm_actions": ()})
    for rate, state in ((0, "created"), (0.1, "changed"), (1e-5, "changed")):
        told = dict(service.written(tmp_path, max_error_rate=rate)[2])
        assert told["rekindle-reviews-errors"] == state
        told = service.written(tmp_path, max_error_rate=rate)[2]
        assert {again for _, again in told} == {"unchanged"}


@pytest.mark.slow
def test_what_people_add_stays_when_the_config_changes(cloudwatch, cloud_monitoring, tmp_path):
    import boto3

    name = "rekindle-reviews-errors"
    cloudwatch.written(tmp_path)
    alarm = cloudwatch.kept()[name]
    fields = (
        "AlarmName",
        "AlarmDescription",
        "AlarmActions",
        "EvaluationPeriods",
        "Threshold",
        "ComparisonOperator",
        "TreatMissingData",
        "Metrics",
    )
    boto3.client("cloudwatch", region_name=AWS["region"]).put_metric_alarm(
        **{field: alarm[field] for field in fields}, OKActions=[TOPIC]
    )
    assert dict(cloudwatch.written(tmp_path, max_error_rate=0.2)[2])[name] == "changed"
    found = cloudwatch.kept()[name]
    assert (found["OKActions"], found["Threshold"]) == ([TOPIC], 0.2)

    cloud_monitoring.written(tmp_path)
    cloud_monitoring.kept()[name]["severity"] = "CRITICAL"
    assert dict(cloud_monitoring.written(tmp_path, max_error_rate=0.2)[2])[name] == "changed"
    assert cloud_monitoring.kept()[name]["severity"] == "CRITICAL"


def test_labels_of_an_operator_stay_and_a_broken_file_is_an_edited_one(files, tmp_path):
    files.written(tmp_path)
    rules = tmp_path / "alarms" / "reviews" / "prometheusrule.yaml"
    rules.write_text(
        rules.read_text().replace("metadata:\n", "metadata:\n  labels: {release: stack}\n")
    )
    files.settings = files.settings.model_copy(update={"namespace": "other"})
    assert files.written(tmp_path)[2][0] == ("prometheusrule.yaml", "changed")
    found = files.kept()["prometheusrule.yaml"]["metadata"]
    assert (found["labels"], found["namespace"]) == ({"release": "stack"}, "other")
    for broken in (b"{{{{", b"\xff\xfe", b"- 1"):
        rules.write_bytes(broken)
        assert files.written(tmp_path)[2][0] == ("prometheusrule.yaml", "edited")
        assert rules.read_bytes() == broken
        assert files.written(tmp_path, force=True)[2][0] == ("prometheusrule.yaml", "changed")


@pytest.mark.slow
@pytest.mark.parametrize("name", first(2, ["cloud_monitoring", "azure_monitor", "cloudwatch"]))
def test_names_that_look_alike_to_a_service_keep_their_own(request, name, tmp_path):
    service = request.getfixturevalue(name)
    made = [service.written(tmp_path, name=config) for config in ("a.b", "a-b", "a_b")]
    assert {state for _, _, told in made for _, state in told} == {"created"}
    there, found, _ = made[0]
    for one in found:
        there.remove(one.kind, one.name)
    for config in ("a-b", "a_b"):
        assert {state for _, state in service.written(tmp_path, name=config)[2]} == {"unchanged"}


def test_a_policy_that_two_writers_made_goes_whole(cloud_monitoring, tmp_path):
    there, found, _ = cloud_monitoring.written(tmp_path)
    policy = next(one for one in found if one.kind == "policy")
    service = cloud_monitoring.service.alarms["alertPolicies"]
    service["9999"] = {
        **next(iter(service.values())),
        "name": f"projects/{PROJECT}/alertPolicies/9999",
    }
    for one in found:
        there.remove(one.kind, one.name)
    assert service == {}, policy


def test_alarms_of_an_endpoint_that_is_gone_go_too(azure_monitor, azure_service, tmp_path):  # noqa: F811
    there, *_ = azure_monitor.written(tmp_path)
    azure_service.endpoints.there[there.endpoint.path.strip("/")] = {
        "location": "westeurope",
        "properties": {},
    }
    _, _, told = azure_monitor.written(tmp_path)
    assert ("rekindle-reviews-slow", "created") in told
    azure_service.endpoints.there.clear()
    spec = Spec(name="reviews", platforms=PlatformsSpec(azureml=azure_monitor.settings))
    assert "rekindle-reviews-slow" not in [one.name for one in alarms.compared(there, spec)]
    for one in alarms.compared(there, spec, every=True):
        assert one.state != "edited"
        there.remove(one.kind, one.name)
    assert azure_monitor.kept() == {}


def test_an_alarm_that_somebody_else_has_under_the_name_stays(cloudwatch, tmp_path):
    import boto3

    boto3.client("cloudwatch", region_name=AWS["region"]).put_metric_alarm(
        AlarmName="rekindle-reviews-drift",
        Namespace="mine",
        MetricName="m",
        Statistic="Sum",
        Period=60,
        EvaluationPeriods=1,
        Threshold=1,
        ComparisonOperator="GreaterThanThreshold",
    )
    told = dict(cloudwatch.written(tmp_path)[2])
    assert told["rekindle-reviews-drift"] == "edited"
    assert cloudwatch.kept()["rekindle-reviews-drift"]["Namespace"] == "mine"


def test_alarms_of_an_endpoint_are_about_the_endpoint(cloudwatch, tmp_path):
    cloudwatch.written(tmp_path, max_error_rate=0.05)
    errors = cloudwatch.kept()["rekindle-reviews-errors"]
    assert "WHERE EndpointName = 'reviews'" in errors["Metrics"][0]["Expression"]
    assert (errors["Threshold"], errors["AlarmActions"]) == (0.05, [TOPIC])


def test_the_verb_writes_says_what_was_edited_and_deletes(tmp_path, capsys):
    config = tmp_path / "reviews.yaml"
    text = (ROOT / "configs" / "digits.yaml").read_text().replace("name: digits", "name: reviews")
    config.write_text(
        f"{text}\nplatforms: {{kubeflow: {{host: 'https://kubeflow.example.com'}}}}\n"
    )
    home, said = ["--home", str(tmp_path / "home")], capsys
    words = [
        "register.tracking_uri=https://mlflow.example.com",
        "data.source=s3://lake/digits.csv",
        "platforms.kubeflow.artifact_root=s3://lake/rekindle",
    ]
    asked = [
        str(config),
        *(f"--set={word}" for word in words),
        "--platform",
        "kubeflow",
        "--json",
        *home,
    ]
    assert invoke(["alarms", "write", *asked]) == 2, "without a terminal it has to be told --yes"
    assert "--yes" in said.readouterr().out
    assert invoke(["alarms", "write", *asked, "--yes"]) == 0
    told = json.loads(said.readouterr().out)
    assert [(one["name"], one["state"]) for one in told["alarms"]] == [
        ("prometheusrule.yaml", "created"),
        ("dashboard.json", "created"),
    ]
    rules = tmp_path / "home" / "alarms" / "reviews" / "prometheusrule.yaml"
    assert yaml.safe_load(rules.read_text())["kind"] == "PrometheusRule"
    assert invoke(["alarms", "write", *asked]) == 0, "what is the same needs no yes"
    said.readouterr()
    rules.write_text(rules.read_text().replace("severity: critical", "severity: page"))
    assert invoke(["alarms", "write", *asked, "--yes"]) == 3
    assert json.loads(said.readouterr().out)["alarms"][0]["state"] == "edited"
    assert invoke(["alarms", "delete", *asked, "--yes"]) == 3
    assert rules.exists()
    said.readouterr()
    assert invoke(["alarms", "delete", *asked, "--yes", "--force"]) == 0
    assert not rules.exists()
